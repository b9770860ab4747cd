"""The engine bundle's manifest: all that the runtime needs, and nothing of the build machine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from octavo.graphs.bindings import DType
from octavo.graphs.spec import (
    CacheDType,
    Device,
    FloatDType,
    Frozen,
    ModelSpec,
    PassRecord,
    Quantization,
    SpeculativeMethod,
)

FORMAT_VERSION = 1
CHUNK_BYTES = 64 << 20
DEFAULT_MAX_DRAFT_TOKENS = 16
MOST_DRAFT_TOKENS = 32

KvLayout = Literal["reference", "k_transposed", "split_nhd"]


class Limits(Frozen):
    """The largest step and request of an engine; the runtime may lower them, never raise them."""

    max_model_len: int = Field(ge=1, description="tokens of prompt and output of one request")
    max_num_seqs: int = Field(ge=1, description="sequences in one step")
    max_num_batched_tokens: int = Field(ge=1, description="tokens in one step")
    block_size: int = Field(ge=1, description="tokens in one cache block")

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)


class Range(Frozen):
    """Smallest, typical and largest size of a symbolic dimension."""

    min: int = Field(ge=0)
    opt: int = Field(ge=0)
    max: int = Field(ge=0)


class Profile(Frozen):
    """A named family of step shapes, such as decode: a range for each symbolic dimension."""

    name: str
    dims: dict[str, Range]


class BindingRecord(Frozen):
    name: str
    dtype: DType
    shape: tuple[str | int, ...]


Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class FileRecord(Frozen):
    """One file of the bundle; `path` is relative to the bundle, with forward slashes.

    `sha256` is that of the whole file, for anyone to compare. A file longer than CHUNK_BYTES also
    has that of each chunk, since several are hashed at once while an engine is loaded.
    """

    path: str
    size: int = Field(ge=0)
    sha256: Sha256
    chunks: tuple[Sha256, ...] = ()


class Target(Frozen):
    """The machines an engine runs on: the processor, its features that the files rely on, and for
    CUDA the compute capabilities that they were compiled for; none: any that the backend has."""

    architecture: str
    device: Device = "cpu"
    cpu_features: tuple[str, ...] = ()
    compute_capabilities: tuple[str, ...] = ()


class DrafterRecord(Frozen):
    """A drafter of an engine; a compiled one is a bundle of its own in the folder `path`.

    `prompt_lookup_min` and `prompt_lookup_max` bound the n-grams of the method "ngram".
    """

    method: SpeculativeMethod
    num_speculative_tokens: int = Field(ge=1)
    path: str | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None


class Manifest(Frozen):
    format_version: int = FORMAT_VERSION
    backend: str
    spec: ModelSpec
    limits: Limits
    dtype: FloatDType
    kv_cache_dtype: CacheDType
    kv_layout: KvLayout = "reference"
    quantization: Quantization = "none"
    inputs: tuple[BindingRecord, ...]
    outputs: tuple[BindingRecord, ...]
    profiles: tuple[Profile, ...]
    max_draft_tokens: int = Field(
        default=DEFAULT_MAX_DRAFT_TOKENS, ge=1, description="of one sequence in a verify step"
    )
    drafters: tuple[DrafterRecord, ...] = ()
    accept_file: str | None = Field(default=None, description="the graph of rejection sampling")
    passes: tuple[PassRecord, ...] = ()
    target: Target
    versions: dict[str, str] = Field(description="version of every library that built the engine")
    # What a backend needs of its own, such as the names of its files.
    backend_data: dict[str, Any] = Field(default_factory=dict)
    files: tuple[FileRecord, ...] = ()

    @property
    def cache_block_bytes(self) -> int:
        return self.spec.cache_block_bytes(self.limits.block_size, self.kv_cache_dtype)

"""The protocol that every backend fulfils, and the typed values that cross it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # pydantic and torch stay off the import path of `octavo.runtime`
    from torch.export import ExportedProgram

    from octavo.backends.manifest import KvLayout, Limits, Manifest, Profile, Target
    from octavo.graphs.program import CapturedProgram
    from octavo.graphs.spec import CacheDType, Device, FloatDType, Quantization

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]


# How far Octavo's own tests have gone with a backend on a device.
Tested = Literal["run", "built", "simulated"]


@dataclass(frozen=True)
class StepInputs:
    """One flattened step, as `octavo.graphs.bindings` declares it; arrays are contiguous int32."""

    token_ids: Int32Array  # [T]
    positions: Int32Array  # [T]
    slot_mapping: Int32Array  # [T]
    block_tables: Int32Array  # [B, M]
    query_start_loc: Int32Array  # [B+1]
    prefix_offsets: Int32Array  # [B]
    logits_indices: Int32Array  # [L]
    features: Float32Array | None = None  # [T, F], for drafters that read hidden states


@dataclass(frozen=True)
class StepOutputs:
    """Both may be views that the next `run` overwrites: copy what must outlive the step."""

    logits: Float32Array  # [L, V]
    hidden_states: Float32Array | None = None  # [L, F] or [T, F], as the spec says


@dataclass(frozen=True)
class AcceptInputs:
    """The operands of `octavo.graphs.ops.accept`, by their names; V is the sampled vocabulary."""

    logits: Float32Array  # [L, V]
    edit_rows: Int32Array  # [E]
    edit_token_ids: Int32Array  # [E]
    edit_values: Float32Array  # [E]
    first_rows: Int32Array  # [L]
    draft_token_ids: Int32Array  # [L]
    draft_probs: Float32Array  # [P, V]
    prob_rows: Int32Array  # [L]
    temperature: NDArray[np.float64]  # [L]
    top_k: Int32Array  # [L]
    top_p: NDArray[np.float64]  # [L]
    min_p: NDArray[np.float64]  # [L]
    uniforms: NDArray[np.float64]  # [L, 2]


@dataclass(frozen=True)
class UnsupportedNode:
    node: str
    op: str
    reason: str


@dataclass(frozen=True)
class Report:
    """What a backend says of a captured graph: every node it cannot run, with the reason."""

    unsupported: tuple[UnsupportedNode, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.unsupported


@dataclass(frozen=True)
class Compatibility:
    """Whether this machine can run an engine; `reason` is one sentence when it cannot."""

    reason: str | None = None

    @property
    def ok(self) -> bool:
        return self.reason is None


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """What decides whether a backend can build an engine at all, known before any work is done."""

    dtype: FloatDType
    kv_cache_dtype: CacheDType
    quantization: Quantization = "none"
    device: Device = "cpu"
    # Of CUDA devices, such as "8.9"; empty where the backend's files run on all it supports.
    compute_capabilities: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TensorRtOptions:
    """Of `--tensorrt`; None leaves a choice to TensorRT."""

    builder_optimization_level: int = 3  # 0 to 5: longer builds, faster engines
    workspace_mib: int | None = None  # device memory that a layer may use while it runs
    weight_streaming: bool = False  # weights may stay in host memory
    timing_cache: str | None = None  # a file of measured kernels, read and written


@dataclass(frozen=True, kw_only=True)
class BuildOptions(EngineKind):
    """What the compiler asks of a backend for one engine."""

    limits: Limits
    profiles: tuple[Profile, ...]
    tensorrt: TensorRtOptions = field(default_factory=TensorRtOptions)


@dataclass(frozen=True)
class BuiltFiles:
    """What `Backend.build` wrote to the staging folder (paths relative to it)."""

    files: tuple[str, ...]
    target: Target
    kv_layout: KvLayout
    versions: Mapping[str, str]
    backend_data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadOptions:
    num_threads: int | None = None  # None = every core this process may use


class Executable(Protocol):
    """A loaded engine. Not thread-safe: one step at a time."""

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocates (again) the zeroed paged cache of every layer; must precede `run`."""

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Runs one step; keys and values go to the cache, logits come back.

        The same object may come again with new contents in its arrays.
        """

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies whole cache blocks of every layer, (source, destination) by (source, destination).

        In the given order: a block may be a source first and a destination later.
        """

    def accept(self, inputs: AcceptInputs) -> Int32Array:
        """Runs the acceptance graph: token_ids i32 [L], see `octavo.graphs.ops.accept`.

        BackendError where the engine was built without one.
        """

    def close(self) -> None:
        """Frees everything; harmless when called twice."""


class Backend(Protocol):
    name: str
    devices: tuple[Device, ...]  # the first is what it builds for where none is asked for
    libraries: tuple[str, ...]  # distributions that it runs engines with; of alternatives, any
    tested: Mapping[Device, Tested]

    def operators(self, kind: EngineKind) -> frozenset[str]:
        """Octavo's operators with kernels of their own, by torch name; the compiler keeps others
        out."""

    def require(self, kind: EngineKind, block_size: int) -> None:
        """Raises BuildError for what this backend cannot build on any machine."""

    def can_build(self, kind: EngineKind) -> Compatibility:
        """Whether this machine has what building takes beyond PyTorch; imports nothing heavy."""

    def can_run(self, device: Device) -> Compatibility:
        """Whether this machine has what engines for `device` take; imports nothing heavy."""

    def supports(self, program: CapturedProgram) -> Report:
        """Names every node that cannot be run."""

    def build(self, program: CapturedProgram, options: BuildOptions, staging: Path) -> BuiltFiles:
        """Writes the ahead-of-time artefact into `staging`."""

    def build_accept(self, exported: ExportedProgram, staging: Path) -> str | None:
        """Writes the acceptance graph (`octavo.graphs.accept`) into `staging`; returns its name.

        None where the backend has none: its engines serve drafters with acceptance="exact" only.
        """

    def check(self, manifest: Manifest) -> Compatibility:
        """`can_run`, and the engine's target and versions; imports nothing heavy."""

    def import_library(self) -> None:
        """Imports what `load` needs: afterwards, `load` is mostly outside the interpreter."""

    def load(self, bundle: Path, manifest: Manifest, options: LoadOptions) -> Executable:
        """Opens the engine of an already verified bundle."""

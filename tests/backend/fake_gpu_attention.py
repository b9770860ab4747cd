"""The package of the attention kernel as its contract says, without Triton and without a GPU.

Compiling takes seconds a kernel and what was compiled runs on a GPU only: these tests are about
what becomes of the kernels, not about the numbers that they give.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any

import pytest

from octavo.backends.gpu_attention.shape import AttentionShape

PACKAGE = "octavo.backends.gpu_attention"


@dataclass(frozen=True)
class KernelImage:
    capability: str
    shape: AttentionShape

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> KernelImage:
        fields = json.loads(content)
        return cls(fields["capability"], AttentionShape(**fields["shape"]))


def compile_image(shape: AttentionShape, capability: str) -> KernelImage:
    return KernelImage(capability, shape)


@dataclass(frozen=True)
class AttentionPointers:
    query: int
    key: int
    value: int
    kv_cache: int
    slot_mapping: int
    block_tables: int
    query_start_loc: int
    prefix_offsets: int
    sinks: int
    alibi_slopes: int
    output: int


Launch = tuple[AttentionPointers, int, int, int, int]


@dataclass
class LoadedAttention:
    image: KernelImage
    launches: list[Launch] = field(default_factory=list)
    closed: bool = False

    def launch(
        self,
        pointers: AttentionPointers,
        num_tokens: int,
        num_seqs: int,
        max_blocks: int,
        stream: int,
    ) -> None:
        self.launches.append((pointers, num_tokens, num_seqs, max_blocks, stream))

    def close(self) -> None:
        self.closed = True


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the fakes where the package is imported from."""
    parts: dict[str, dict[str, Any]] = {
        "": {"AttentionShape": AttentionShape, "__path__": []},
        ".shape": {"AttentionShape": AttentionShape},
        ".compiled": {"KernelImage": KernelImage, "compile_image": compile_image},
        ".launch": {"AttentionPointers": AttentionPointers, "LoadedAttention": LoadedAttention},
    }
    for suffix, members in parts.items():
        module = ModuleType(PACKAGE + suffix)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, PACKAGE + suffix, module)

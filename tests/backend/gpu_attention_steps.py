"""What the tests of the GPU attention kernels share: shapes, steps over a cache, the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from octavo.backends.gpu_attention import AttentionShape
from octavo.graphs.ops import paged_attention_torch

PLAIN = AttentionShape(
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    value_head_size=16,
    block_size=16,
    scale=0.3,
    causal=True,
    sliding_window=0,
    softcap=0.0,
    has_sinks=False,
    has_alibi=False,
    dtype="float32",
    cache_dtype="float32",
)


def attention_shape(**changes: Any) -> AttentionShape:
    return replace(PLAIN, **{"cache_dtype": changes.get("dtype", "float32"), **changes})


# The tensors of the operator, in its schema's order.
Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass
class Step:
    """The operands of one step; `kv_cache` holds the prefixes and is changed in place."""

    shape: AttentionShape
    query: Tensor
    key: Tensor
    value: Tensor
    kv_cache: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    query_start_loc: Tensor
    prefix_offsets: Tensor
    sinks: Tensor
    alibi_slopes: Tensor

    @property
    def operands(self) -> Operands:
        return (
            self.query,
            self.key,
            self.value,
            self.kv_cache,
            self.slot_mapping,
            self.block_tables,
            self.query_start_loc,
            self.prefix_offsets,
            self.sinks,
            self.alibi_slopes,
        )

    def reference(self) -> Tensor:
        """f32 [T, H, Dv]: the operator's reference on copies in float32, cache values as stored."""
        shape = self.shape
        key, value = (stored_values(x, shape) for x in (self.key, self.value))
        cache = self.kv_cache.float()
        return paged_attention_torch.paged_attention_(
            *(self.query.float(), key, value, cache, *self.operands[4:]),
            scale=shape.scale,
            causal=int(shape.causal),
            sliding_window=shape.sliding_window,
            softcap=shape.softcap,
            k_transposed=0,
        )


def stored_values(rows: Tensor, shape: AttentionShape) -> Tensor:
    """f32: rows after a stay in the cache; float8 saturates."""
    if shape.cache_dtype == shape.dtype:
        return rows.float()
    return rows.float().clamp(-448, 448).to(torch.float8_e4m3fn).float()


class Histories:
    """Whole sequences in one paged cache, of which steps take parts."""

    def __init__(self, shape: AttentionShape, lengths: Sequence[int], seed: int = 0) -> None:
        self.shape, self._lengths = shape, lengths
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, shape.dtype)

        def normal(length: int, heads: int, size: int) -> Tensor:
            return torch.randn(length, heads, size, generator=generator).to(dtype)

        self.query = [normal(n, shape.num_heads, shape.head_size) for n in lengths]
        self.key = [normal(n, shape.num_kv_heads, shape.head_size) for n in lengths]
        self.value = [normal(n, shape.num_kv_heads, shape.value_head_size) for n in lengths]
        blocks = [-(-n // shape.block_size) for n in lengths]
        order = torch.randperm(sum(blocks) + 3, generator=generator).int()
        self.tables = torch.split(order[: sum(blocks)], blocks)
        self.num_blocks = len(order)
        heads = shape.num_heads
        self._sinks = torch.linspace(-1.5, 2.5, heads if shape.has_sinks else 0)
        self._slopes = 2.0 ** -torch.arange(1.0, (heads if shape.has_alibi else 0) + 1)

    def empty_cache(self) -> Tensor:
        """Full of NaN: whatever reads a slot that nobody wrote shows it."""
        shape = self.shape
        sizes = (self.num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.row_size)
        return torch.full(sizes, float("nan")).to(getattr(torch, shape.cache_dtype))

    def slots(self, sequence: int, start: int, end: int) -> Tensor:
        positions, size = torch.arange(start, end), self.shape.block_size
        blocks: Tensor = self.tables[sequence][positions // size]
        return (blocks * size + positions % size).int()

    def step(self, parts: Sequence[tuple[int, int, int]], cache: Tensor | None = None) -> Step:
        """A step of (sequence, first token, count) each.

        Without a cache, one is made that holds all tokens before those parts.
        """
        if cache is None:
            cache = self.empty_cache()
            for sequence, start, _ in parts:
                self.preload(cache, sequence, start)
        starts = torch.tensor([0] + [count for _, _, count in parts]).cumsum(0).int()
        # Entries behind a sequence's blocks are never read.
        width = max(len(self.tables[sequence]) for sequence, _, _ in parts) + 1
        tables = torch.full((len(parts), width), -7, dtype=torch.int32)
        for row, (sequence, _, _) in enumerate(parts):
            tables[row, : len(self.tables[sequence])] = self.tables[sequence]

        def gathered(rows: list[Tensor]) -> Tensor:
            return torch.cat([rows[s][start : start + count] for s, start, count in parts])

        return Step(
            self.shape,
            gathered(self.query),
            gathered(self.key),
            gathered(self.value),
            cache,
            torch.cat([self.slots(s, start, start + count) for s, start, count in parts]),
            tables,
            starts,
            torch.tensor([start for _, start, _ in parts], dtype=torch.int32),
            self._sinks,
            self._slopes,
        )

    def preload(self, cache: Tensor, sequence: int, length: int) -> None:
        """Puts a prefix into the cache as earlier steps would have."""
        shape = self.shape
        slots = self.slots(sequence, 0, length).long()
        blocks, offsets = slots // shape.block_size, slots % shape.block_size
        key = stored_values(self.key[sequence][:length], shape).to(cache.dtype)
        value = stored_values(self.value[sequence][:length], shape).to(cache.dtype)
        cache[blocks, 0, :, offsets, : shape.head_size] = key
        cache[blocks, 1, :, offsets, : shape.value_head_size] = value

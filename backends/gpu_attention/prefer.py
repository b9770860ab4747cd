"""FlashInfer's attention in place of `attend`, where it is installed and can do the same.

Two promises of the Triton kernel do not hold with it. Its planning reads the step's lengths on the
host, so a step with it cannot be captured in a CUDA graph. And it sizes its tiles and splits by the
batch, so the last bits of a row may differ from batch to batch. Callers that promise either ask for
`paged_attention_` of torch_attention instead.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from octavo.backends.gpu_attention import torch_attention
from octavo.backends.gpu_attention.shape import AttentionShape

_HEAD_SIZES = (64, 128, 256)
_WORKSPACE_BYTES = 128 * 1024 * 1024  # what FlashInfer's documentation advises


def why_not(shape: AttentionShape) -> str | None:
    """A sentence with the first reason against FlashInfer, or None where it can be used."""
    if shape.has_sinks:
        return "FlashInfer's paged attention has no sinks: Triton's kernel is used"
    if shape.has_alibi:
        return "FlashInfer is not used with ALiBi slopes: Triton's kernel is used"
    if shape.head_size != shape.value_head_size:
        return (
            f"FlashInfer needs heads of one size and these are of {shape.head_size} and "
            f"{shape.value_head_size}: Triton's kernel is used"
        )
    if shape.head_size not in _HEAD_SIZES:
        return (
            f"FlashInfer has no kernel for heads of {shape.head_size}, only of "
            f"{', '.join(map(str, _HEAD_SIZES))}: Triton's kernel is used"
        )
    if shape.dtype == "float32" or shape.cache_dtype != shape.dtype:
        return (
            f"FlashInfer is used for float16 and bfloat16 and this is {shape.dtype} with a cache "
            f"of {shape.cache_dtype}: Triton's kernel is used"
        )
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed (package flashinfer-python): Triton's kernel is used"
    return None


class FlashInferAttention:
    """Plan once a step, then run once a layer of the same shape.

    The caches are ours: [N, 2, Hkv, block_size, D] is what FlashInfer calls "HND".
    """

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._shape = shape
        self._capability = torch_attention.capability_of(device)
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper: Any = BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="HND")
        self._sequences = 0
        self._end = 0

    def plan(
        self,
        block_tables: Tensor,  # i32 [B, M]
        query_start_loc: Tensor,  # i32 [B+1]
        prefix_offsets: Tensor,  # i32 [B]
    ) -> None:
        """Reads the lengths of a step on the host, which waits for the device.

        Sequences without tokens in this step are left out: FlashInfer takes none.
        """
        shape = self._shape
        counts = query_start_loc.cpu().diff()
        kept = counts > 0
        counts = counts[kept]
        self._sequences, self._end = len(counts), int(counts.sum())
        if not self._sequences:
            return
        totals = prefix_offsets.cpu()[kept] + counts
        pages = (totals + shape.block_size - 1) // shape.block_size
        tables = block_tables[kept.to(block_tables.device)]
        columns = torch.arange(tables.shape[1], device=tables.device)
        used = columns[None, :] < pages.to(tables.device)[:, None]
        dtype = getattr(torch, shape.dtype)
        self._wrapper.plan(
            _running_sum(counts),
            _running_sum(pages),
            tables[used],
            (totals - (pages - 1) * shape.block_size).int(),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_size,
            shape.block_size,
            causal=shape.causal,
            sm_scale=shape.scale,
            # It counts the keys before a token, and we the token too.
            window_left=shape.sliding_window - 1 if shape.sliding_window else -1,
            logits_soft_cap=shape.softcap or None,
            q_data_type=dtype,
            kv_data_type=dtype,
        )

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        query_start_loc: Tensor,
    ) -> Tensor:  # T [T, H, D]
        """Writes a layer's keys and values to its cache, then attends as planned."""
        output = query.new_empty(query.shape[0], self._shape.num_heads, self._shape.head_size)
        torch_attention.write_to_cache(
            key,
            value,
            kv_cache,
            slot_mapping,
            query_start_loc,
            output,
            self._shape,
            capability=self._capability,
        )
        if self._sequences:
            self._wrapper.run(query[: self._end].contiguous(), kv_cache, out=output[: self._end])
        return output


def paged_attention_(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    prefix_offsets: Tensor,
    sinks: Tensor,
    alibi_slopes: Tensor,
    shape: AttentionShape,
    planned: FlashInferAttention | None = None,
) -> Tensor:
    """Attention by what was planned for this step, else by Triton's kernel.

    `planned` is made where `why_not(shape)` is None, and planned once for all layers of a step.
    """
    if planned is not None:
        return planned.run(query, key, value, kv_cache, slot_mapping, query_start_loc)
    return torch_attention.paged_attention_(
        query,
        key,
        value,
        kv_cache,
        slot_mapping,
        block_tables,
        query_start_loc,
        prefix_offsets,
        sinks,
        alibi_slopes,
        shape,
    )


def _running_sum(counts: Tensor) -> Tensor:
    """i32 [n+1] from i32 [n], from 0 on."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()

"""The kernels on torch tensors through Triton's launcher: CUDA, or CPU under TRITON_INTERPRET=1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.backends.gpu_attention import configuration, kernels
from octavo.backends.gpu_attention.shape import AttentionShape
from octavo.backends.gpu_attention.tiles import choose_tile
from octavo.graphs.errors import BackendError

# What the interpreter plays. Its own casts to float8 do not round as devices do; those that the
# kernels spell out for devices before 8.9 do.
INTERPRETED_CAPABILITY = "8.0"


def paged_attention_(
    query: Tensor,  # T [T, H, Dk]
    key: Tensor,  # T [T, Hkv, Dk]
    value: Tensor,  # T [T, Hkv, Dv]
    kv_cache: Tensor,  # [N, 2, Hkv, block_size, max(Dk, Dv)], changed in place
    slot_mapping: Tensor,  # i32 [T]
    block_tables: Tensor,  # i32 [B, M]
    query_start_loc: Tensor,  # i32 [B+1]
    prefix_offsets: Tensor,  # i32 [B]
    sinks: Tensor,  # f32 [H] or [0]
    alibi_slopes: Tensor,  # f32 [H] or [0]
    shape: AttentionShape,
) -> Tensor:  # T [T, H, Dv]
    """Attention as the operator's schema says; reads nothing of device memory on the host."""
    capability = capability_of(query.device)
    output = query.new_empty(query.shape[0], shape.num_heads, shape.value_head_size)
    write_to_cache(
        key, value, kv_cache, slot_mapping, query_start_loc, output, shape, capability=capability
    )
    num_tokens, (num_seqs, max_blocks) = query.shape[0], block_tables.shape
    if num_tokens == 0 or num_seqs == 0:
        return output
    tile = choose_tile(shape, capability)
    attend: Any = kernels.attend
    attend[configuration.attend_grid(shape, tile, num_tokens, num_seqs)](
        query.contiguous(),
        stored(kv_cache, shape, capability),
        block_tables.contiguous(),
        query_start_loc,
        prefix_offsets,
        sinks,
        alibi_slopes,
        output,
        num_seqs,
        max_blocks,
        **configuration.attend_constants(shape, tile, capability),
        **configuration.attend_options(tile),
    )
    return output


def write_to_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    query_start_loc: Tensor,
    output: Tensor,  # rows behind the last sequence become zeros
    shape: AttentionShape,
    *,
    capability: str,
) -> None:
    """The first kernel alone."""
    if key.shape[0] == 0:
        return
    write: Any = kernels.write_kv_cache
    write[configuration.write_grid(shape, key.shape[0])](
        key.contiguous(),
        value.contiguous(),
        stored(kv_cache, shape, capability),
        slot_mapping,
        query_start_loc,
        output,
        query_start_loc.shape[0] - 1,
        **configuration.write_constants(shape, capability),
        **configuration.WRITE_OPTIONS,
    )


def stored(kv_cache: Tensor, shape: AttentionShape, capability: str) -> Tensor:
    """The cache as the kernels take it: bytes where the device does not know float8."""
    if not kv_cache.is_contiguous():
        raise BackendError(
            f"the paged cache has strides {kv_cache.stride()}, which the kernels do not follow: "
            "give a contiguous tensor"
        )
    if configuration.cache_mode(shape, capability) == 2:
        return kv_cache.view(torch.uint8)
    return kv_cache


def capability_of(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{major}.{minor}"
    return INTERPRETED_CAPABILITY

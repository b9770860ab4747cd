"""The torch reference of `octavo::paged_attention`: the oracle, and what eager mode runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.graphs.ops import torch_library
from octavo.graphs.ops.paged_attention import SCHEMA


def write_to_cache(
    key: Tensor,  # [T, Hkv, Dk]
    value: Tensor,  # [T, Hkv, Dv]
    kv_cache: Tensor,  # [N, 2, Hkv, block_size, row], changed in place
    slot_mapping: Tensor,  # i32 [T]
    k_transposed: int,
) -> None:
    block_size = kv_cache.shape[3]
    written = slot_mapping >= 0
    slots = slot_mapping[written].long()
    block, offset = slots // block_size, slots % block_size
    keys, values = key_value_planes(kv_cache, k_transposed)
    keys[block, :, offset, : key.shape[2]] = key[written]
    values[block, :, offset, : value.shape[2]] = value[written]


def key_value_planes(kv_cache: Tensor, k_transposed: int) -> tuple[Tensor, Tensor]:
    """Views of a cache's keys and values, both [N, Hkv, block_size, row]."""
    blocks, _, heads, block_size, row = kv_cache.shape
    keys = kv_cache[:, 0]
    if k_transposed:
        keys = kv_cache.view(blocks, 2, heads, row, block_size)[:, 0].transpose(2, 3)
    return keys, kv_cache[:, 1]


def _sequence_attention(
    query: Tensor,  # f32 [n, H, Dk], the last n tokens of the sequence
    keys: Tensor,  # f32 [S, Hkv, Dk]
    values: Tensor,  # f32 [S, Hkv, Dv]
    sinks: Tensor,
    alibi_slopes: Tensor,
    scale: float,
    causal: int,
    sliding_window: int,
    softcap: float,
) -> Tensor:  # f32 [n, H, Dv]
    new, heads = query.shape[:2]
    total, groups = keys.shape[0], heads // keys.shape[1]
    keys, values = (x.repeat_interleave(groups, 1).transpose(0, 1) for x in (keys, values))
    scores = query.transpose(0, 1) @ keys.transpose(1, 2) * scale  # [H, n, S]
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    query_positions = torch.arange(total - new, total, device=query.device)
    distance = torch.arange(total, device=query.device) - query_positions[:, None]  # [n, S]
    if alibi_slopes.numel():
        scores = scores + alibi_slopes[:, None, None] * distance
    if causal:
        scores = scores.masked_fill(distance > 0, float("-inf"))
    if sliding_window > 0:
        scores = scores.masked_fill(distance <= -sliding_window, float("-inf"))
    if sinks.numel():
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, new, 1)], -1)
    weights = scores.softmax(-1)[..., :total].nan_to_num()
    return (weights @ values).transpose(0, 1)


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
    scale: float,
    causal: int,
    sliding_window: int,
    softcap: float,
    k_transposed: int,
) -> Tensor:
    """Attention [T, H, Dv] as the schema describes it; `kv_cache` is changed in place."""
    write_to_cache(key, value, kv_cache, slot_mapping, k_transposed)
    key_plane, value_plane = key_value_planes(kv_cache, k_transposed)
    block_size = kv_cache.shape[3]
    attention = query.new_zeros(*query.shape[:2], value.shape[2])
    starts = query_start_loc.tolist()
    for sequence, prefix in enumerate(prefix_offsets.tolist()):
        start, end = starts[sequence], starts[sequence + 1]
        total = prefix + end - start
        table = block_tables[sequence, : -(-total // block_size)].long()
        keys, values = (
            plane[table].transpose(1, 2).flatten(0, 1)[:total].float()
            for plane in (key_plane, value_plane)
        )
        attention[start:end] = _sequence_attention(
            query[start:end].float(),
            keys[..., : key.shape[2]],
            values[..., : value.shape[2]],
            sinks,
            alibi_slopes,
            scale,
            causal,
            sliding_window,
            softcap,
        ).to(query.dtype)
    return attention


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    *operands_and_attributes: Any,
) -> tuple[Tensor, Tensor]:
    """The functional form that is captured: (attention, a changed copy of the cache)."""
    cache = kv_cache.clone()
    return paged_attention_(query, key, value, cache, *operands_and_attributes), cache


def _paged_attention_shape(
    query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, *_: object
) -> tuple[Tensor, Tensor]:
    attention = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
    return attention, torch.empty_like(kv_cache)


OPERATOR = torch_library.register(SCHEMA, paged_attention, _paged_attention_shape)

"""The torch references of `octavo::fused_paged_attention` and of its int8 form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.graphs.ops import torch_library
from octavo.graphs.ops.fused_paged_attention import INT8_SCHEMA, SCHEMA
from octavo.graphs.ops.paged_attention_torch import key_value_planes, paged_attention_
from octavo.graphs.ops.quantization import LARGEST

# The operands from slot_mapping to alibi_slopes, then the attributes from num_heads on.
Rest = Any
_STEP = 6


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: int) -> Tensor:
    """`x` [T, H, D], its first R elements turned; `cos`, `sin` [T, R]."""
    size = cos.shape[1]
    if size == 0:
        return x
    turned = x[..., :size]
    if interleaved:
        partner = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        partner = torch.cat([-second, first], -1)
    turned = turned * cos[:, None] + partner * sin[:, None]
    return torch.cat([turned, x[..., size:]], -1)


def _normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    if weight.shape[0] == 0:
        return x
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight


def _unpacked(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor,
    key_norm: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    interleaved: int,
    norm_epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """query [T, H, Dk], key [T, Hkv, Dk] and value [T, Hkv, Dv] as paged attention takes them."""
    keys = num_kv_heads * head_size
    sizes = [num_heads * head_size, keys]
    sizes.append(qkv.shape[1] - sum(sizes))
    heads = num_heads, num_kv_heads, num_kv_heads
    query, key, value = (
        part.reshape(part.shape[0], count, part.shape[1] // count)
        for part, count in zip(torch.split(qkv, sizes, 1), heads, strict=True)
    )
    query = _rotated(_normed(query, query_norm, norm_epsilon), cos, sin, interleaved)
    key = _rotated(_normed(key, key_norm, norm_epsilon), cos, sin, interleaved)
    return query, key, value


def fused_paged_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor,
    key_norm: Tensor,
    kv_cache: Tensor,
    *rest: Rest,
) -> tuple[Tensor, Tensor]:
    """(attention [T, H * Dv], a changed copy of the cache), as the schema describes them."""
    step, packing, attributes = rest[:_STEP], rest[_STEP : _STEP + 5], rest[_STEP + 5 :]
    query, key, value = _unpacked(qkv, cos, sin, query_norm, key_norm, *packing)
    cache = kv_cache.clone()
    attention = paged_attention_(query, key, value, cache, *step, *attributes)
    return attention.flatten(1), cache


def fused_paged_attention_int8(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor,
    key_norm: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor,
    *rest: Rest,
) -> tuple[Tensor, Tensor, Tensor]:
    """(attention, a changed copy of the cache, a changed copy of its scales)."""
    step, packing, attributes = rest[:_STEP], rest[_STEP : _STEP + 5], rest[_STEP + 5 :]
    query, key, value = _unpacked(qkv, cos, sin, query_norm, key_norm, *packing)
    cache, scales, k_transposed = kv_cache.clone(), kv_scales.clone(), attributes[-1]
    slot_mapping = step[0]
    for plane, tensor in enumerate((key, value)):
        _write_quantized(tensor, cache, scales, plane, slot_mapping, k_transposed)
    floats = _dequantized(cache, scales, k_transposed)
    # Everything is in the cache by now, so nothing is written.
    nothing = torch.full_like(slot_mapping, -1)
    attention = paged_attention_(query, key, value, floats, nothing, *step[1:], *attributes)
    return attention.flatten(1), cache, scales


def _write_quantized(
    rows: Tensor,  # f32 [T, Hkv, D]
    kv_cache: Tensor,  # i8 [N, 2, Hkv, block_size, row], changed in place
    kv_scales: Tensor,  # f32 [N, 2, Hkv, block_size], changed in place
    plane: int,
    slot_mapping: Tensor,
    k_transposed: int,
) -> None:
    largest = rows.abs().amax(-1)
    # The inverse of a denormal is infinite, and infinity times a zero is no number.
    inverse = (LARGEST / largest).clamp(max=torch.finfo(torch.float32).max)
    scaled = rows * torch.where(largest > 0, inverse, 0.0)[..., None]
    quantized = scaled.round().clamp(-LARGEST, LARGEST).to(torch.int8)
    written = slot_mapping >= 0
    slots = slot_mapping[written].long()
    block, offset = slots // kv_cache.shape[3], slots % kv_cache.shape[3]
    cache_plane = key_value_planes(kv_cache, k_transposed)[plane]
    cache_plane[block, :, offset, : rows.shape[2]] = quantized[written]
    kv_scales[block, plane, :, offset] = (largest / LARGEST)[written]


def _dequantized(kv_cache: Tensor, kv_scales: Tensor, k_transposed: int) -> Tensor:
    floats = kv_cache.float()
    for plane, values in enumerate(key_value_planes(floats, k_transposed)):
        values *= kv_scales[:, plane, ..., None]
    return floats


def _attention_shape(qkv: Tensor, packing: tuple[Any, ...]) -> Tensor:
    num_heads, num_kv_heads, head_size = packing[:3]
    value_columns = qkv.shape[1] - (num_heads + num_kv_heads) * head_size
    return qkv.new_empty(qkv.shape[0], value_columns // num_kv_heads * num_heads)


def _shapes(*arguments: Any) -> tuple[Tensor, Tensor]:
    attention = _attention_shape(arguments[0], arguments[len(SCHEMA.inputs) :])
    return attention, torch.empty_like(arguments[5])


def _int8_shapes(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    attention = _attention_shape(arguments[0], arguments[len(INT8_SCHEMA.inputs) :])
    return attention, torch.empty_like(arguments[5]), torch.empty_like(arguments[6])


OPERATOR = torch_library.register(SCHEMA, fused_paged_attention, _shapes)
INT8_OPERATOR = torch_library.register(INT8_SCHEMA, fused_paged_attention_int8, _int8_shapes)

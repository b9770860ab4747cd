"""`octavo::fused_paged_attention`: packed QKV, QK norm and rotary embedding, then paged attention.

Its int8 form keeps keys and values as 8-bit integers with one scale a token and head.
"""

from __future__ import annotations

from octavo.graphs.ops import paged_attention
from octavo.graphs.ops.schema import Attribute, Operand, OperatorSchema

_PACKED = (
    Operand("qkv", "float32", "[T, H * Dk + Hkv * Dk + Hkv * Dv], queries, keys, values"),
    Operand("cos", "float32", "[T, R], of each of the R rotated elements; [0, 0]: no rotary"),
    Operand("sin", "float32", "[T, R], or [0, 0]"),
    Operand("query_norm", "float32", "[Dk], or [0] for a model without QK norm"),
    Operand("key_norm", "float32", "[Dk], or [0]"),
)
_FLOAT_CACHE = Operand("kv_cache", "float32", "[N, 2, Hkv, block_size, max(Dk, Dv)]")
_INT8_CACHE = (
    Operand("kv_cache", "int8", "[N, 2, Hkv, block_size, max(Dk, Dv)]"),
    Operand("kv_scales", "float32", "[N, 2, Hkv, block_size]"),
)
_STEP = paged_attention.SCHEMA.inputs[4:]
_ATTENTION = Operand("attention", "float32", "[T, H * Dv]")
_ATTRIBUTES = (
    Attribute("num_heads", "int", "H"),
    Attribute("num_kv_heads", "int", "Hkv"),
    Attribute("head_size", "int", "Dk"),
    Attribute("interleaved", "int", "1: rotary turns elements 2 i and 2 i + 1; 0: i and i + R / 2"),
    Attribute("norm_epsilon", "float", "of the RMS norm of queries and keys"),
    *paged_attention.SCHEMA.attributes,
)
_DOC = (
    "Queries and keys are RMS-normed by head where a weight is given; then their first R elements "
    "are turned: y[i] = x[i] * cos[i] - x[j] * sin[i] and y[j] = x[j] * cos[j] + x[i] * sin[j] for "
    "every pair (i, j); then as PagedAttention."
)

SCHEMA = OperatorSchema(
    name="fused_paged_attention",
    onnx_name="FusedPagedAttention",
    inputs=(*_PACKED, _FLOAT_CACHE, *_STEP),
    outputs=(_ATTENTION, Operand("kv_cache_out", "float32", "the changed cache")),
    attributes=_ATTRIBUTES,
    doc=_DOC,
)
INT8_SCHEMA = OperatorSchema(
    name="fused_paged_attention_int8",
    onnx_name="FusedPagedAttentionInt8",
    inputs=(*_PACKED, *_INT8_CACHE, *_STEP),
    outputs=(
        _ATTENTION,
        Operand("kv_cache_out", "int8", "the changed cache"),
        Operand("kv_scales_out", "float32", "the changed scales"),
    ),
    attributes=_ATTRIBUTES,
    doc=(
        f"{_DOC} A token's key and value of a head go to the cache as integers with the scale "
        "m / 127, m their largest magnitude, rounded as by Quantize. Attention reads back "
        "scale * integer."
    ),
)

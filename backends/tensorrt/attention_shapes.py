"""Which attention kernels a model needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from octavo.graphs.errors import BuildError

if TYPE_CHECKING:
    from octavo.backends.gpu_attention import AttentionShape
    from octavo.graphs.spec import AttentionSpec, CacheDType, FloatDType, ModelSpec


def shapes_of(
    spec: ModelSpec, block_size: int, dtype: FloatDType, cache_dtype: CacheDType
) -> tuple[AttentionShape, ...]:
    """One for each kind of attention layer, in the order of their first layers."""
    if cache_dtype == "int8":
        raise BuildError(f"no attention kernel reads a cache of int8: build with one of {dtype}")
    shapes = [_shape(layer, block_size, dtype, cache_dtype) for layer in spec.layers]
    return tuple(dict.fromkeys(shapes))


def float32(value: float) -> float:
    """Attributes of ONNX nodes have 32 bits: what is compared with them is rounded alike."""
    return float(np.float32(value))


def _shape(
    layer: AttentionSpec,
    block_size: int,
    dtype: FloatDType,
    cache_dtype: FloatDType | Literal["float8_e4m3fn"],
) -> AttentionShape:
    from octavo.backends.gpu_attention import AttentionShape

    return AttentionShape(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_dim,
        value_head_size=layer.value_head_dim,
        block_size=block_size,
        scale=float32(layer.scale),
        causal=layer.causal,
        sliding_window=layer.sliding_window,
        softcap=float32(layer.softcap),
        has_sinks=layer.has_sinks,
        has_alibi=layer.has_alibi,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )

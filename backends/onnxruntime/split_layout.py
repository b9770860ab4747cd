"""The cache layout of `com.microsoft::PagedAttention`, which runs attention on CUDA.

The spec's one binding `kv_cache.{layer}` [N, 2, Hkv, block_size, D] becomes two inputs of the ONNX
graph, `key_cache.{layer}` and `value_cache.{layer}`, both [N, block_size, Hkv, D]; each shares its
buffer with an output. The manifest keeps the spec's names and calls the layout `split_nhd`.

Source: the operator's schema of ONNX Runtime 1.32, and `paged_attention_helper.h` and
`paged_attention.cc` for what its kernels demand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.graphs import bindings

if TYPE_CHECKING:
    from octavo.graphs.bindings import DType
    from octavo.graphs.spec import AttentionSpec, ModelSpec

# i32 [3] in host memory: the most new tokens of a sequence, the longest sequence, and again the
# longest sequence as the bound from below.
ATTENTION_METADATA = "attention_metadata"
# Of the graph that copies blocks: i64 [C] and i64 [C, 1].
COPY_SOURCES = "sources"
COPY_DESTINATIONS = "destinations"

SMALLEST_BLOCK_SIZE = 16
HEAD_SIZE_MULTIPLE = 8
LARGEST_HEAD_SIZE = 1024
LARGEST_FLASH_HEAD_SIZE = 256


@dataclass(frozen=True)
class SplitCache:
    """The keys or the values of one layer; a block is [block_size, num_kv_heads, head_size]."""

    name: str
    dtype: DType
    block_shape: tuple[int, int, int]

    @property
    def output_name(self) -> str:
        return bindings.cache_output_name(self.name)


def key_cache_name(layer: int) -> str:
    return f"key_cache.{layer}"


def value_cache_name(layer: int) -> str:
    return f"value_cache.{layer}"


def split_caches(spec: ModelSpec, block_size: int, dtype: DType) -> Iterator[SplitCache]:
    """Keys of layer 0, values of layer 0, keys of layer 1, ..."""
    for index, layer in enumerate(spec.layers):
        block_shape = (block_size, layer.num_kv_heads, layer.head_dim)
        yield SplitCache(key_cache_name(index), dtype, block_shape)
        yield SplitCache(value_cache_name(index), dtype, block_shape)


def flash_block_size(head_size: int) -> int:
    """FlashAttention's tile of keys, which may not straddle two blocks of the cache."""
    if head_size <= 64:
        return 256
    return 128 if head_size <= 128 else 64


def flash_fits(layers: tuple[AttentionSpec, ...], block_size: int) -> bool:
    """Whether ONNX Runtime can use FlashAttention in every layer: other kernels take any block
    size, and gather the keys of a prefill into one buffer first."""
    return bool(layers) and all(
        layer.head_dim <= LARGEST_FLASH_HEAD_SIZE
        and block_size % flash_block_size(layer.head_dim) == 0
        for layer in layers
    )

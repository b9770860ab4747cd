"""What both launchers, Triton's and the driver's, give the kernels: constants, arguments, grids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.backends.gpu_attention.shape import AttentionShape
from octavo.backends.gpu_attention.tiles import Tile, padded, parse_capability

Constant = int | float | bool
Option = int | bool  # of Triton's compiler
Grid = tuple[int, int, int]
KernelName = Literal["write_kv_cache", "attend"]

# The names of AttentionPointers and of the sizes, in the kernels' order; "*" marks pointers, "T"
# the queries' dtype and "C" the cache's, as Triton writes signatures.
ARGUMENTS: dict[KernelName, dict[str, str]] = {
    "write_kv_cache": {
        "key": "*T",
        "value": "*T",
        "kv_cache": "*C",
        "slot_mapping": "*i32",
        "query_start_loc": "*i32",
        "output": "*T",
        "num_seqs": "i32",
    },
    "attend": {
        "query": "*T",
        "kv_cache": "*C",
        "block_tables": "*i32",
        "query_start_loc": "*i32",
        "prefix_offsets": "*i32",
        "sinks": "*fp32",
        "alibi_slopes": "*fp32",
        "output": "*T",
        "num_seqs": "i32",
        "max_blocks": "i32",
    },
}
# The kernels read and write these 16 bytes at a time.
ALIGNED_ARGUMENTS = ("query", "key", "value", "kv_cache", "output")
ALIGNMENT = 16
# Products may be fused into sums: that is settled when a kernel is compiled, for all rows alike.
_FUSED: dict[str, Option] = {"enable_fp_fusion": True}
WRITE_OPTIONS: dict[str, Option] = {"num_warps": 1, **_FUSED}


@dataclass(frozen=True)
class TileSplit:
    """How BLOCK_M rows are shared between tokens and the query heads of a KV head."""

    tokens: int
    heads: int
    head_tiles: int  # tiles that a group of heads takes

    @staticmethod
    def of(group_size: int, block_m: int) -> TileSplit:
        heads = min(group_size, block_m)
        return TileSplit(block_m // heads, heads, -(-group_size // heads))


def cache_mode(shape: AttentionShape, capability: str) -> int:
    """CACHE of the kernels: 0 the queries' dtype, 1 float8 of the device, 2 float8 bit by bit."""
    if shape.cache_dtype == shape.dtype:
        return 0
    return 1 if parse_capability(capability) >= (8, 9) else 2


def write_constants(shape: AttentionShape, capability: str) -> dict[str, Constant]:
    return {
        "KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.group_size,
        "GROUP_PADDED": 1 << (shape.group_size - 1).bit_length(),
        **_sizes(shape, capability),
    }


def attend_constants(shape: AttentionShape, tile: Tile, capability: str) -> dict[str, Constant]:
    split = TileSplit.of(shape.group_size, tile.block_m)
    return {
        "KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.group_size,
        **_sizes(shape, capability),
        "SCALE": float(shape.scale),
        "CAUSAL": shape.causal,
        "WINDOW": shape.sliding_window,
        "SOFTCAP": float(shape.softcap),
        "SINKS": shape.has_sinks,
        "ALIBI": shape.has_alibi,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "TILE_TOKENS": split.tokens,
        "TILE_HEADS": split.heads,
        "HEAD_TILES": split.head_tiles,
    }


def attend_options(tile: Tile) -> dict[str, Option]:
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **_FUSED}


def write_grid(shape: AttentionShape, num_tokens: int) -> Grid:
    return num_tokens, shape.num_kv_heads, 1


def attend_grid(shape: AttentionShape, tile: Tile, num_tokens: int, num_seqs: int) -> Grid:
    """As many programs as B sequences of T tokens in all can ever need: no length is read."""
    split = TileSplit.of(shape.group_size, tile.block_m)
    return num_tokens // split.tokens + num_seqs, shape.num_kv_heads * split.head_tiles, 1


def _sizes(shape: AttentionShape, capability: str) -> dict[str, Constant]:
    return {
        "KEY_SIZE": shape.head_size,
        "KEY_PADDED": padded(shape.head_size),
        "VALUE_SIZE": shape.value_head_size,
        "VALUE_PADDED": padded(shape.value_head_size),
        "ROW_SIZE": shape.row_size,
        "BLOCK_SIZE": shape.block_size,
        "CACHE": cache_mode(shape, capability),
    }

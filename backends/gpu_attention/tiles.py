"""The tiles of the attention kernel for each compute capability, and which of them fit.

No value here has been measured. They follow from arithmetic: `block_m` rows (tokens times query
heads of one KV head) are so few that decode's compute hides behind its reading of the cache, and
the rest is the largest of a few sizes whose shared memory fits and whose sums the assembler keeps
in registers. Times on real devices should replace them.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.backends.gpu_attention.shape import AttentionShape
from octavo.graphs.errors import BuildError


@dataclass(frozen=True)
class Tile:
    block_m: int  # query rows of a program: the same for decode and prefill, so that bits agree
    block_n: int  # keys of a step of its loop
    num_warps: int
    num_stages: int  # key blocks in flight


@dataclass(frozen=True)
class CapabilityTiles:
    """Tiles in order of preference: the first that fits a shape is taken."""

    shared_memory: int  # bytes a thread block may have (CUDA C++ guide, technical specifications)
    half: tuple[Tile, ...]  # of float16 and bfloat16, which have tensor cores
    single: tuple[Tile, ...]  # of float32, which is multiplied without them


# Exact float32 products run on the plain cores: few rows keep them in registers.
_SINGLE = (
    Tile(block_m=16, block_n=32, num_warps=8, num_stages=2),
    Tile(block_m=16, block_n=16, num_warps=8, num_stages=2),
    Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
)
# 64 rows are the least that Hopper's and Blackwell's matrix instructions take.
_LARGE_SHARED_MEMORY = (
    Tile(block_m=64, block_n=64, num_warps=4, num_stages=3),
    Tile(block_m=64, block_n=64, num_warps=8, num_stages=2),
    Tile(block_m=64, block_n=32, num_warps=8, num_stages=2),
    Tile(block_m=64, block_n=16, num_warps=8, num_stages=1),
    Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
)
# 64 x 64 spills registers here, where products are summed in them.
_AMPERE = (
    Tile(block_m=64, block_n=32, num_warps=8, num_stages=3),
    Tile(block_m=64, block_n=16, num_warps=8, num_stages=2),
    Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
)
_SMALL_SHARED_MEMORY = (
    Tile(block_m=32, block_n=64, num_warps=4, num_stages=2),
    Tile(block_m=32, block_n=32, num_warps=4, num_stages=2),
    Tile(block_m=32, block_n=16, num_warps=8, num_stages=2),
    Tile(block_m=16, block_n=16, num_warps=8, num_stages=1),
)
_DEFAULT = CapabilityTiles(99 * 1024, _SMALL_SHARED_MEMORY, _SINGLE)
TILES = {
    "8.0": CapabilityTiles(163 * 1024, _AMPERE, _SINGLE),
    "8.6": CapabilityTiles(99 * 1024, _SMALL_SHARED_MEMORY, _SINGLE),
    "8.9": CapabilityTiles(99 * 1024, _SMALL_SHARED_MEMORY, _SINGLE),
    "9.0": CapabilityTiles(227 * 1024, _LARGE_SHARED_MEMORY, _SINGLE),
    "10.0": CapabilityTiles(227 * 1024, _LARGE_SHARED_MEMORY, _SINGLE),
    "12.0": CapabilityTiles(99 * 1024, _SMALL_SHARED_MEMORY, _SINGLE),
}


def parse_capability(capability: str) -> tuple[int, int]:
    """(8, 9) of "8.9"; BuildError for what is none or is older than the kernels allow."""
    major, dot, minor = capability.partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        raise BuildError(f"{capability!r} is no compute capability: give one such as 8.9")
    if int(major) < 8:
        raise BuildError(
            f"paged attention on GPUs needs compute capability 8.0 or newer, not {capability}: "
            "build for another device or with --device cpu"
        )
    return int(major), int(minor)


def tiles_of(capability: str) -> CapabilityTiles:
    """Those of the table, else ones that fit every device from 8.0 on."""
    parse_capability(capability)
    return TILES.get(capability, _DEFAULT)


def padded(size: int) -> int:
    """The power of two, 16 at least, that a head of `size` elements takes in a tile."""
    return max(16, 1 << (size - 1).bit_length())


def shared_bytes(shape: AttentionShape, tile: Tile) -> int:
    """An estimate of a program's shared memory: its queries, key and value blocks, and weights.

    The compiler decides; `compile_image` checks its number against the device's limit again.
    """
    key_size, value_size = padded(shape.head_size), padded(shape.value_head_size)
    queries = tile.block_m * key_size * shape.element_bytes
    stages = tile.num_stages * tile.block_n * (key_size + value_size) * shape.cache_bytes
    # A stage is converted to the queries' dtype before it is multiplied.
    converted = 0
    if shape.cache_bytes != shape.element_bytes:
        converted = tile.block_n * (key_size + value_size) * shape.element_bytes
    weights = tile.block_m * tile.block_n * shape.element_bytes
    return queries + stages + converted + weights


def fits(shape: AttentionShape, tile: Tile, capability: str) -> bool:
    return shared_bytes(shape, tile) <= tiles_of(capability).shared_memory


def require_fit(shape: AttentionShape, tile: Tile, capability: str) -> None:
    """BuildError for a tile that needs more shared memory than the device has."""
    needed, limit = shared_bytes(shape, tile), tiles_of(capability).shared_memory
    if needed > limit:
        raise BuildError(
            f"a tile of {tile.block_m} x {tile.block_n} with {tile.num_stages} stages needs about "
            f"{needed} bytes of shared memory for heads of {shape.head_size} and "
            f"{shape.value_head_size}, and compute capability {capability} has {limit}: take a "
            "smaller tile"
        )


def choose_tile(shape: AttentionShape, capability: str) -> Tile:
    """The tile for a shape on a device: the same for all rows of all batches."""
    tiles = tiles_of(capability)
    choices = tiles.single if shape.dtype == "float32" else tiles.half
    for tile in choices:
        if fits(shape, tile, capability):
            return tile
    smallest = choices[-1]
    raise BuildError(
        f"heads of {shape.head_size} and {shape.value_head_size} elements need "
        f"{shared_bytes(shape, smallest)} bytes of shared memory with the smallest tile, and "
        f"compute capability {capability} has {tiles.shared_memory}: run this model on another "
        "backend"
    )

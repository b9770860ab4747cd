"""Every binding of a paged decoder graph, declared once for the builder and the runtime.

The decoder takes a flattened batch: the T tokens of B sequences lie end to end, without padding.
Prefill, a chunk of a prefill, decode and verification are the same graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DType = Literal["int32", "int8", "float32", "float16", "bfloat16", "float8_e4m3fn"]

# Symbolic dimensions.
TOKENS = "T"  # tokens of all sequences in the step
SEQUENCES = "B"  # sequences in the step
SEQUENCES_PLUS_ONE = "B+1"
BLOCKS_PER_SEQUENCE = "M"  # width of the block tables
LOGITS_ROWS = "L"  # rows whose logits are wanted
CACHE_BLOCKS = "N"  # blocks of the paged cache

Dim = str | int


@dataclass(frozen=True)
class Binding:
    """One named input or output: `shape` mixes symbolic dimensions (str) and sizes (int)."""

    name: str
    dtype: DType
    shape: tuple[Dim, ...]
    meaning: str


TOKEN_IDS = Binding("token_ids", "int32", (TOKENS,), "tokens of all sequences, concatenated")
POSITIONS = Binding("positions", "int32", (TOKENS,), "position of each token in its sequence")
SLOT_MAPPING = Binding(
    "slot_mapping",
    "int32",
    (TOKENS,),
    "flat cache slot of each token (block * block_size + offset); -1 writes nothing",
)
BLOCK_TABLES = Binding(
    "block_tables", "int32", (SEQUENCES, BLOCKS_PER_SEQUENCE), "physical blocks of each sequence"
)
QUERY_START_LOC = Binding(
    "query_start_loc", "int32", (SEQUENCES_PLUS_ONE,), "where each sequence's tokens start in T"
)
PREFIX_OFFSETS = Binding(
    "prefix_offsets", "int32", (SEQUENCES,), "tokens of each sequence already in the cache"
)
LOGITS_INDICES = Binding("logits_indices", "int32", (LOGITS_ROWS,), "rows whose logits are wanted")

STEP_INPUTS = (
    TOKEN_IDS,
    POSITIONS,
    SLOT_MAPPING,
    BLOCK_TABLES,
    QUERY_START_LOC,
    PREFIX_OFFSETS,
    LOGITS_INDICES,
)

LOGITS_NAME = "logits"
HIDDEN_STATES_NAME = "hidden_states"
FEATURES_NAME = "features"


def logits(vocab_size: int) -> Binding:
    """f32 [L, vocab_size]: the rows asked for by `logits_indices`."""
    return Binding(
        LOGITS_NAME, "float32", (LOGITS_ROWS, vocab_size), "logits of the rows asked for"
    )


def hidden_states(rows: Literal["logits", "all"], size: int) -> Binding:
    """f32 [L, size], the rows of the logits, or [T, size], every token of the step."""
    return Binding(
        HIDDEN_STATES_NAME,
        "float32",
        (LOGITS_ROWS if rows == "logits" else TOKENS, size),
        "hidden states for drafters",
    )


def features(size: int) -> Binding:
    """f32 [T, size]: what a drafter reads beside the tokens, hidden states of its target."""
    return Binding(FEATURES_NAME, "float32", (TOKENS, size), "hidden states that a drafter reads")


def kv_cache_name(layer: int) -> str:
    return f"kv_cache.{layer}"


def kv_scales_name(layer: int) -> str:
    return f"kv_scales.{layer}"


def cache_output_name(name: str) -> str:
    """Name of the graph output that shares its buffer with the input `kv_cache.3`, say."""
    kind, _, layer = name.partition(".")
    return f"{kind}_out.{layer}"


def kv_cache_output_name(layer: int) -> str:
    """Name of the graph output that shares its buffer with `kv_cache.{layer}`."""
    return cache_output_name(kv_cache_name(layer))


def kv_cache(
    layer: int, num_kv_heads: int, block_size: int, row_size: int, dtype: DType
) -> Binding:
    """[N, 2, num_kv_heads, block_size, row_size]: keys at index 0 of the second axis, values at 1.

    `row_size` is the larger of the key and value head sizes. This is the reference layout; a
    backend may store a block's keys transposed and says so in the manifest (`kv_layout`).
    """
    return Binding(
        kv_cache_name(layer),
        dtype,
        (CACHE_BLOCKS, 2, num_kv_heads, block_size, row_size),
        "paged keys and values of one layer; input and output share one buffer",
    )


def kv_scales(layer: int, num_kv_heads: int, block_size: int) -> Binding:
    """[N, 2, num_kv_heads, block_size]: what an integer of an int8 cache is to be multiplied with.

    One scale for each token, head and plane, keys and values. Caches of floats have none.
    """
    return Binding(
        kv_scales_name(layer),
        "float32",
        (CACHE_BLOCKS, 2, num_kv_heads, block_size),
        "scales of one layer's int8 cache; input and output share one buffer",
    )

"""The two kernels of a paged attention layer, in Triton. Arguments in capitals are compiled in.

A program of `attend` owns BLOCK_M rows: TILE_TOKENS consecutive tokens of one sequence times
TILE_HEADS query heads of one KV head. It walks the keys that any of its rows sees in blocks of
BLOCK_N that start at multiples of BLOCK_N, from the first on. So a row meets the same key blocks in
the same order whatever else is in the batch; blocks that only its neighbours see multiply its sums
by one and add zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
FLOAT8_LARGEST = tl.constexpr(448.0)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _dot(left: tl.tensor, right: tl.tensor) -> tl.tensor:
    """The matrix product with float32 sums; float32 is multiplied as such, not as tf32."""
    if INTERPRETED:  # which would multiply bfloat16 by its bits
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _encode_float8(values: tl.tensor) -> tl.tensor:
    """float8_e4m3fn bits of float32 values within +-448 or NaN, rounded to nearest even."""
    bits = values.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    normal = rounded - (120 << 3)  # exponents are biased by 127 here and by 7 there
    # Adding 2^14 leaves multiples of 2^-9, the steps below the smallest normal number.
    stepped = (tl.abs(values) + 16384.0).to(tl.int32, bitcast=True)
    subnormal = stepped - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (sign | code).to(tl.uint8)


@triton.jit
def _decode_float8(codes: tl.tensor) -> tl.tensor:
    """float16 values, exact, of float8_e4m3fn bits."""
    wide = codes.to(tl.int32)
    # float16 has the same fields with one exponent bit more and a bias that is larger by 8.
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    values = bits.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), values).to(tl.float16)


@triton.jit
def _to_cache(values: tl.tensor, kv_cache: tl.tensor, CACHE: tl.constexpr) -> tl.tensor:
    """Values as the cache holds them. CACHE: 0 the same dtype, 1 float8, 2 float8 bits as bytes."""
    stored = values
    if CACHE > 0:
        exact = values.to(tl.float32)
        limited = tl.where(exact > FLOAT8_LARGEST, FLOAT8_LARGEST, exact)
        limited = tl.where(limited < -FLOAT8_LARGEST, -FLOAT8_LARGEST, limited)
        if CACHE == 1:
            stored = limited.to(kv_cache.dtype.element_ty)
        if CACHE == 2:
            stored = _encode_float8(limited)
    return stored


@triton.jit
def _from_cache(stored: tl.tensor, query: tl.tensor, CACHE: tl.constexpr) -> tl.tensor:
    """Cached values in the queries' dtype."""
    values = stored
    if CACHE == 2:
        values = _decode_float8(stored)
    return values.to(query.dtype.element_ty)


@triton.jit(do_not_specialize=["num_seqs"])
def write_kv_cache(
    key: tl.tensor,  # T [T, KV_HEADS, KEY_SIZE]
    value: tl.tensor,  # T [T, KV_HEADS, VALUE_SIZE]
    kv_cache: tl.tensor,  # [N, 2, KV_HEADS, BLOCK_SIZE, ROW_SIZE]
    slot_mapping: tl.tensor,  # i32 [T]; -1 writes nothing
    query_start_loc: tl.tensor,  # i32 [B+1]
    output: tl.tensor,  # T [T, KV_HEADS * GROUP, VALUE_SIZE]
    num_seqs: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    ROW_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CACHE: tl.constexpr,
) -> None:
    """Grid (T, KV_HEADS): a token's key and value of one head go to its slot.

    Tokens behind the last sequence, which no program of `attend` owns, get zeros as output.
    """
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    key_dims = tl.arange(0, KEY_PADDED)
    value_dims = tl.arange(0, VALUE_PADDED)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        block = (slot // BLOCK_SIZE).to(tl.int64)
        key_row = (block * 2 * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        value_row = key_row + KV_HEADS * BLOCK_SIZE
        row = token * KV_HEADS + kv_head
        keys = tl.load(key + row * KEY_SIZE + key_dims, mask=key_dims < KEY_SIZE, other=0.0)
        tl.store(
            kv_cache + key_row * ROW_SIZE + key_dims,
            _to_cache(keys, kv_cache, CACHE),
            mask=key_dims < KEY_SIZE,
        )
        values = tl.load(
            value + row * VALUE_SIZE + value_dims, mask=value_dims < VALUE_SIZE, other=0.0
        )
        tl.store(
            kv_cache + value_row * ROW_SIZE + value_dims,
            _to_cache(values, kv_cache, CACHE),
            mask=value_dims < VALUE_SIZE,
        )
    if token >= tl.load(query_start_loc + num_seqs):
        heads = tl.arange(0, GROUP_PADDED)
        rows = (token * KV_HEADS + kv_head) * GROUP + heads
        tl.store(
            output + rows[:, None] * VALUE_SIZE + value_dims[None, :],
            tl.zeros([GROUP_PADDED, VALUE_PADDED], output.dtype.element_ty),
            mask=(heads < GROUP)[:, None] & (value_dims < VALUE_SIZE)[None, :],
        )


@triton.jit
def _first_tile(
    query_start_loc: tl.tensor, sequence: tl.tensor, TILE_TOKENS: tl.constexpr
) -> tl.tensor:
    """The first of a sequence's tiles: each has as many as it needs, or one more."""
    return tl.load(query_start_loc + sequence) // TILE_TOKENS + sequence


@triton.jit
def _sequence_of(
    query_start_loc: tl.tensor, tile: tl.tensor, num_seqs: tl.tensor, TILE_TOKENS: tl.constexpr
) -> tl.tensor:
    """The last sequence whose first tile is not behind `tile`, by bisection."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if _first_tile(query_start_loc, middle, TILE_TOKENS) <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["num_seqs", "max_blocks"])
def attend(
    query: tl.tensor,  # T [T, KV_HEADS * GROUP, KEY_SIZE]
    kv_cache: tl.tensor,  # [N, 2, KV_HEADS, BLOCK_SIZE, ROW_SIZE]
    block_tables: tl.tensor,  # i32 [B, M]
    query_start_loc: tl.tensor,  # i32 [B+1]
    prefix_offsets: tl.tensor,  # i32 [B]
    sinks: tl.tensor,  # f32 [KV_HEADS * GROUP], read only if SINKS
    alibi_slopes: tl.tensor,  # f32 [KV_HEADS * GROUP], read only if ALIBI
    output: tl.tensor,  # T [T, KV_HEADS * GROUP, VALUE_SIZE]
    num_seqs: tl.tensor,
    max_blocks: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    ROW_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CACHE: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
) -> None:
    """Grid (T // TILE_TOKENS + B, KV_HEADS * HEAD_TILES): programs without tokens return."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    first_head = (tl.program_id(1) % HEAD_TILES) * TILE_HEADS  # within the group
    sequence = _sequence_of(query_start_loc, tile, num_seqs, TILE_TOKENS)
    start = tl.load(query_start_loc + sequence)
    count = tl.load(query_start_loc + sequence + 1) - start
    first_token = (tile - _first_tile(query_start_loc, sequence, TILE_TOKENS)) * TILE_TOKENS
    if first_token >= count:
        return
    prefix = tl.load(prefix_offsets + sequence)
    table = block_tables + sequence.to(tl.int64) * max_blocks

    rows = tl.arange(0, BLOCK_M)
    tokens = first_token + rows // TILE_HEADS
    group_heads = first_head + rows % TILE_HEADS
    owned = (rows < TILE_TOKENS * TILE_HEADS) & (tokens < count) & (group_heads < GROUP)
    heads = kv_head * GROUP + group_heads
    positions = prefix + tokens
    query_rows = (start + tokens).to(tl.int64) * (KV_HEADS * GROUP) + heads
    key_dims = tl.arange(0, KEY_PADDED)
    value_dims = tl.arange(0, VALUE_PADDED)
    queries = tl.load(
        query + query_rows[:, None] * KEY_SIZE + key_dims[None, :],
        mask=owned[:, None] & (key_dims < KEY_SIZE)[None, :],
        other=0.0,
    )

    # Scores are kept in units of log2(e), for exp2.
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        top = tl.load(sinks + heads, mask=owned, other=float("-inf")) * LOG2_E
        total = tl.where(top > float("-inf"), 1.0, 0.0)
    if ALIBI:
        slopes = tl.load(alibi_slopes + heads, mask=owned, other=0.0)
    sums = tl.zeros([BLOCK_M, VALUE_PADDED], tl.float32)

    end = prefix + count
    if CAUSAL:
        end = prefix + tl.minimum(first_token + TILE_TOKENS, count)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(prefix + first_token - WINDOW + 1, 0)
    for block_start in range(first_key // BLOCK_N * BLOCK_N, end, BLOCK_N):
        key_positions = block_start + tl.arange(0, BLOCK_N)
        # Blocks before the window may be another sequence's by now, those behind the end are none.
        stored = (key_positions >= first_key) & (key_positions < end)
        block = tl.load(table + key_positions // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)
        key_rows = (block * 2 * KV_HEADS + kv_head) * BLOCK_SIZE + key_positions % BLOCK_SIZE
        value_rows = key_rows + KV_HEADS * BLOCK_SIZE
        keys = tl.load(
            kv_cache + key_rows[:, None] * ROW_SIZE + key_dims[None, :],
            mask=stored[:, None] & (key_dims < KEY_SIZE)[None, :],
            other=0.0,
        )
        keys = _from_cache(keys, query, CACHE)
        scores = _dot(queries, tl.trans(keys)) * SCALE
        if SOFTCAP > 0:
            # tanh(x) = 1 - 2 / (exp(2x) + 1), without loss at either end.
            grown = tl.exp2(scores * (2.0 * LOG2_E / SOFTCAP))
            scores = SOFTCAP * (1.0 - 2.0 / (grown + 1.0))
        distance = key_positions[None, :] - positions[:, None]
        if ALIBI:
            scores = scores + slopes[:, None] * distance.to(tl.float32)
        visible = stored[None, :] & owned[:, None]
        if CAUSAL:
            visible = visible & (distance <= 0)
        if WINDOW > 0:
            visible = visible & (distance > -WINDOW)
        scores = tl.where(visible, scores * LOG2_E, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen no key yet has no top: exp2(-inf - 0) is the zero it needs.
        base = tl.where(new_top > float("-inf"), new_top, 0.0)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(
            kv_cache + value_rows[:, None] * ROW_SIZE + value_dims[None, :],
            mask=stored[:, None] & (value_dims < VALUE_SIZE)[None, :],
            other=0.0,
        )
        values = _from_cache(values, query, CACHE)
        weighted = _dot(weights.to(values.dtype), values)
        sums = sums * shrink[:, None] + weighted
        top = new_top

    result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(
        output + query_rows[:, None] * VALUE_SIZE + value_dims[None, :],
        result.to(output.dtype.element_ty),
        mask=owned[:, None] & (value_dims < VALUE_SIZE)[None, :],
    )

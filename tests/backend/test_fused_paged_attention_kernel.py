"""The native FusedPagedAttention and its int8 form: right against float64, exact where arithmetic
is, and the same bits in every schedule.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.graphs.ops.fused_paged_attention import INT8_SCHEMA, SCHEMA
from octavo.graphs.ops.quantization import LARGEST
from tests.backend.attention_steps import (
    Change,
    Chunk,
    Floats,
    History,
    assert_close,
    assert_same_bits,
    keep,
    open_session,
    put,
    reference,
    run_in_place,
    zeros,
)
from tests.backend.fused_attention_steps import (
    CASES,
    EVERYTHING,
    GROUPED,
    Fused,
    Int8Run,
    PackedHistory,
    Variant,
    both_caches,
    mixed_batch,
    prepared,
    random_histories,
)


@pytest.mark.parametrize("case", CASES)
def test_a_mixed_batch_matches_float64(variant: Variant, case: str) -> None:
    spec = CASES[case]
    histories = random_histories(spec)
    for chunk, output in mixed_batch(variant.run(spec, histories)):
        expected = prepared(spec, histories[chunk.sequence])
        assert_close(output, reference(spec, expected, chunk.start, chunk.count))


@pytest.mark.parametrize("case", CASES)
def test_integers_are_attended_as_scale_times_integer(variant: Variant, case: str) -> None:
    spec = CASES[case]
    histories = random_histories(spec)
    run = variant.int8_run(spec, histories)
    for chunk, output in mixed_batch(run):
        query = prepared(spec, histories[chunk.sequence]).query
        keys, values = (x[: chunk.start + chunk.count] for x in run.read_back(chunk.sequence))
        history: Any = (query, keys, values)
        assert_close(output, reference(spec, History(*history), chunk.start, chunk.count))


@both_caches
def test_a_context_of_several_segments_matches_float64(variant: Variant, int8: bool) -> None:
    spec = EVERYTHING
    history = PackedHistory.random(spec, 1300, 0)
    run = variant.run(spec, [history], int8=int8)
    run.step(Chunk(0, 0, 1290))
    (output,) = run.step(Chunk(0, 1290, 10))
    expected = prepared(spec, history)
    if isinstance(run, Int8Run):
        read_back: Any = run.read_back(0)
        expected = History(expected.query, *read_back)
    assert_close(output, reference(spec, expected, 1290, 10))


def exact_history(spec: Fused, length: int) -> PackedHistory:
    """Multiples of 1/8 turned by halves: float32 does not round them."""
    rng = np.random.default_rng(length)

    def numbers(*shape: int) -> Floats:
        return (rng.integers(-40, 41, shape) / 8).astype(np.float32)

    rotation = rng.choice([-1, -0.5, 0, 0.5, 1], (2, length, spec.rotary)).astype(np.float32)
    heads = numbers(length, spec.heads, spec.key_size)
    key = numbers(length, spec.kv_heads, spec.key_size)
    return PackedHistory(heads, key, numbers(length, spec.kv_heads, spec.value_size), *rotation)


def rounded(history: History) -> History:
    query, key, value = (x.astype(np.float32) for x in (history.query, history.key, history.value))
    return History(query, key, value)


@pytest.mark.parametrize("case", ["grouped", "nothing", "partial", "interleaved", "one_pair"])
def test_the_plain_op_gives_the_same_bits_for_what_was_turned_before(
    variant: Variant, case: str
) -> None:
    spec = CASES[case]
    history = exact_history(spec, 150)
    run = variant.run(spec, [history])
    before = rounded(prepared(spec, history))
    plain = variant.plain_run(spec, [before])
    for chunk in (Chunk(0, 0, 20), Chunk(0, 20, 129), Chunk(0, 149, 1)):
        (fused,), (expected,) = run.step(chunk), plain.step(chunk)
        assert_same_bits(fused, expected)
    # A product with zero may be -0 here and +0 there, so numbers are compared.
    np.testing.assert_array_equal(run.cache, plain.cache)


def quantized(x: Floats) -> tuple[NDArray[np.int8], Floats]:
    """As the schema has it, in float32: [..., D] to integers and [...] to scales."""
    largest = np.abs(x).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, np.float32(LARGEST) / largest, np.float32(0))
    integers = np.rint(x * inverse).clip(-LARGEST, LARGEST).astype(np.int8)
    scales: Floats = largest[..., 0] / np.float32(LARGEST)
    return integers, scales


@pytest.mark.parametrize("case", CASES)
def test_the_cache_holds_what_integer_arithmetic_says(variant: Variant, case: str) -> None:
    spec = CASES[case]
    history = PackedHistory.random(spec, 100, 0)
    history.value[3], history.key[4] = 0, 0
    history.value[5] *= np.float32(1e-30)
    exact, run = variant.run(spec, [history]), variant.int8_run(spec, [history])
    exact.step(Chunk(0, 0, 100))
    run.step(Chunk(0, 0, 100))
    stored = zip(exact.stored(0), run.stored(0), run.stored_scales(0), strict=True)
    for floats, integers, scales in stored:
        expected_integers, expected_scales = quantized(floats)
        np.testing.assert_array_equal(integers, expected_integers)
        assert_same_bits(scales, expected_scales)


def test_halves_are_rounded_to_even(variant: Variant) -> None:
    spec = Fused(rotary=0)
    history = PackedHistory.random(spec, 1, 0)
    history.key[:] = np.arange(16) - 7.5
    history.key[..., 0] = 127
    history.value[:] = -history.key
    run = variant.int8_run(spec, [history])
    run.step(Chunk(0, 0, 1))
    keys, values = run.stored(0)
    expected = [127, -6, -6, -4, -4, -2, -2, 0, 0, 2, 2, 4, 4, 6, 6, 8]
    np.testing.assert_array_equal(keys[0, 0], expected)
    np.testing.assert_array_equal(values[0, 0], -np.asarray(expected))


@pytest.mark.parametrize("case", ["nothing", "wide_value", "everything"])
def test_integers_with_scale_1_give_the_bits_of_floats(variant: Variant, case: str) -> None:
    spec = replace(CASES[case], rotary=0, query_norm=False, key_norm=False)
    history = PackedHistory.random(spec, 130, 0)
    history.key[:] = np.rint(history.key * 30).clip(-127, 127)
    history.value[:] = np.rint(history.value * 30).clip(-127, 127)
    history.key[..., 0] = history.value[..., -1] = 127
    spec = replace(spec, scale=0.01)
    floats, integers = variant.run(spec, [history]), variant.run(spec, [history], int8=True)
    for chunk in (Chunk(0, 0, 129), Chunk(0, 129, 1)):
        (output,), (expected,) = integers.step(chunk), floats.step(chunk)
        assert_same_bits(output, expected)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_not_hidden_by_quantising(
    variant: Variant, poison: float
) -> None:
    spec = Fused(rotary=0)
    history = PackedHistory.random(spec, 30, 0)
    history.value[10, :, 3] = poison
    (output,) = variant.run(spec, [history], int8=True).step(Chunk(0, 0, 30))
    assert np.isfinite(output[:10]).all()
    assert np.isnan(output[10:]).all()


@both_caches
def test_slot_minus_1_writes_nothing(best: Variant, int8: bool) -> None:
    run = best.run(GROUPED, [PackedHistory.random(GROUPED, 40, 0)], int8=int8)
    run.step(Chunk(0, 0, 30))
    (expected,) = run.step(Chunk(0, 30, 10))
    before = {name: array.copy() for name, array in run.cache_feeds().items()}
    feeds = run.feeds([Chunk(0, 30, 10)])
    feeds["slot_mapping"][:] = -1
    changed = np.s_[:, GROUPED.heads * GROUPED.key_size :]  # keys and values
    feeds["qkv"][changed] += 1
    assert_same_bits(run_in_place(run.session, feeds, GROUPED), expected.reshape(10, -1))
    for name, array in run.cache_feeds().items():
        np.testing.assert_array_equal(array, before[name])


@both_caches
def test_unbound_outputs_leave_the_inputs_alone(best: Variant, int8: bool) -> None:
    run = best.run(GROUPED, [PackedHistory.random(GROUPED, 50, 0)], int8=int8)
    run.step(Chunk(0, 0, 20))
    before = {name: array.copy() for name, array in run.cache_feeds().items()}
    attention, *changed = run.session.run(None, run.feeds([Chunk(0, 20, 30)]))
    for name, array in run.cache_feeds().items():
        np.testing.assert_array_equal(array, before[name])
    (in_place,) = run.step(Chunk(0, 20, 30))
    assert_same_bits(attention, in_place.reshape(30, -1))
    for array, expected in zip(changed, run.cache_feeds().values(), strict=True):
        np.testing.assert_array_equal(array, expected)


@both_caches
def test_a_step_without_tokens(best: Variant, int8: bool) -> None:
    run = best.run(GROUPED, [PackedHistory.random(GROUPED, 20, 0)], int8=int8)
    (output,) = run.step(Chunk(0, 20, 0))
    assert output.shape == (0, GROUPED.heads, GROUPED.value_size)


@both_caches
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_no_row_is_touched_by_what_it_does_not_see(
    variant: Variant, int8: bool, poison: float
) -> None:
    spec = replace(GROUPED, sliding_window=19)
    clean = PackedHistory.random(spec, 70, 0)
    spoilt = replace(clean, key=clean.key.copy(), value=clean.value.copy())
    spoilt.key[41], spoilt.value[41] = poison, poison
    (expected,) = variant.run(spec, [clean], int8=int8).step(Chunk(0, 0, 70))
    (output,) = variant.run(spec, [spoilt], int8=int8).step(Chunk(0, 0, 70))
    assert_same_bits(output[:41], expected[:41])
    assert_same_bits(output[41 + 19 :], expected[41 + 19 :])


FIRST_OF_TWO, ALL, BUT_FIRST = slice(1), slice(None), slice(1, None)
# A step of 10 tokens behind a prefix of 30, in 3 of the cache's 6 blocks of 16; 4 heads on 2, all
# of 16.
WRONG_INPUTS: list[tuple[str, Change, str]] = [
    ("qkv", zeros(10, 127), r"127 columns and 4 query heads and 2 KV heads of 16 leave 31 of them"),
    ("qkv", zeros(10, 96), "leave 0 of them for values; they have to be a positive multiple"),
    ("qkv", zeros(10, 4, 32), "qkv has 3 dimensions and needs 2"),
    ("qkv", zeros(10, 96 + 2 * 513), "1 to 512"),
    ("qkv", keep(BUT_FIRST), "dimension 0 of cos is 10 and has to be 9, one row a token"),
    ("cos", zeros(10, 8), "dimension 1 of sin is 16 and has to be 8, as of cos"),
    ("sin", zeros(9, 16), "dimension 0 of sin is 9 and has to be 10"),
    ("query_norm", zeros(15), "dimension 0 of query_norm is 15 and has to be 16"),
    ("key_norm", zeros(17), "dimension 0 of key_norm is 17"),
    ("slot_mapping", put(3, 96), r"\[3\] is 96 and the cache has slots 0 to 95"),
    ("slot_mapping", keep(BUT_FIRST), "dimension 0 of slot_mapping is 9 and has to be 10"),
    ("block_tables", put((0, 2), 6), r"\[0\]\[2\] is 6 and the cache has blocks 0 to 5"),
    ("query_start_loc", put(1, 11), "ends with 11 and the step has 10"),
    ("prefix_offsets", put(0, -1), "is -1; it counts tokens"),
    ("kv_cache", zeros(6, 2, 1, 16, 16), "dimension 2 of kv_cache is 1 and has to be 2"),
    ("kv_cache", zeros(6, 2, 2, 8, 16), "block_size is 8 and this kernel needs a multiple of 16"),
    ("kv_cache", zeros(6, 2, 2, 16, 20), "dimension 4 of kv_cache is 20 and has to be 16"),
    ("sinks", zeros(3), "dimension 0 of sinks is 3 and has to be 4"),
    ("alibi_slopes", zeros(5), "dimension 0 of alibi_slopes is 5"),
]
WRONG_SCALES: list[tuple[str, Change, str]] = [
    ("kv_scales", zeros(5, 2, 2, 16), "dimension 0 of kv_scales is 5 and has to be 6, as of kv_ca"),
    ("kv_scales", keep(ALL, FIRST_OF_TWO), "dimension 1 of kv_scales is 1"),
    ("kv_scales", zeros(6, 2, 2, 16, 1), "kv_scales has 5 dimensions and needs 4"),
]


@pytest.mark.parametrize(
    ("int8", "name", "change", "message"),
    [
        *((False, *wrong) for wrong in WRONG_INPUTS),
        *((True, *wrong) for wrong in (*WRONG_SCALES, *WRONG_INPUTS[::4])),
    ],
)
def test_wrong_inputs_are_refused_before_anything_is_written(
    best: Variant, int8: bool, name: str, change: Change, message: str
) -> None:
    spec = Fused()
    run = best.run(spec, [PackedHistory.random(spec, 40, 0)], int8=int8)
    feeds = run.feeds([Chunk(0, 30, 10)])
    feeds[name] = np.ascontiguousarray(change(feeds[name]))
    before = {key: feeds[key].copy() for key in run.cache_feeds()}
    with pytest.raises(Exception, match=message):
        run_in_place(run.session, feeds, spec)
    for key, array in before.items():
        np.testing.assert_array_equal(feeds[key], array)


@pytest.mark.parametrize("columns", [15, 18])
def test_a_rotation_that_does_not_fit_the_head_is_refused(best: Variant, columns: int) -> None:
    spec = Fused()
    run = best.run(spec, [PackedHistory.random(spec, 10, 0)])
    feeds = run.feeds([Chunk(0, 0, 10)])
    feeds["cos"] = feeds["sin"] = np.zeros((10, columns), np.float32)
    with pytest.raises(Exception, match=f"cos has {columns} columns and the head size is 16"):
        run_in_place(run.session, feeds, spec)


@both_caches
@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"num_heads": 0}, "num_heads is missing or 0 and has to lie in 1 to 65536"),
        ({"num_kv_heads": -1}, "num_kv_heads is missing or -1"),
        ({"num_heads": 5}, "num_heads is 5 and num_kv_heads 2; the first has to be a multiple"),
        ({"head_size": 513}, "head_size is missing or 513 and has to lie in 1 to 512"),
        ({"interleaved": 2}, "interleaved is 2 and has to be 0 or 1"),
        ({"norm_epsilon": -1.0}, "norm_epsilon is -1 and may not be negative"),
        ({"k_transposed": 0}, "k_transposed is 0 and this kernel reads only"),
        ({"scale": float("inf")}, "scale is missing or not finite"),
    ],
)
def test_wrong_attributes_are_refused(
    best: Variant, int8: bool, attributes: dict[str, Any], message: str
) -> None:
    schema = INT8_SCHEMA if int8 else SCHEMA
    with pytest.raises(Exception, match=message):
        open_session(best.name, schema, {**Fused().attributes, **attributes})

"""The native PagedAttention: right against float64, and the same bits in every schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.backends import kernels
from octavo.graphs.errors import BackendError
from octavo.graphs.ops.paged_attention import SCHEMA
from tests.backend.attention_steps import (
    Attention,
    Change,
    Chunk,
    Floats,
    History,
    PagedRun,
    Steps,
    assert_close,
    assert_same_bits,
    keep,
    open_session,
    put,
    reference,
    run_in_place,
    step_lists,
    zeros,
)
from tests.backend.kernel_variants import VARIANTS, library_of

GROUPED = Attention(heads=9, kv_heads=3, key_size=64, value_size=64)
EVERYTHING = Attention(
    heads=6, kv_heads=3, key_size=40, value_size=24, block_size=32,
    sliding_window=45, softcap=3.0, sinks=True, alibi=True,
)  # fmt: skip
CASES = {
    "grouped": GROUPED,
    "multi_query": Attention(heads=8, kv_heads=1, key_size=32, value_size=32),
    "wide_group": Attention(heads=130, kv_heads=1, key_size=8, value_size=8),
    "multi_head": Attention(heads=5, kv_heads=5, key_size=80, value_size=80, block_size=32),
    "odd_head_size": Attention(key_size=37, value_size=37, block_size=64),
    "head_size_1": Attention(key_size=1, value_size=1),
    "head_size_512": Attention(heads=2, kv_heads=1, key_size=512, value_size=512, scale=0.04),
    "narrow_value": Attention(key_size=48, value_size=20, block_size=64),
    "wide_value": Attention(key_size=12, value_size=100),
    "window_1": Attention(sliding_window=1),
    "window_19": Attention(heads=6, kv_heads=2, sliding_window=19),
    "softcap": Attention(softcap=2.0),
    "sinks": Attention(sinks=True),
    "alibi": Attention(alibi=True),
    "bidirectional": Attention(causal=False),
    "bidirectional_window": Attention(causal=False, sliding_window=9),
    "block_48": Attention(block_size=48),
    "everything": EVERYTHING,
}


@dataclass(frozen=True)
class Variant:
    """One instruction set's build of the kernel."""

    name: str

    def session(self, attributes: dict[str, Any], threads: int = 1) -> onnxruntime.InferenceSession:
        return open_session(self.name, SCHEMA, attributes, threads)

    def run(
        self, spec: Attention, histories: Sequence[History], threads: int = 1, seed: int = 0
    ) -> PagedRun:
        return PagedRun(self.session(spec.attributes, threads), spec, histories, seed)


def find_variant(name: str) -> Variant:
    library_of(name)
    return Variant(name)


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Variant:
    return find_variant(request.param)


@pytest.fixture(scope="module")
def best() -> Variant:
    return Variant(kernels.instruction_set())


# --- against float64 ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_mixed_batch_matches_float64(variant: Variant, case: str) -> None:
    spec = CASES[case]
    histories = [History.random(spec, length, length) for length in (37, 71, 25, 33, 128)]
    run = variant.run(spec, histories)
    run.preload(1, 70)
    run.preload(2, 20)
    run.preload(4, 64)
    prefill, decode, verify = Chunk(0, 0, 37), Chunk(1, 70, 1), Chunk(2, 20, 5)
    idle, chunk = Chunk(3, 0, 0), Chunk(4, 64, 64)
    outputs = run.step(prefill, decode, idle, verify, chunk)
    for output, item in zip(outputs, (prefill, decode, idle, verify, chunk), strict=True):
        history = histories[item.sequence]
        assert_close(output, reference(spec, history, item.start, item.count))


@pytest.mark.parametrize("case", ["grouped", "everything"])
def test_a_context_of_several_segments_matches_float64(variant: Variant, case: str) -> None:
    spec = CASES[case]
    history = History.random(spec, 1300, 0)
    run = variant.run(spec, [history])
    run.preload(0, 1290)
    (output,) = run.step(Chunk(0, 1290, 10))
    assert_close(output, reference(spec, history, 1290, 10))


def test_scores_far_apart_neither_overflow_nor_vanish(variant: Variant) -> None:
    spec = Attention(scale=400.0)
    history = History.random(spec, 90, 0)
    (output,) = variant.run(spec, [history]).step(Chunk(0, 0, 90))
    expected = reference(spec, history, 0, 90)
    # Scores near 2,000 carry rounding errors of 1e-4, which the exponential turns relative.
    np.testing.assert_allclose(output, expected, rtol=2e-3, atol=2e-3)


# --- the cache ------------------------------------------------------------------------------------


def test_keys_go_in_transposed_and_nothing_else_is_touched(variant: Variant) -> None:
    spec = CASES["narrow_value"]
    history = History.random(spec, 100, 0)
    run, expected = (variant.run(spec, [history]) for _ in range(2))
    run.step(Chunk(0, 0, 100))
    expected.preload(0, 100)
    assert_same_bits(run.cache, expected.cache)


def test_slot_minus_1_writes_nothing(best: Variant) -> None:
    spec = Attention()
    history = History.random(spec, 40, 0)
    run = best.run(spec, [history])
    run.preload(0, 40)
    before = run.cache.copy()
    feeds = run.feeds([Chunk(0, 30, 10)])
    feeds["slot_mapping"][:] = -1
    feeds["key"] = feeds["key"] + 1
    assert_close(run_in_place(run.session, feeds, spec), reference(spec, history, 30, 10))
    assert_same_bits(run.cache, before)


def test_unbound_outputs_leave_the_input_cache_alone(best: Variant) -> None:
    spec = GROUPED
    run = best.run(spec, [History.random(spec, 50, 0)])
    run.preload(0, 20)
    before = run.cache.copy()
    attention, cache = run.session.run(None, run.feeds([Chunk(0, 20, 30)]))
    assert_same_bits(run.cache, before)
    (in_place,) = run.step(Chunk(0, 20, 30))
    assert_same_bits(attention, in_place)
    assert_same_bits(cache, run.cache)


def test_a_step_without_tokens(best: Variant) -> None:
    spec = Attention()
    run = best.run(spec, [History.random(spec, 20, 0)])
    run.preload(0, 20)
    before = run.cache.copy()
    (output,) = run.step(Chunk(0, 20, 0))
    assert output.shape == (0, spec.heads, spec.value_size)
    feeds = run.feeds([Chunk(0, 20, 0)])
    feeds |= {
        "block_tables": np.zeros((0, 0), np.int32),
        "query_start_loc": np.zeros(1, np.int32),
        "prefix_offsets": np.zeros(0, np.int32),
    }
    assert run_in_place(run.session, feeds, spec).shape == (0, spec.heads, spec.value_size)
    assert_same_bits(run.cache, before)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("case", ["grouped", "window_19", "multi_head"])
def test_no_row_is_touched_by_what_it_does_not_see(
    variant: Variant, case: str, poison: float
) -> None:
    spec = CASES[case]
    clean = History.random(spec, 70, 0)
    spoilt = History(clean.query, clean.key.copy(), clean.value.copy())
    spoilt.key[41], spoilt.value[41] = poison, poison
    (expected,) = variant.run(spec, [clean]).step(Chunk(0, 0, 70))
    (output,) = variant.run(spec, [spoilt]).step(Chunk(0, 0, 70))
    assert_same_bits(output[:41], expected[:41])
    if spec.sliding_window:
        assert_same_bits(output[41 + spec.sliding_window :], expected[41 + spec.sliding_window :])


# --- the same bits in every schedule --------------------------------------------------------------


EXACT_CASES = ("grouped", "multi_query", "multi_head", "odd_head_size", "window_19", "everything")


@pytest.mark.parametrize("case", EXACT_CASES)
def test_chunks_do_not_change_a_bit(variant: Variant, case: str) -> None:
    spec = CASES[case]
    history = History.random(spec, 150, 0)
    whole = variant.run(spec, [history]).chunked(150)
    for seed, size in enumerate((1, 3, 16, 100)):
        assert_same_bits(variant.run(spec, [history], seed=seed).chunked(size), whole)


@pytest.mark.parametrize("case", EXACT_CASES)
def test_batch_mates_and_places_do_not_change_a_bit(variant: Variant, case: str) -> None:
    spec = CASES[case]
    histories = [History.random(spec, length, length) for length in (95, 34, 61)]
    alone = [variant.run(spec, [h]).chunked(len(h.query)) for h in histories]
    run = variant.run(spec, histories, seed=5)
    first = run.step(Chunk(2, 0, 13), Chunk(0, 0, 70), Chunk(1, 0, 34))
    second = run.step(Chunk(0, 70, 25), Chunk(2, 13, 48))
    assert_same_bits(np.concatenate([first[1], second[0]]), alone[0])
    assert_same_bits(first[2], alone[1])
    assert_same_bits(np.concatenate([first[0], second[1]]), alone[2])


LONG_CASES = {
    "plain": Attention(heads=4, kv_heads=2, key_size=32, value_size=32),
    "one_head": Attention(heads=1, kv_heads=1),
    "window": Attention(heads=2, kv_heads=1, sliding_window=700),
    "sinks": Attention(heads=2, kv_heads=1, sinks=True, alibi=True),
}


@pytest.mark.parametrize("case", LONG_CASES)
def test_segments_and_threads_do_not_change_a_bit(variant: Variant, case: str) -> None:
    spec = LONG_CASES[case]
    history = History.random(spec, 1600, 0)
    whole = variant.run(spec, [history]).chunked(1600)
    for threads in (1, 2):
        run = variant.run(spec, [history], threads, seed=threads)
        run.preload(0, 1600)
        for start in (511, 512, 1023, 1060, 1599):
            (decode,) = run.step(Chunk(0, start, 1))
            assert_same_bits(decode, whole[start : start + 1])
        for start, count in ((500, 30), (1000, 100), (1090, 510)):
            (chunk,) = run.step(Chunk(0, start, count))
            assert_same_bits(chunk, whole[start : start + count])


def test_instruction_sets_agree_bit_for_bit() -> None:
    """All fuse their multiply-adds but the portable one, which does so only where the CPU does."""
    spec = EVERYTHING
    history = History.random(spec, 700, 0)
    outputs = {}
    for name in ("avx2", "avx512", "lanes16"):
        try:
            found = find_variant(name)
        except pytest.skip.Exception:
            continue
        outputs[name] = found.run(spec, [history]).chunked(700)
    if len(outputs) < 2:
        pytest.skip("needs two instruction sets with fused multiply-add")
    first, *others = outputs.values()
    for other in others:
        assert_same_bits(other, first)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Attention, list[int], Steps]:
    """An attention and a schedule for it."""
    kv_heads = draw(st.integers(1, 3))
    spec = Attention(
        heads=kv_heads * draw(st.integers(1, 5)),
        kv_heads=kv_heads,
        key_size=draw(st.integers(1, 40)),
        value_size=draw(st.integers(1, 40)),
        block_size=draw(st.sampled_from([16, 32, 48, 64])),
        sliding_window=draw(st.sampled_from([0, 1, 7, 40])),
        softcap=draw(st.sampled_from([0.0, 4.0])),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
    )
    return spec, *draw(step_lists())


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(schedules(), st.integers(0, 2**32 - 1))
def test_any_schedule_gives_the_bits_of_each_sequence_alone(
    best: Variant,
    schedule: tuple[Attention, list[int], Steps],
    seed: int,
) -> None:
    spec, lengths, steps = schedule
    histories = [History.random(spec, length, seed + i) for i, length in enumerate(lengths)]
    run = best.run(spec, histories, threads=2, seed=seed)
    done: list[list[Floats]] = [[] for _ in lengths]
    for step in steps:
        chunks = [Chunk(s, sum(map(len, done[s])), count) for s, count in step]
        for chunk, output in zip(chunks, run.step(*chunks), strict=True):
            done[chunk.sequence].append(output)
    for history, parts in zip(histories, done, strict=True):
        alone = best.run(spec, [history]).chunked(len(history.query))
        assert_same_bits(np.concatenate(parts), alone)
        assert_close(alone[-1:], reference(spec, history, len(alone) - 1, 1))


# --- refusals -------------------------------------------------------------------------------------


FIRST_OF_TWO, ALL, BUT_FIRST = slice(1), slice(None), slice(1, None)
# A step of 10 tokens behind a prefix of 30, in 3 of the cache's 6 blocks of 16.
WRONG_INPUTS: list[tuple[str, Change, str]] = [
    ("slot_mapping", put(3, 96), r"\[3\] is 96 and the cache has slots 0 to 95"),
    ("slot_mapping", put(3, -2), r"\[3\] is -2"),
    ("slot_mapping", keep(BUT_FIRST), "dimension 0 of slot_mapping is 9 and has to be 10"),
    ("block_tables", put((0, 2), 6), r"\[0\]\[2\] is 6 and the cache has blocks 0 to 5"),
    ("block_tables", put((0, 0), -1), r"\[0\]\[0\] is -1"),
    ("block_tables", zeros(1, 2), "has 40 tokens and its 2 blocks of 16 hold 32"),
    ("query_start_loc", put(0, 1), "starts with 1"),
    ("query_start_loc", put(1, -1), "is -1, below 0"),
    ("query_start_loc", put(1, 11), "ends with 11 and the step has 10"),
    ("query_start_loc", zeros(3), "dimension 0 of query_start_loc is 3 and has to be 2"),
    ("prefix_offsets", put(0, -1), "is -1; it counts tokens"),
    ("prefix_offsets", put(0, 2**31 - 1), "hold 64"),
    ("kv_cache", zeros(6, 2, 2, 8, 16), "block_size is 8 and this kernel needs a multiple of 16"),
    ("kv_cache", zeros(6, 2, 2, 0, 16), "block_size is 0"),
    ("kv_cache", keep(ALL, FIRST_OF_TWO), "dimension 1 of kv_cache is 1"),
    ("kv_cache", keep(ALL, ALL, FIRST_OF_TWO), "dimension 2 of kv_cache is 1"),
    ("kv_cache", zeros(6, 2, 2, 16, 20), "dimension 4 of kv_cache is 20 and has to be 16"),
    ("query", zeros(10, 3, 16), "3 heads and key 2"),
    ("query", zeros(10, 16), "query has 2 dimensions and needs 3"),
    ("query", zeros(10, 4, 8), "dimension 2 of key is 16 and has to be 8"),
    ("key", keep(BUT_FIRST), "dimension 0 of key is 9"),
    ("value", keep(ALL, FIRST_OF_TWO), "dimension 1 of value is 1"),
    ("value", zeros(10, 2, 513), "1 to 512"),
    ("sinks", zeros(3), "dimension 0 of sinks is 3 and has to be 4"),
    ("alibi_slopes", zeros(5), "dimension 0 of alibi_slopes is 5"),
]


@pytest.mark.parametrize(("name", "change", "message"), WRONG_INPUTS)
def test_wrong_inputs_are_refused_before_anything_is_written(
    best: Variant, name: str, change: Change, message: str
) -> None:
    spec = Attention()
    run = best.run(spec, [History.random(spec, 40, 0)])
    feeds = run.feeds([Chunk(0, 30, 10)])
    feeds[name] = np.ascontiguousarray(change(feeds[name]))
    before = feeds["kv_cache"].copy()
    with pytest.raises(Exception, match=message):
        run_in_place(run.session, feeds, spec)
    assert_same_bits(feeds["kv_cache"], before)


def test_blocks_behind_the_window_may_be_gone(best: Variant) -> None:
    spec = Attention(sliding_window=10)
    history = History.random(spec, 60, 0)
    run = best.run(spec, [history])
    run.preload(0, 60)
    expected = reference(spec, history, 55, 5)
    run.tables[0][:2] = -1
    (output,) = run.step(Chunk(0, 55, 5))
    assert_close(output, expected)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"k_transposed": 0}, "k_transposed is 0 and this kernel reads only"),
        ({"scale": float("inf")}, "scale is missing or not finite"),
        ({"softcap": -1.0}, "softcap is -1"),
        ({"sliding_window": -5}, "sliding_window is -5"),
        ({"causal": 2}, "causal is 2"),
    ],
)
def test_wrong_attributes_are_refused(
    best: Variant, attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        best.session({**Attention().attributes, **attributes})


def test_scale_has_no_default(best: Variant) -> None:
    with pytest.raises(Exception, match="scale is missing"):
        best.session({"k_transposed": 1})


def test_an_instruction_set_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, best: Variant
) -> None:
    monkeypatch.setenv("OCTAVO_CPU_ISA", "sse9")
    with pytest.raises(BackendError, match="OCTAVO_CPU_ISA is 'sse9'"):
        kernels.instruction_set()
    options = onnxruntime.SessionOptions()
    with pytest.raises(Exception, match="OCTAVO_CPU_ISA is sse9 and this build knows"):
        options.register_custom_ops_library(str(kernels.library_path()))


def test_a_missing_library_says_how_to_build_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(BackendError, match="make setup"):
        kernels.library_path()

"""The fused attention ops give the same bits in every schedule, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.backend.attention_steps import (
    Chunk,
    Floats,
    Steps,
    assert_same_bits,
    step_lists,
)
from tests.backend.fused_attention_steps import (
    CASES,
    Fused,
    PackedHistory,
    Variant,
    both_caches,
    random_histories,
)
from tests.backend.kernel_variants import library_of


@both_caches
@pytest.mark.parametrize("case", ["normed", "partial_odd", "interleaved", "everything"])
def test_chunks_do_not_change_a_bit(variant: Variant, case: str, int8: bool) -> None:
    spec = CASES[case]
    history = PackedHistory.random(spec, 150, 0)
    whole = variant.run(spec, [history], int8=int8).chunked(150)
    for seed, size in enumerate((1, 3, 16, 100)):
        run = variant.run(spec, [history], int8=int8, seed=seed)
        assert_same_bits(run.chunked(size), whole)


@both_caches
@pytest.mark.parametrize("case", ["normed", "everything"])
def test_batch_mates_and_places_do_not_change_a_bit(
    variant: Variant, case: str, int8: bool
) -> None:
    spec = CASES[case]
    histories = random_histories(spec, (95, 34, 61))
    alone = [variant.run(spec, [h], int8=int8).chunked(len(h.query)) for h in histories]
    run = variant.run(spec, histories, int8=int8, seed=5)
    first = run.step(Chunk(2, 0, 13), Chunk(0, 0, 70), Chunk(1, 0, 34))
    second = run.step(Chunk(0, 70, 25), Chunk(2, 13, 48))
    assert_same_bits(np.concatenate([first[1], second[0]]), alone[0])
    assert_same_bits(first[2], alone[1])
    assert_same_bits(np.concatenate([first[0], second[1]]), alone[2])


@both_caches
@pytest.mark.parametrize("heads", [(4, 2), (1, 1), (7, 1)])
def test_segments_and_threads_do_not_change_a_bit(
    variant: Variant, heads: tuple[int, int], int8: bool
) -> None:
    spec = Fused(heads=heads[0], kv_heads=heads[1], key_size=16, value_size=16)
    history = PackedHistory.random(spec, 1600, 0)
    whole = variant.run(spec, [history], int8=int8).chunked(1600)
    for threads in (1, 2):
        run = variant.run(spec, [history], int8=int8, threads=threads, seed=threads)
        assert_same_bits(run.chunked(700), whole)
        for start in (511, 512, 1023, 1060, 1599):
            (decode,) = run.step(Chunk(0, start, 1))
            assert_same_bits(decode, whole[start : start + 1])
        for start, count in ((500, 30), (1000, 100), (1090, 510)):
            (chunk,) = run.step(Chunk(0, start, count))
            assert_same_bits(chunk, whole[start : start + count])


@both_caches
@pytest.mark.parametrize("case", ["everything", "everything_interleaved"])
def test_instruction_sets_agree_bit_for_bit(case: str, int8: bool) -> None:
    """All fuse their multiply-adds but the portable one, which does so only where the CPU does."""
    spec = CASES[case]
    history = PackedHistory.random(spec, 700, 0)
    outputs = {}
    for name in ("avx2", "avx512", "lanes16"):
        try:
            library_of(name)
        except pytest.skip.Exception:
            continue
        run = Variant(name).run(spec, [history], int8=int8)
        outputs[name] = [run.chunked(700), *run.cache_feeds().values()]
    if len(outputs) < 2:
        pytest.skip("needs two instruction sets with fused multiply-add")
    first, *others = outputs.values()
    for other in others:
        for array, expected in zip(other, first, strict=True):
            np.testing.assert_array_equal(array.view(np.uint8), expected.view(np.uint8))


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Fused, list[int], Steps]:
    """An attention and a schedule for it."""
    kv_heads = draw(st.integers(1, 3))
    key_size = draw(st.integers(1, 40))
    spec = Fused(
        heads=kv_heads * draw(st.integers(1, 5)),
        kv_heads=kv_heads,
        key_size=key_size,
        value_size=draw(st.integers(1, 40)),
        block_size=draw(st.sampled_from([16, 32, 48, 64])),
        sliding_window=draw(st.sampled_from([0, 1, 7, 40])),
        sinks=draw(st.booleans()),
        rotary=2 * draw(st.integers(0, key_size // 2)),
        interleaved=draw(st.booleans()),
        query_norm=draw(st.booleans()),
        key_norm=draw(st.booleans()),
    )
    return spec, *draw(step_lists())


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(schedules(), st.booleans(), st.integers(0, 2**32 - 1))
def test_any_schedule_gives_the_bits_of_each_sequence_alone(
    best: Variant, schedule: tuple[Fused, list[int], Steps], int8: bool, seed: int
) -> None:
    spec, lengths, steps = schedule
    histories = [PackedHistory.random(spec, n, seed + i) for i, n in enumerate(lengths)]
    run = best.run(spec, histories, int8=int8, threads=2, seed=seed)
    done: list[list[Floats]] = [[] for _ in lengths]
    for step in steps:
        chunks = [Chunk(s, sum(map(len, done[s])), count) for s, count in step]
        for chunk, output in zip(chunks, run.step(*chunks), strict=True):
            done[chunk.sequence].append(output)
    for history, parts in zip(histories, done, strict=True):
        alone = best.run(spec, [history], int8=int8).chunked(len(history.query))
        assert_same_bits(np.concatenate(parts), alone)

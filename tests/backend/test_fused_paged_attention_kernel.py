"""The native FusedPagedAttention and its int8 form: right against float64, exact where arithmetic
is, and the same bits in every schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo.backends import kernels
from octavo.graphs.ops import paged_attention
from octavo.graphs.ops.fused_paged_attention import INT8_SCHEMA, SCHEMA
from octavo.graphs.ops.quantization import LARGEST
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

Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Fused(Attention):
    rotary: int = 16  # R; 0: none
    interleaved: bool = False
    query_norm: bool = False
    key_norm: bool = False
    epsilon: float = 1e-2

    @property
    def attributes(self) -> dict[str, Any]:
        return {
            **super().attributes,
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_size": self.key_size,
            "interleaved": int(self.interleaved),
            "norm_epsilon": self.epsilon,
        }

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (self.heads * self.value_size,)

    @property
    def query_weight(self) -> Floats:
        return np.linspace(0.5, 1.5, self.key_size * self.query_norm, dtype=np.float32)

    @property
    def key_weight(self) -> Floats:
        return np.linspace(-1.2, 0.8, self.key_size * self.key_norm, dtype=np.float32)


GROUPED = Fused(heads=9, kv_heads=3, key_size=64, value_size=64, rotary=64)
EVERYTHING = Fused(
    heads=6, kv_heads=3, key_size=40, value_size=24, block_size=32, sliding_window=45,
    softcap=3.0, sinks=True, alibi=True, rotary=20, query_norm=True, key_norm=True,
)  # fmt: skip
CASES = {
    "grouped": GROUPED,
    "normed": replace(GROUPED, query_norm=True, key_norm=True),
    "query_norm_only": Fused(query_norm=True),
    "key_norm_only": Fused(key_norm=True, rotary=0),
    "nothing": Fused(rotary=0),
    "partial": Fused(key_size=80, value_size=80, rotary=32),
    "partial_odd": Fused(key_size=37, value_size=41, rotary=22, query_norm=True, key_norm=True),
    "one_pair": Fused(key_size=3, value_size=2, rotary=2),
    "interleaved": Fused(key_size=64, value_size=64, rotary=64, interleaved=True),
    "interleaved_partial": Fused(key_size=29, value_size=16, rotary=14, interleaved=True),
    "head_size_512": Fused(
        heads=2, kv_heads=1, key_size=512, value_size=512, rotary=512, scale=0.04, key_norm=True
    ),
    "wide_group": Fused(heads=130, kv_heads=1, key_size=8, value_size=8, rotary=8),
    "wide_value": Fused(key_size=12, value_size=100, rotary=12),
    "bidirectional": Fused(causal=False),
    "block_48": Fused(block_size=48),
    "everything": EVERYTHING,
    "everything_interleaved": replace(EVERYTHING, interleaved=True),
}


@dataclass(frozen=True)
class PackedHistory(History):
    """Heads as the projection leaves them, and each token's rotation."""

    cos: Floats  # [L, R]; of any size, so that an element is told from its partner
    sin: Floats  # [L, R]

    @staticmethod
    def random(spec: Attention, length: int, seed: int) -> PackedHistory:
        assert isinstance(spec, Fused)
        heads = History.random(spec, length, seed)
        rotation = np.random.default_rng(seed + 1).uniform(-1, 1, (2, length, spec.rotary))
        return PackedHistory(heads.query, heads.key, heads.value, *rotation.astype(np.float32))


def normed(x: Doubles, weight: Floats, epsilon: float) -> Doubles:
    if not len(weight):
        return x
    mean_square: Doubles = np.mean(x**2, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + epsilon) * weight


def turned(spec: Fused, x: Doubles, cos: Floats, sin: Floats) -> Doubles:
    """[L, heads, Dk], pair by pair."""
    y = x.copy()
    half = spec.rotary // 2
    for pair in range(half):
        i, j = (2 * pair, 2 * pair + 1) if spec.interleaved else (pair, pair + half)
        y[..., i] = x[..., i] * cos[:, None, i] - x[..., j] * sin[:, None, i]
        y[..., j] = x[..., j] * cos[:, None, j] + x[..., i] * sin[:, None, j]
    return y


def prepared(spec: Fused, history: PackedHistory) -> History:
    """Queries and keys as attention takes them, in float64."""
    query = normed(history.query.astype(np.float64), spec.query_weight, spec.epsilon)
    key = normed(history.key.astype(np.float64), spec.key_weight, spec.epsilon)
    query, key = (turned(spec, x, history.cos, history.sin) for x in (query, key))
    heads: Any = (query, key, history.value)  # float64, where a history has float32
    return History(*heads)


@dataclass
class FusedRun(PagedRun):
    """Steps of the op over a cache of float32."""

    def token_feeds(self, chunks: Sequence[Chunk]) -> dict[str, NDArray[Any]]:
        spec = self.spec
        assert isinstance(spec, Fused)
        heads = [self.gather(name, chunks) for name in ("query", "key", "value")]
        rotation = {
            name: self.gather(name, chunks) if spec.rotary else np.zeros((0, 0), np.float32)
            for name in ("cos", "sin")
        }
        return {
            "qkv": np.concatenate([x.reshape(len(x), x.shape[1] * x.shape[2]) for x in heads], 1),
            **rotation,
            "query_norm": spec.query_weight,
            "key_norm": spec.key_weight,
        }

    def stored(self, sequence: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys [L, Hkv, Dk] and values [L, Hkv, Dv] as they lie in the cache."""
        spec = self.spec
        length = len(self.histories[sequence].query)
        slots = self.slots(sequence, np.arange(length, dtype=np.int32))
        blocks, offsets = slots // spec.block_size, slots % spec.block_size
        n, _, heads, size, width = self.cache.shape
        keys = self.cache.reshape(n, 2, heads, width, size)[blocks, 0, :, : spec.key_size, offsets]
        return keys, self.cache[blocks, 1, :, offsets, : spec.value_size]


@dataclass
class Int8Run(FusedRun):
    """Steps over a cache of integers, with scales that are NaN where nothing was written."""

    scales: Floats = field(init=False)

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        shape = self.cache.shape
        rng = np.random.default_rng(self.seed)
        self.cache = rng.integers(-128, 128, shape).astype(np.int8)
        self.scales = np.full(shape[:-1], np.nan, np.float32)

    def cache_feeds(self) -> dict[str, NDArray[Any]]:
        return {"kv_cache": self.cache, "kv_scales": self.scales}

    def stored_scales(self, sequence: int) -> tuple[Floats, Floats]:
        """Of keys and values, [L, Hkv]."""
        length = len(self.histories[sequence].query)
        slots = self.slots(sequence, np.arange(length, dtype=np.int32))
        size = self.spec.block_size
        keys, values = (self.scales[slots // size, plane, :, slots % size] for plane in (0, 1))
        return keys, values

    def read_back(self, sequence: int) -> tuple[Doubles, Doubles]:
        """Keys and values as attention reads them: scale * integer."""
        pairs = zip(self.stored(sequence), self.stored_scales(sequence), strict=True)
        keys, values = (x * scales[..., None].astype(np.float64) for x, scales in pairs)
        return keys, values


@dataclass(frozen=True)
class Variant:
    """One instruction set's build of the kernels."""

    name: str

    def run(
        self,
        spec: Fused,
        histories: Sequence[PackedHistory],
        *,
        int8: bool = False,
        threads: int = 1,
        seed: int = 0,
    ) -> FusedRun:
        run, schema = (Int8Run, INT8_SCHEMA) if int8 else (FusedRun, SCHEMA)
        session = open_session(self.name, schema, spec.attributes, threads)
        return run(session, spec, histories, seed)

    def int8_run(self, spec: Fused, histories: Sequence[PackedHistory]) -> Int8Run:
        run = self.run(spec, histories, int8=True)
        assert isinstance(run, Int8Run)
        return run

    def plain_run(self, spec: Fused, histories: Sequence[History]) -> PagedRun:
        plain = Attention(**{f.name: getattr(spec, f.name) for f in fields(Attention)})
        session = open_session(self.name, paged_attention.SCHEMA, plain.attributes)
        return PagedRun(session, plain, histories)


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Variant:
    library_of(request.param)
    return Variant(request.param)


@pytest.fixture(scope="module")
def best() -> Variant:
    return Variant(kernels.instruction_set())


both_caches = pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])


def mixed_batch(run: FusedRun) -> list[tuple[Chunk, Floats]]:
    """Prefill, decode, verification, an idle sequence and a chunk, behind prefixes."""
    run.step(Chunk(1, 0, 70), Chunk(2, 0, 20), Chunk(4, 0, 64))
    chunks = [Chunk(0, 0, 37), Chunk(1, 70, 1), Chunk(2, 20, 5), Chunk(3, 0, 0), Chunk(4, 64, 64)]
    return list(zip(chunks, run.step(*chunks), strict=True))


LENGTHS = (37, 71, 25, 33, 128)


def random_histories(spec: Fused, lengths: Sequence[int] = LENGTHS) -> list[PackedHistory]:
    return [PackedHistory.random(spec, length, length) for length in lengths]


# --- against float64 ------------------------------------------------------------------------------


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


# --- exact arithmetic -----------------------------------------------------------------------------


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


# --- the cache ------------------------------------------------------------------------------------


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


# --- the same bits in every schedule --------------------------------------------------------------


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


# --- refusals -------------------------------------------------------------------------------------

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

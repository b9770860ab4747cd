"""The references of `octavo::fused_paged_attention` and its int8 form: torch and function bodies.

What they do to queries and keys is worked out in float64 with complex numbers: a pair of elements
is turned by an angle. Attention is the dense formula that plain paged attention is tested with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from octavo.backends.onnx_lowering.functions import bodies_of
from octavo.graphs.ops import fused_paged_attention_torch as _registers_the_operators  # noqa: F401
from octavo.graphs.ops.fused_paged_attention import INT8_SCHEMA, SCHEMA
from tests.parity.test_paged_attention_reference import Array, Attention, Wide, dense_attention

EPSILON = 1e-3


@dataclass(frozen=True)
class Fused:
    attention: Attention = field(default_factory=Attention)
    turned: int = 8  # elements of a head that rotary embedding turns
    interleaved: int = 0
    norm: bool = False
    int8: bool = False

    @property
    def schema(self) -> Any:
        return INT8_SCHEMA if self.int8 else SCHEMA

    @property
    def attributes(self) -> dict[str, Any]:
        return {
            "num_heads": self.attention.heads,
            "num_kv_heads": self.attention.kv_heads,
            "head_size": self.attention.key_size,
            "interleaved": self.interleaved,
            "norm_epsilon": EPSILON,
            **self.attention.attributes,
        }

    def weight(self, start: float) -> Array:
        return np.linspace(start, 2, self.attention.key_size * self.norm, dtype=np.float32)


EVERYTHING = Attention(
    heads=6, kv_heads=3, key_size=6, value_size=7, sliding_window=6, softcap=0.9, sinks=True,
    alibi=True,
)  # fmt: skip
CASES = {
    "halves": Fused(),
    "neighbours": Fused(interleaved=1),
    "some": Fused(turned=4),
    "some_neighbours": Fused(turned=2, interleaved=1),
    "none": Fused(turned=0),
    "norm": Fused(norm=True),
    "norm_only": Fused(turned=0, norm=True),
    "narrow_value": Fused(replace(Attention(), value_size=3)),
    "everything": Fused(EVERYTHING, turned=4, norm=True),
    "everything_neighbours": Fused(EVERYTHING, turned=6, interleaved=1, norm=True),
}


def prepared(spec: Fused, heads: Wide, positions: Array, weight: Array) -> Wide:
    """`heads` [n, h, Dk], normed if there is a weight, its pairs turned as complex numbers."""
    if spec.norm:
        root = np.sqrt((heads**2).mean(-1, keepdims=True) + EPSILON)
        heads = heads / root * weight.astype(np.float64)
    result, half = heads.copy(), spec.turned // 2
    first = np.arange(half) * 2 if spec.interleaved else np.arange(half)
    second = first + (1 if spec.interleaved else half)
    turned = (heads[..., first] + 1j * heads[..., second]) * np.exp(1j * angles(spec, positions))
    result[..., first], result[..., second] = turned.real, turned.imag
    return result


def angles(spec: Fused, positions: Array) -> Wide:
    """[n, 1, R / 2]"""
    speed = 0.7 ** np.arange(spec.turned // 2)
    result: Wide = positions[:, None, None] * speed
    return result


def tables(spec: Fused, positions: Array) -> tuple[Array, Array]:
    """cos and sin [n, R], one for each element of a pair; [0, 0] without rotary embedding."""
    if spec.turned == 0:
        return np.zeros((0, 0), np.float32), np.zeros((0, 0), np.float32)
    turns = angles(spec, positions)[:, 0]
    by_element = np.repeat(turns, 2, 1) if spec.interleaved else np.concatenate([turns, turns], 1)
    return np.cos(by_element).astype(np.float32), np.sin(by_element).astype(np.float32)


@dataclass
class Step:
    """A flattened step of sequences of (cached, new) tokens, and what has to come out."""

    spec: Fused
    sequences: tuple[tuple[int, int], ...]
    feeds: dict[str, Array] = field(init=False)
    keys: list[Wide] = field(init=False)  # of every sequence, [cached + new, Hkv, Dk]
    values: list[Wide] = field(init=False)
    queries: list[Wide] = field(init=False)  # [new, H, Dk]
    slots: list[Array] = field(init=False)  # of all of a sequence's tokens

    def __post_init__(self) -> None:
        attention, rng = self.spec.attention, np.random.default_rng(5)
        size, row = attention.block_size, max(attention.key_size, attention.value_size)
        width = max(-(-sum(s) // size) for s in self.sequences) + 1
        count = width * len(self.sequences)
        block_tables = rng.permutation(count).reshape(len(self.sequences), width)
        shape = (count, 2, attention.kv_heads, size, row)
        cache, scales = np.full(shape, np.nan, np.float32), np.full(shape[:4], np.nan, np.float32)
        if self.spec.int8:
            cache = rng.integers(-127, 128, shape).astype(np.int8)
            scales = rng.uniform(0.005, 0.02, shape[:4]).astype(np.float32)
        weights = self.spec.weight(0.5), self.spec.weight(-1)
        self.keys, self.values, self.queries, self.slots = [], [], [], []
        rows, positions = [], []
        for table, (cached, new) in zip(block_tables, self.sequences, strict=True):
            at = np.arange(cached + new)
            slots = table[at // size] * size + at % size
            parts = [
                rng.standard_normal((new, heads, width)).astype(np.float32)
                for heads, width in (
                    (attention.heads, attention.key_size),
                    (attention.kv_heads, attention.key_size),
                    (attention.kv_heads, attention.value_size),
                )
            ]
            rows.append(
                np.concatenate(
                    [part.reshape(new, part.shape[1] * part.shape[2]) for part in parts], 1
                )
            )
            positions.append(at[cached:])
            query, key, value = (part.astype(np.float64) for part in parts)
            if not self.spec.int8:
                known = rng.standard_normal((2, cached, attention.kv_heads, row))
                self._write(cache, slots[:cached], known.astype(np.float32))
            old_keys, old_values = self.read(cache, scales, slots[:cached])
            turned = prepared(self.spec, key, at[cached:], weights[1])
            self.queries.append(prepared(self.spec, query, at[cached:], weights[0]))
            self.keys.append(np.concatenate([old_keys, turned]))
            self.values.append(np.concatenate([old_values, value]))
            self.slots.append(slots)
        cached_tokens, new_tokens = np.array(self.sequences).T
        cos, sin = tables(self.spec, np.concatenate(positions))
        new_slots = [
            slots[cached:] for slots, cached in zip(self.slots, cached_tokens, strict=True)
        ]
        self.feeds = {
            "qkv": np.concatenate(rows),
            "cos": cos,
            "sin": sin,
            "query_norm": weights[0],
            "key_norm": weights[1],
            "kv_cache": cache,
            **({"kv_scales": scales} if self.spec.int8 else {}),
            "slot_mapping": np.concatenate(new_slots).astype(np.int32),
            "block_tables": block_tables.astype(np.int32),
            "query_start_loc": np.cumsum([0, *new_tokens]).astype(np.int32),
            "prefix_offsets": cached_tokens.astype(np.int32),
            "sinks": attention.sink_values,
            "alibi_slopes": attention.slopes,
        }

    def _planes(self, cache: Array) -> tuple[Array, Array]:
        """Keys and values [N, Hkv, block_size, row], views of the cache."""
        blocks, _, heads, size, row = cache.shape
        keys = cache[:, 0]
        if self.spec.attention.k_transposed:
            keys = keys.reshape(blocks, heads, row, size).transpose(0, 1, 3, 2)
            assert np.shares_memory(keys, cache)
        return keys, cache[:, 1]

    def _write(self, cache: Array, slots: Array, known: Array) -> None:
        attention = self.spec.attention
        block, offset = np.divmod(slots, attention.block_size)
        keys, values = self._planes(cache)
        keys[block, :, offset, : attention.key_size] = known[0][..., : attention.key_size]
        values[block, :, offset, : attention.value_size] = known[1][..., : attention.value_size]

    def read(self, cache: Array, scales: Array, slots: Array) -> tuple[Wide, Wide]:
        """Keys [n, Hkv, Dk] and values [n, Hkv, Dv] of these slots."""
        attention = self.spec.attention
        block, offset = np.divmod(slots, attention.block_size)
        keys, values = (plane[block, :, offset].astype(np.float64) for plane in self._planes(cache))
        if self.spec.int8:
            keys *= scales[block, 0, :, offset][..., None].astype(np.float64)
            values *= scales[block, 1, :, offset][..., None].astype(np.float64)
        return keys[..., : attention.key_size], values[..., : attention.value_size]


def run_torch(step: Step) -> list[Array]:
    tensors = [torch.from_numpy(array.copy()) for array in step.feeds.values()]
    operator = getattr(torch.ops.octavo, step.spec.schema.name)
    results = operator(*tensors, *step.spec.attributes.values())
    for tensor, array in zip(tensors, step.feeds.values(), strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array, "an input was changed")
    return [result.numpy() for result in results]


@functools.cache
def onnx_model(spec: Fused) -> onnx.ModelProto:
    """One node, and the function bodies that stand for it."""
    types = {
        "T": TensorProto.FLOAT,
        "float32": TensorProto.FLOAT,
        "int8": TensorProto.INT8,
        "int32": TensorProto.INT32,
    }
    inputs, outputs = (
        [helper.make_tensor_value_info(o.name, types[o.type_group], None) for o in operands]
        for operands in (spec.schema.inputs, spec.schema.outputs)
    )
    node = helper.make_node(
        spec.schema.onnx_name,
        [operand.name for operand in spec.schema.inputs],
        [operand.name for operand in spec.schema.outputs],
        domain="octavo",
        **spec.attributes,
    )
    return helper.make_model(
        helper.make_graph([node], "attention", inputs, outputs),
        functions=bodies_of([spec.schema.onnx_name]),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("octavo", 1)],
        ir_version=10,
    )


def run_onnxruntime(step: Step) -> list[Array]:
    """ONNX Runtime without our kernels: the function bodies are all it has."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        onnx_model(step.spec).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    results: list[Array] = session.run(None, step.feeds)
    return results


def run_onnx_reference(step: Step) -> list[Array]:
    evaluator: Any = ReferenceEvaluator(onnx_model(step.spec))
    results: list[Array] = evaluator.run(None, step.feeds)
    return results


IMPLEMENTATIONS: dict[str, Callable[[Step], list[Array]]] = {
    "torch": run_torch,
    "onnxruntime": run_onnxruntime,
    "onnx_reference": run_onnx_reference,
}
implementations = pytest.mark.parametrize("run", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
layouts = pytest.mark.parametrize("k_transposed", [0, 1], ids=["keys_by_row", "keys_transposed"])

# A prefill, a decode, a sequence without new tokens, a verification, a first token.
MIXED = ((0, 9), (12, 1), (7, 0), (4, 5), (0, 1))


def expected_attention(step: Step, keys: list[Wide], values: list[Wide]) -> Wide:
    """[T, H * Dv]"""
    parts = zip(step.queries, keys, values, strict=True)
    rows = [dense_attention(step.spec.attention, q, k, v) for q, k, v in parts]
    return np.concatenate([part.reshape(len(part), part.shape[1] * part.shape[2]) for part in rows])


def check(run: Callable[[Step], list[Array]], step: Step) -> None:
    attention, cache = run(step)
    expected = expected_attention(step, step.keys, step.values)
    np.testing.assert_allclose(attention, expected, rtol=1e-5, atol=1e-5)
    for slots, keys, values in zip(step.slots, step.keys, step.values, strict=True):
        found = step.read(cache, cache, slots)
        np.testing.assert_allclose(found[0], keys, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(found[1], values)
    written = np.isfinite(cache).sum() - np.isfinite(step.feeds["kv_cache"]).sum()
    sizes = step.spec.attention.key_size + step.spec.attention.value_size
    new_tokens = sum(new for _, new in step.sequences)
    assert written == new_tokens * step.spec.attention.kv_heads * sizes


@implementations
@layouts
@pytest.mark.parametrize("case", CASES)
def test_a_mixed_step(run: Callable[[Step], list[Array]], case: str, k_transposed: int) -> None:
    spec = CASES[case]
    attention = replace(spec.attention, k_transposed=k_transposed)
    check(run, Step(replace(spec, attention=attention), MIXED))


@implementations
@pytest.mark.parametrize("turned", [0, 8])
def test_a_step_without_tokens(run: Callable[[Step], list[Array]], turned: int) -> None:
    check(run, Step(Fused(turned=turned), ((5, 0), (0, 0))))


@implementations
def test_slot_minus_1_writes_nothing(run: Callable[[Step], list[Array]]) -> None:
    step = Step(Fused(), ((3, 0), (0, 4)))
    step.feeds["slot_mapping"][:] = -1
    _, cache = run(step)
    np.testing.assert_array_equal(cache, step.feeds["kv_cache"])


def test_a_quarter_turn_by_hand() -> None:
    """At an angle of 90 degrees, (1, 2) becomes (-2, 1), and (3, 4) becomes (-4, 3)."""
    spec = Fused(Attention(heads=1, kv_heads=1, key_size=4, value_size=4), turned=4)
    step = Step(spec, ((0, 1),))
    step.feeds["qkv"] = np.array([[0, 0, 0, 0, 1, 3, 2, 4, 0, 0, 0, 0]], np.float32)
    step.feeds["cos"], step.feeds["sin"] = np.zeros((1, 4), "f4"), np.ones((1, 4), "f4")
    _, cache = run_torch(step)
    assert step.read(cache, cache, step.slots[0])[0][0, 0].tolist() == [-2, -4, 1, 3]
    neighbours = replace(spec, interleaved=1)
    step = Step(neighbours, ((0, 1),))
    step.feeds["qkv"] = np.array([[0, 0, 0, 0, 1, 2, 3, 4, 0, 0, 0, 0]], np.float32)
    step.feeds["cos"], step.feeds["sin"] = np.zeros((1, 4), "f4"), np.ones((1, 4), "f4")
    _, cache = run_torch(step)
    assert step.read(cache, cache, step.slots[0])[0][0, 0].tolist() == [-2, 1, -4, 3]


@implementations
@layouts
@pytest.mark.parametrize("case", ["halves", "none", "narrow_value", "everything"])
def test_an_int8_cache(run: Callable[[Step], list[Array]], case: str, k_transposed: int) -> None:
    spec = CASES[case]
    attention = replace(spec.attention, k_transposed=k_transposed)
    step = Step(replace(spec, attention=attention, int8=True), MIXED)
    found, cache, scales = run(step)
    read = [step.read(cache, scales, slots) for slots in step.slots]
    expected = expected_attention(step, [k for k, _ in read], [v for _, v in read])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    for (keys, values), wanted_keys, wanted_values in zip(
        read, step.keys, step.values, strict=True
    ):
        _check_rounding(keys, wanted_keys)
        _check_rounding(values, wanted_values)
    changed = np.zeros((len(scales), attention.block_size), bool)
    changed.reshape(-1)[step.feeds["slot_mapping"]] = True
    before, after = step.feeds["kv_scales"].swapaxes(1, 3), scales.swapaxes(1, 3)
    np.testing.assert_array_equal(after[~changed], before[~changed])


def _check_rounding(found: Wide, wanted: Wide) -> None:
    """Half of a step at most, a step being a 127th of the largest of the token and head."""
    steps = np.abs(wanted).max(-1, keepdims=True) / 127
    assert (np.abs(found - wanted) <= steps * (0.5 + 1e-3)).all()


@implementations
def test_integers_of_a_value_by_hand(run: Callable[[Step], list[Array]]) -> None:
    """127 / 254 = 0.5 a step; 0.5 and 1.5 round to even; what is all zeros has the scale 0."""
    spec = Fused(Attention(heads=1, kv_heads=1, key_size=2, value_size=4), turned=0, int8=True)
    step = Step(spec, ((0, 1),))
    step.feeds["qkv"] = np.array([[0, 0, 0, 0, 1, 3, -254, 7]], np.float32)
    _, cache, scales = run(step)
    block, offset = divmod(int(step.slots[0][0]), spec.attention.block_size)
    assert cache[block, 1, 0, offset].tolist() == [0, 2, -127, 4]
    assert cache[block, 0, 0, offset, :2].tolist() == [0, 0]
    assert scales[block, :, 0, offset].tolist() == [0, 2]

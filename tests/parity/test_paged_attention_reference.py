"""The two references of `octavo::paged_attention`: the torch operator and the ONNX function body.

Both are compared with one dense formula in float64 over each sequence's own history, and that with
PyTorch's own attention where it can express the case.
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
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from octavo.graphs.ops import paged_attention_onnx
from octavo.graphs.ops.paged_attention import SCHEMA
from octavo.graphs.ops.paged_attention_torch import paged_attention_

Array = NDArray[Any]
Wide = NDArray[np.float64]


@dataclass(frozen=True)
class Attention:
    heads: int = 4
    kv_heads: int = 2
    key_size: int = 8
    value_size: int = 8
    block_size: int = 4
    causal: int = 1
    sliding_window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    k_transposed: int = 0
    dtype: str = "float32"

    @property
    def attributes(self) -> dict[str, Any]:
        return {
            "scale": 0.4,
            "causal": self.causal,
            "sliding_window": self.sliding_window,
            "softcap": self.softcap,
            "k_transposed": self.k_transposed,
        }

    @property
    def sink_values(self) -> Array:
        return np.linspace(-1.0, 2.0, self.heads if self.sinks else 0, dtype=np.float32)

    @property
    def slopes(self) -> Array:
        return np.geomspace(0.5, 0.05, self.heads, dtype=np.float32)[: self.heads * self.alibi]


CASES = {
    "grouped": Attention(heads=6, kv_heads=2),
    "multi_query": Attention(heads=3, kv_heads=1),
    "multi_head": Attention(heads=2, kv_heads=2),
    "bidirectional": Attention(causal=0),
    "window_m08_p10": Attention(sliding_window=5),
    "window_1": Attention(sliding_window=1),
    "softcap_m08": Attention(softcap=0.7),
    "sinks_m09": Attention(sinks=True),
    "alibi": Attention(alibi=True),
    "narrow_value": Attention(key_size=8, value_size=3),
    "wide_value": Attention(key_size=3, value_size=8),
    "odd_block": Attention(block_size=5),
    "everything": Attention(
        heads=6, kv_heads=3, key_size=5, value_size=7, sliding_window=6, softcap=0.9, sinks=True,
        alibi=True,
    ),
}  # fmt: skip


def dense_attention(spec: Attention, query: Wide, key: Wide, value: Wide) -> Wide:
    """Attention [n, H, Dv] of the last n tokens of a sequence over all its keys and values."""
    groups = spec.heads // spec.kv_heads
    scores = np.einsum("nhd,shd->hns", query, np.repeat(key, groups, 1))
    scores *= spec.attributes["scale"]
    if spec.softcap:
        scores = np.tanh(scores / spec.softcap) * spec.softcap
    key_at = np.arange(len(key))
    query_at = key_at[len(key) - len(query) :, None]
    if spec.alibi:
        scores += spec.slopes.astype(np.float64)[:, None, None] * (key_at - query_at)
    visible = np.ones((len(query), len(key)), bool)
    if spec.causal:
        visible &= key_at <= query_at
    if spec.sliding_window:
        visible &= query_at - key_at < spec.sliding_window
    weights = np.where(visible, np.exp(scores), 0.0)
    total = weights.sum(-1, keepdims=True)
    if spec.sinks:
        total += np.exp(spec.sink_values.astype(np.float64))[:, None, None]
    attended: Wide = np.einsum("hns,shd->nhd", weights / total, np.repeat(value, groups, 1))
    return attended


@dataclass
class Step:
    """A flattened step of sequences of (cached, new) tokens, and what has to come out."""

    spec: Attention
    sequences: tuple[tuple[int, int], ...]
    written: bool = True  # False: all slots are -1, the keys and values are in the cache already
    feeds: dict[str, Array] = field(init=False)
    attention: Wide = field(init=False)  # [T, H, Dv]
    cache_out: Array = field(init=False)

    def __post_init__(self) -> None:
        spec, rng = self.spec, np.random.default_rng(7)
        dtype = np.dtype(spec.dtype)
        width = max(-(-sum(s) // spec.block_size) for s in self.sequences) + 1
        num_blocks = width * len(self.sequences)
        tables = rng.permutation(num_blocks).reshape(len(self.sequences), width)
        row = max(spec.key_size, spec.value_size)
        # What nobody wrote must not be read.
        cache = np.full((num_blocks, 2, spec.kv_heads, spec.block_size, row), np.nan, dtype)
        self.cache_out = cache.copy()

        parts: dict[str, list[Array]] = {"query": [], "key": [], "value": [], "slots": []}
        expected: list[Wide] = []
        for table, (cached, new) in zip(tables, self.sequences, strict=True):
            total = cached + new
            query = rng.standard_normal((new, spec.heads, spec.key_size)).astype(dtype)
            key = rng.standard_normal((total, spec.kv_heads, spec.key_size)).astype(dtype)
            value = rng.standard_normal((total, spec.kv_heads, spec.value_size)).astype(dtype)
            at = np.arange(total)
            slots = table[at // spec.block_size] * spec.block_size + at % spec.block_size
            known = cached if self.written else total
            for slot, k, v in zip(slots, key, value, strict=True):
                self._write(self.cache_out, int(slot), k, v)
            for slot, k, v in zip(slots[:known], key, value, strict=False):
                self._write(cache, int(slot), k, v)
            wide = [array.astype(np.float64) for array in (query, key, value)]
            expected.append(dense_attention(spec, *wide))
            # Keys and values that are not to be written are wrong ones.
            spoilt = 0 if self.written else 1
            parts["query"].append(query)
            parts["key"].append(key[cached:] + dtype.type(spoilt))
            parts["value"].append(value[cached:] + dtype.type(spoilt))
            parts["slots"].append(slots[cached:] if self.written else np.full(new, -1))
        self.attention = np.concatenate(expected)
        cached_tokens, new_tokens = np.array(self.sequences).T
        self.feeds = {
            "query": np.concatenate(parts["query"]),
            "key": np.concatenate(parts["key"]),
            "value": np.concatenate(parts["value"]),
            "kv_cache": cache,
            "slot_mapping": np.concatenate(parts["slots"]).astype(np.int32),
            "block_tables": tables.astype(np.int32),
            "query_start_loc": np.cumsum([0, *new_tokens]).astype(np.int32),
            "prefix_offsets": cached_tokens.astype(np.int32),
            "sinks": spec.sink_values,
            "alibi_slopes": spec.slopes,
        }

    def _write(self, cache: Array, slot: int, key: Array, value: Array) -> None:
        block, offset = divmod(slot, self.spec.block_size)
        heads, size, row = cache.shape[2:]
        if self.spec.k_transposed:
            cache[block, 0].reshape(heads, row, size)[:, : key.shape[1], offset] = key
        else:
            cache[block, 0, :, offset, : key.shape[1]] = key
        cache[block, 1, :, offset, : value.shape[1]] = value


Results = tuple[Array, Array]  # attention, kv_cache_out


def run_torch(step: Step) -> Results:
    tensors = [torch.from_numpy(array.copy()) for array in step.feeds.values()]
    before = tensors[3].clone()
    attention, cache = torch.ops.octavo.paged_attention(*tensors, *step.spec.attributes.values())
    assert torch.equal(tensors[3].nan_to_num(), before.nan_to_num()), "the input was changed"
    return attention.numpy(), cache.numpy()


def run_torch_in_place(step: Step) -> Results:
    tensors = [torch.from_numpy(array.copy()) for array in step.feeds.values()]
    run: Any = paged_attention_
    attention = run(*tensors, *step.spec.attributes.values())
    return attention.numpy(), tensors[3].numpy()


@functools.cache
def onnx_model(spec: Attention) -> onnx.ModelProto:
    """One node and the function body that stands for it."""
    element_type = helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype))
    types = {"T": element_type, "int32": TensorProto.INT32, "float32": TensorProto.FLOAT}
    inputs, outputs = (
        [helper.make_tensor_value_info(o.name, types[o.type_group], None) for o in operands]
        for operands in (SCHEMA.inputs, SCHEMA.outputs)
    )
    node = helper.make_node(
        SCHEMA.onnx_name,
        [operand.name for operand in SCHEMA.inputs],
        [operand.name for operand in SCHEMA.outputs],
        domain="octavo",
        **spec.attributes,
    )
    return helper.make_model(
        helper.make_graph([node], "attention", inputs, outputs),
        functions=[paged_attention_onnx.function()],
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("octavo", 1)],
        ir_version=10,
    )


def run_onnxruntime(step: Step) -> Results:
    """ONNX Runtime without our kernels: the function body is all it has."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        onnx_model(step.spec).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    attention, cache = session.run(None, step.feeds)
    return attention, cache


def run_onnx_reference(step: Step) -> Results:
    evaluator: Any = ReferenceEvaluator(onnx_model(step.spec))
    attention, cache = evaluator.run(None, step.feeds)
    return attention, cache


IMPLEMENTATIONS: dict[str, Callable[[Step], Results]] = {
    "torch": run_torch,
    "torch_in_place": run_torch_in_place,
    "onnxruntime": run_onnxruntime,
    "onnx_reference": run_onnx_reference,
}
implementations = pytest.mark.parametrize("run", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
layouts = pytest.mark.parametrize("k_transposed", [0, 1], ids=["keys_by_row", "keys_transposed"])

# A prefill, a decode, a sequence without new tokens, a verification, a chunk, a first token.
MIXED = ((7, 0), (0, 9), (12, 1), (4, 5), (8, 8), (0, 1))


def check(run: Callable[[Step], Results], step: Step, tolerance: float = 2e-6) -> None:
    attention, cache = run(step)
    assert attention.dtype == cache.dtype == np.dtype(step.spec.dtype)
    np.testing.assert_allclose(attention, step.attention, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(cache, step.cache_out)


@implementations
@layouts
@pytest.mark.parametrize("case", CASES)
def test_a_mixed_step(run: Callable[[Step], Results], case: str, k_transposed: int) -> None:
    check(run, Step(replace(CASES[case], k_transposed=k_transposed), MIXED))


@implementations
@layouts
def test_slot_minus_1_writes_nothing(run: Callable[[Step], Results], k_transposed: int) -> None:
    spec = replace(CASES["everything"], k_transposed=k_transposed)
    check(run, Step(spec, MIXED, written=False))


@implementations
@layouts
def test_a_step_without_tokens(run: Callable[[Step], Results], k_transposed: int) -> None:
    check(run, Step(Attention(k_transposed=k_transposed), ((5, 0), (0, 0))))


@pytest.mark.parametrize("run", [run_torch, run_torch_in_place, run_onnxruntime])
@pytest.mark.parametrize("case", ["grouped", "everything"])
def test_half_precision(run: Callable[[Step], Results], case: str) -> None:
    """The scores are computed in float32: only the result is rounded to 11 bits."""
    spec = replace(CASES[case], dtype="float16", k_transposed=1)
    check(run, Step(spec, MIXED), tolerance=2e-3)


@implementations
def test_a_chunked_prefill_equals_the_whole(run: Callable[[Step], Results]) -> None:
    """K01, K03: the second chunk starts on a block boundary, the third within a block."""
    spec = CASES["everything"]
    whole = Step(spec, ((0, 14),))
    cache, chunks = whole.feeds["kv_cache"], []
    for start, end in ((0, 8), (8, 11), (11, 14)):
        part = Step(spec, ((0, 14),))
        per_token = ("query", "key", "value", "slot_mapping")
        part.feeds |= {name: whole.feeds[name][start:end] for name in per_token}
        part.feeds |= {
            "kv_cache": cache,
            "query_start_loc": np.array([0, end - start], np.int32),
            "prefix_offsets": np.array([start], np.int32),
        }
        attention, cache = run(part)
        chunks.append(attention)
    np.testing.assert_allclose(np.concatenate(chunks), whole.attention, rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(cache, whole.cache_out)


@pytest.mark.parametrize("sliding_window", [0, 4])
def test_the_dense_formula_equals_pytorchs_attention(sliding_window: int) -> None:
    spec = Attention(heads=6, kv_heads=2, sliding_window=sliding_window)
    rng = np.random.default_rng(3)
    query, key, value = (rng.standard_normal((9, heads, 8)) for heads in (6, 2, 2))
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    if sliding_window:
        mask = mask.triu(1 - sliding_window)
    q, k, v = (torch.from_numpy(x).transpose(0, 1)[None] for x in (query, key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=spec.attributes["scale"], enable_gqa=True
    )
    found = dense_attention(spec, query, key, value)
    np.testing.assert_allclose(found, expected[0].transpose(0, 1).numpy(), rtol=1e-10)


def test_a_sink_enters_the_denominator_only_m09() -> None:
    """One key of score 0 beside a sink of -1, by hand."""
    spec = Attention(heads=1, kv_heads=1, sinks=True)
    assert spec.sink_values.tolist() == [-1.0]
    value = np.ones((1, 1, 8))
    found = dense_attention(spec, np.zeros((1, 1, 8)), np.zeros((1, 1, 8)), value)
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-1.0)))

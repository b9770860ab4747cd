"""`octavo::accept`: reference, function body and kernel against an oracle, and its exactness."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from octavo.graphs.ops.accept import SCHEMA
from octavo.graphs.ops.accept_onnx import function
from octavo.graphs.ops.accept_torch import accept
from octavo.graphs.ops.schema import DOMAIN, OPSET_VERSION
from tests.backend.acceptance_steps import Row, distribution, expected, is_clear, pack
from tests.backend.kernel_variants import VARIANTS, library_of, selected

VOCAB = 5
TYPES = {
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "int32": TensorProto.INT32,
}
Array = NDArray[Any]


@cache
def session(variant: str | None, vocab: int) -> onnxruntime.InferenceSession:
    """With the kernels of an instruction set; None has the function body alone."""
    inputs, outputs = (
        [helper.make_tensor_value_info(x.name, TYPES[x.type_group], None) for x in operands]
        for operands in (SCHEMA.inputs, SCHEMA.outputs)
    )
    names = [x.name for x in SCHEMA.inputs]
    node = helper.make_node(
        SCHEMA.onnx_name, names, [SCHEMA.outputs[0].name], domain=DOMAIN, vocab=vocab
    )
    model = helper.make_model(
        helper.make_graph([node], "accept", inputs, outputs),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, OPSET_VERSION)],
        ir_version=10,
        functions=[function()],
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if variant is None:
        return onnxruntime.InferenceSession(model.SerializeToString(), options)
    options.register_custom_ops_library(str(library_of(variant)))
    with selected(variant):
        return onnxruntime.InferenceSession(model.SerializeToString(), options)


IMPLEMENTATIONS = ["torch", "body", *VARIANTS]


def run(name: str, operands: dict[str, Array], vocab: int = VOCAB) -> list[int]:
    if name == "torch":
        tensors = {name: torch.from_numpy(array) for name, array in operands.items()}
        return [int(token) for token in accept(**tensors, vocab=vocab)]
    one = session(None if name == "body" else name, vocab)
    return [int(token) for token in one.run(None, operands)[0]]


logits = st.lists(
    st.sampled_from([-3.0, -1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 2.5, -np.inf]),
    min_size=VOCAB,
    max_size=VOCAB,
)
uniform = st.sampled_from([0.0, 0.07, 0.21, 0.43, 0.64, 0.86, 0.99])


@st.composite
def probabilities(draw: st.DrawFn) -> list[float]:
    weights = draw(st.lists(st.integers(0, 8), min_size=VOCAB, max_size=VOCAB).filter(any))
    return [weight / sum(weights) for weight in weights]


@st.composite
def row(draw: st.DrawFn, is_last: bool) -> Row:
    values = draw(logits)
    edits = draw(
        st.dictionaries(
            st.integers(0, VOCAB - 1), st.sampled_from([-np.inf, -2.0, 1.5]), max_size=2
        )
    )
    assume(any(np.isfinite(edits.get(token, value)) for token, value in enumerate(values)))
    probs = None if is_last else draw(st.none() | probabilities())
    draft = -1
    if not is_last:
        likely = range(VOCAB) if probs is None else [t for t in range(VOCAB) if probs[t] > 0]
        draft = draw(st.sampled_from(list(likely)))
    return Row(
        values,
        draft,
        probs,
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0, 1.6])),
        top_k=draw(st.sampled_from([0, 1, 2, 3, 9])),
        top_p=draw(st.sampled_from([1.0, 0.35, 0.8])),
        min_p=draw(st.sampled_from([0.0, 0.11, 0.33])),
        uniforms=(draw(uniform), draw(uniform)),
        edits=edits,
    )


@st.composite
def batches(draw: st.DrawFn) -> list[list[Row]]:
    lengths = draw(st.lists(st.integers(1, 4), max_size=3))
    return [[draw(row(i == n - 1)) for i in range(n)] for n in lengths]


@settings(max_examples=300, deadline=None)
@given(batches())
def test_all_implementations_equal_the_oracle(sequences: list[list[Row]]) -> None:
    assume(is_clear(sequences))
    operands, wanted = pack(sequences, VOCAB), expected(sequences)
    for name in IMPLEMENTATIONS:
        assert run(name, operands) == wanted, name


P = [1.0, 0.5, -0.5, 0.0, -2.0]
Q = [0.1, 0.4, 0.3, 0.0, 0.2]


def grid(count: int) -> Array:
    """Midpoints that stand for all of [0, 1)."""
    return (np.arange(count) + 0.5) / count


@pytest.mark.parametrize("name", ["torch", "body", VARIANTS[-1]])
@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.75}, {"min_p": 0.3}, {"edits": {0: -1.0}}],
)
@pytest.mark.parametrize("is_certain", [True, False])
def test_s16_the_next_token_has_the_targets_distribution(
    name: str, params: dict[str, Any], is_certain: bool
) -> None:
    """Every draft with its probability, every pair of uniforms of a grid: sums to p, as far as the
    grid is fine; test_accept_graph.py sums exactly. Block verification is not offered.

    The formula is that of Leviathan et al. (2023): accept with min(1, p / q), else draw from what
    p has beyond q.
    """
    count = 60
    points = list(itertools.product(grid(count), grid(count)))
    p = distribution(Row(P, **params))
    found = np.zeros(VOCAB)
    for draft, likelihood in enumerate(Q):
        if likelihood == 0:
            continue
        rows = [
            [Row(P, draft, None if is_certain else Q, uniforms=point, **params), Row(P)]
            for point in points
        ]
        tokens = np.array(run(name, pack(rows, VOCAB)))[::2]
        found += likelihood * np.bincount(tokens, minlength=VOCAB) / len(points)
    # The grid rounds each of the few edges by at most one cell in one direction.
    np.testing.assert_allclose(found, p, atol=4 / count)
    assert found[p == 0].sum() == 0


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_next_two_tokens_have_the_targets_joint_distribution(name: str) -> None:
    """20,000 draws: the second row's logits depend on the first token, as a model's do."""
    generator = np.random.default_rng(5)
    second = generator.normal(0, 1, (VOCAB, VOCAB)).tolist()
    count = 20_000
    drafts = generator.choice(VOCAB, size=count, p=Q)
    # What a run without acceptance would put in the second row: the row after the draft.
    uniforms = generator.random((2 * count, 2))
    rows = [
        [
            Row(P, int(draft), Q, temperature=0.8, top_p=0.9, uniforms=tuple(uniforms[2 * i])),
            Row(second[draft], temperature=0.8, top_p=0.9, uniforms=tuple(uniforms[2 * i + 1])),
        ]
        for i, draft in enumerate(drafts)
    ]
    tokens = np.array(run(name, pack(rows, VOCAB))).reshape(-1, 2)
    first = distribution(Row(P, temperature=0.8, top_p=0.9))
    accepted = tokens[:, 1] >= 0
    # Of a pair whose first token was no accepted draft, a later step draws the second one.
    joint = np.zeros((VOCAB, VOCAB))
    for a in range(VOCAB):
        after = distribution(Row(second[a], temperature=0.8, top_p=0.9))
        joint[a] = first[a] * after
        ended = (tokens[:, 0] == a) & ~accepted
        drawn = np.random.default_rng(a).choice(VOCAB, size=int(ended.sum()), p=after)
        tokens[ended, 1] = drawn
    counts = np.zeros((VOCAB, VOCAB))
    np.add.at(counts, (tokens[:, 0], tokens[:, 1]), 1)
    possible = joint > 0
    assert counts[~possible].sum() == 0
    statistic = (((counts - count * joint) ** 2)[possible] / (count * joint[possible])).sum()
    # chi-square of 24 degrees of freedom: 60 is passed by one in 17,000.
    assert statistic < 60


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_s11_a_draw_of_zero_does_not_accept_what_is_impossible(name: str) -> None:
    """vllm-ascend#13730."""
    impossible = Row(P, 4, uniforms=(0.0, 0.3), edits={4: -np.inf})
    outside = Row(P, 4, Q, uniforms=(0.0, 0.3), top_k=2)
    for one in (impossible, outside):
        token, *_ = run(name, pack([[one, Row(P)]], VOCAB))
        assert token != 4


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_s07_every_row_has_its_own_edits(name: str) -> None:
    """vllm#42744: not the last row alone. Greedy rows are edited as well."""
    rows = [
        Row(P, 1, temperature=0.0, edits={0: -np.inf}),
        Row(P, 2, temperature=0.0, edits={0: -np.inf, 1: -np.inf, 2: 3.0}),
        Row(P, temperature=0.0, edits={3: 7.0}),
    ]
    assert run(name, pack([rows], VOCAB)) == [1, 2, 3]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_s14_parameters_are_those_of_each_sequence(name: str) -> None:
    """vllm#9834: the same rows, one greedy, one cut to its likeliest token, one free."""
    sequences = [
        [Row(P, 1, temperature=0.0), Row(P)],
        [Row(P, 1, top_k=1), Row(P)],
        [Row(P, 1, uniforms=(0.1, 0.5)), Row(P, uniforms=(0.0, 0.99))],
    ]
    assert run(name, pack(sequences, VOCAB)) == [0, -1, 0, -1, 1, 4]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_sequence_without_numbers_harms_no_other(name: str, bad: float) -> None:
    broken = [Row([0.0, bad, 0.0, 0.0, 0.0], 2), Row(P)]
    nothing = [Row([-np.inf] * VOCAB)]
    whole = [Row(P, 0, uniforms=(0.1, 0.5)), Row(P, uniforms=(0.5, 0.01))]
    assert run(name, pack([broken, whole, nothing], VOCAB)) == [-1, -1, 0, 0, -1]


def test_a_kernel_refuses_what_lies_outside() -> None:
    operands = pack([[Row(P, 1), Row(P)]], VOCAB)
    for name, value in (
        ("first_rows", 3),
        ("draft_token_ids", VOCAB),
        ("prob_rows", 0),
    ):
        wrong = {**operands, name: np.full_like(operands[name], value)}
        with pytest.raises(Exception, match=f"{name} has {value}, which is not in"):
            session(VARIANTS[-1], VOCAB).run(None, wrong)


def test_a_large_vocabulary_goes_the_long_way() -> None:
    """Lists and whole rows take other code in the kernel: both equal the reference."""
    vocab = 3000
    generator = np.random.default_rng(3)
    rows = []
    for top_k, top_p, is_certain in itertools.product((0, 7, 900), (1.0, 0.7), (True, False)):
        values = (generator.normal(0, 2, vocab)).tolist()
        q = generator.dirichlet(np.ones(vocab)).tolist()
        draft = int(np.argmax(values)) if is_certain else int(generator.integers(vocab))
        probs = None if is_certain else q
        for u in generator.random((6, 2)).tolist():
            one = Row(values, draft, probs, top_k=top_k, top_p=top_p, uniforms=(u[0], u[1]))
            rows.append([one, Row(values, top_k=top_k, top_p=top_p, uniforms=(u[1], u[0]))])
    operands = pack(rows, vocab)
    wanted = run("torch", operands, vocab)
    for name in ("body", *VARIANTS):
        assert run(name, operands, vocab) == wanted, name

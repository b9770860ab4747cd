"""Every lowering rule against PyTorch: a small module, exported, lowered, run by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from octavo.backends.onnx_lowering.builder import IR_VERSION
from octavo.backends.onnx_lowering.lowering import RULES, Layouts, lower_graph, target_name
from octavo.compiler.passes.dead_code import remove_dead_code
from octavo.compiler.passes.functionalize import functionalize

Function = Callable[..., Any]


class Calls(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def positive(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)) + 0.1


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def ids(*shape: int, below: int = 5) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(0))


def exported(
    function: Function, inputs: tuple[Tensor, ...], fewest_rows: int = 1
) -> torch.export.ExportedProgram:
    """An axis of seven is dynamic, as the token axis of a model is."""
    rows = Dim("rows", min=fewest_rows, max=64)
    shapes = (tuple({0: rows} if x.dim() and x.shape[0] == 7 else {} for x in inputs),)
    program = torch.export.export(Calls(function), inputs, dynamic_shapes=shapes, strict=False)
    return remove_dead_code(program)[0]


def lowered_results(
    program: torch.export.ExportedProgram, inputs: tuple[Tensor, ...]
) -> list[np.ndarray[Any, Any]]:
    model = ir.Model(lower_graph(program, Layouts()), ir_version=IR_VERSION)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [value.name for value in session.get_inputs()]
    feeds = dict(zip(names, (x.numpy() for x in inputs), strict=True))
    results: list[np.ndarray[Any, Any]] = session.run(None, feeds)
    return results


X = normal(7, 6)
Y = normal(7, 6) * 0.5 + 1
CUBE = normal(7, 4, 6)
IDS = ids(7, 3)
MASK = X > 0

CASES: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "arithmetic": (lambda a, b: (a + 2 * b - 3, torch.sub(a, b, alpha=2), 1 - a, a / b), (X, Y)),
    "mixed dtypes": (lambda a, i: a * i[:, :1] + i[:, 1:2], (X, IDS)),
    "powers": (lambda a: (a**2, a**3, a.pow(0.5), a.square(), 2.0**a), (positive(7, 6),)),
    "roots": (lambda a: (a.sqrt(), a.rsqrt(), a.reciprocal(), a.log()), (positive(7, 6),)),
    "trigonometry": (lambda a: (a.cos(), a.sin(), a.tanh()), (X,)),
    "exponentials": (lambda a: (a.exp(), a.expm1(), a.sigmoid(), nn.functional.softplus(a)), (X,)),
    "activations": (
        lambda a: (
            nn.functional.silu(a),
            nn.functional.gelu(a),
            nn.functional.gelu(a, approximate="tanh"),
            a.relu(),
        ),
        (X,),
    ),
    "signs": (lambda a: (a.abs(), -a, a.floor(), a.ceil(), a.round(), a.erf()), (X,)),
    "bounds": (
        lambda a, b: (
            a.clamp(-0.5, 0.5),
            a.clamp(max=0.1),
            a.clamp_min(0.2),
            torch.clamp_max(a, 0.3),
            a.clamp(min=b),
            torch.maximum(a, b),
            torch.minimum(a, b),
            torch.min(a, b),
        ),
        (X, Y),
    ),
    "comparisons": (
        lambda a, b, i: (a > b, a >= 0.5, a < b, a <= b, i == 2, i != 1, i >= 1.5),
        (X, Y, IDS),
    ),
    "booleans": (
        lambda m, a: (
            ~m,
            m & (a > 1),
            m | (a > 1),
            m.logical_not(),
            m.logical_and(a > 1),
            m.logical_or(a > 1),
        ),
        (MASK, X),
    ),
    "bits": (
        lambda i: (torch.bitwise_and(i, i + 1), torch.bitwise_or(i, i + 1), torch.bitwise_not(i)),
        (IDS,),
    ),
    "selections": (
        lambda m, a, b: (torch.where(m, a, b), a.masked_fill(m, float("-inf"))),
        (MASK, X, Y),
    ),
    "casts": (lambda a, i: (i.float(), a.to(torch.int64), i.type_as(a), a.double()), (X, IDS)),
    "reductions": (
        lambda a: (a.mean(-1), a.mean(1, keepdim=True), a.sum(0), a.sum(), a.amax(-1), a.mean()),
        (X,),
    ),
    "integer sums": (lambda i, m: (i.sum(-1), m.sum(-1)), (IDS, MASK)),
    "maxima": (lambda a: a.max(-1), (X,)),
    "softmax": (lambda a: (a.softmax(-1), a.softmax(0)), (X,)),
    "cumulative sums": (lambda i, m: (i.cumsum(0), m.cumsum(-1)), (IDS, MASK)),
    "remainders": (
        lambda i, a: ((i - 3) // 2, (i - 3) % 2, a % 0.7, torch.div(a, 0.3, rounding_mode="trunc")),
        (IDS, X),
    ),
    "matrix products": (
        lambda a, b, c: (
            a @ b,
            torch.mm(a, b),
            torch.bmm(c, c.transpose(1, 2)),
            torch.addmm(b[0, :5], a, b),
        ),
        (X, normal(6, 5), CUBE),
    ),
    "views": (
        lambda c: (c.view(-1, 24), c.reshape(-1, 2, 12), c.flatten(1), c.flatten(0, 1), c[:, None]),
        (CUBE,),
    ),
    "orders": (lambda c: (c.transpose(1, 2), c.permute(2, 0, 1), c[:, 0].t(), c.mT), (CUBE,)),
    "expansions": (
        lambda a: (a[:, None].expand(-1, 3, -1), a.repeat(2, 3), a[:, :1].expand(-1, 6)),
        (X,),
    ),
    "repeats": (
        lambda c: (c.repeat_interleave(3, 1), c.repeat_interleave(2, 0), c.repeat_interleave(2)),
        (CUBE,),
    ),
    "joins": (
        lambda a, b, i: (
            torch.cat([a, b], -1),
            torch.concat([a, i]),
            torch.stack([a, b], 1),
        ),
        (X, Y, IDS[:, [0, 0, 0, 1, 1, 1]].contiguous()),
    ),
    "splits": (
        lambda a: (*a.split(2, -1), *a.chunk(3, -1), *a.split([1, 5], -1), *a[:, :2].unbind(1)),
        (X,),
    ),
    "slices": (lambda a: (a[:, 1:4], a[:, ::2], a[..., -2:], a[:, 2], a[:-1], a[1:]), (X,)),
    "squeezes": (lambda a: (a[:, :1].squeeze(-1), a[:, None].squeeze(1), a.unsqueeze(-1)), (X,)),
    "differences": (lambda i: (torch.diff(i, dim=0), torch.diff(i, prepend=i[:, :1])), (IDS,)),
    "rows": (lambda a, i: (a[i[:, 0]], a.index_select(0, i[:, 0])), (X, IDS)),
    "elements": (lambda a, i: (a.gather(1, i), a[i[:, 0], i[:, 1]]), (X, IDS)),
    "inner indices": (lambda c, i: (c[:, i[:, 0] % 4], c[:, i[:, 0] % 4, i[:, 1]]), (CUBE, IDS)),
    "largest": (lambda a: a.topk(3, -1), (X,)),
    "scatters": (
        lambda a, i: (a.scatter(1, i, 0.5), torch.zeros_like(a).scatter(1, i, a)),
        (X, torch.arange(3).repeat(7, 1)),
    ),
    "constants": (
        lambda a: (
            torch.ones_like(a),
            torch.full_like(a, 2.5),
            torch.zeros(a.shape[0], 3),
            torch.ones(a.shape[0]),
            torch.full((2, a.shape[0]), 7),
            a.new_zeros(a.shape[0], 2),
            torch.arange(a.shape[0]),
            torch.arange(1, 9, 2),
        ),
        (X,),
    ),
    "sizes": (lambda a: a * a.shape[0] + (a.shape[0] * 2 - 1) + a.shape[0] // 2, (X,)),
    "layer norm": (
        lambda a, w, b: (
            nn.functional.layer_norm(a, (6,), w, b, 1e-6),
            nn.functional.layer_norm(a, (6,)),
        ),
        (X, normal(6), positive(6)),
    ),
    "rms norm": (lambda a, w: nn.functional.rms_norm(a, (6,), w, 1e-6), (X, normal(6))),
    "linear": (
        lambda a, c, w, b: (
            nn.functional.linear(a, w, b),
            nn.functional.linear(a, w),
            nn.functional.linear(c, w, b),
            nn.functional.linear(a[None], w),
        ),
        (X, CUBE, normal(3, 6), normal(3)),
    ),
    "embedding": (lambda i, w: nn.functional.embedding(i, w), (IDS, normal(5, 4))),
}


@pytest.mark.parametrize("case", CASES)
def test_a_lowered_graph_computes_what_pytorch_does(case: str) -> None:
    function, inputs = CASES[case]
    program = exported(function, inputs, fewest_rows=4)  # some cases slice a row off
    expected = function(*inputs)
    results = lowered_results(program, inputs)
    wanted = expected if isinstance(expected, tuple) else (expected,)
    assert len(results) == len(wanted)
    for result, value in zip(results, wanted, strict=True):
        assert result.dtype == value.numpy().dtype
        np.testing.assert_allclose(result, value.numpy(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("rows", [1, 2, 31])
def test_one_graph_serves_every_number_of_rows(rows: int) -> None:
    def function(a: Tensor, w: Tensor) -> Tensor:
        heads = nn.functional.linear(a, w).view(a.shape[0], 2, 3).transpose(0, 1)
        return heads.softmax(-1).transpose(0, 1).reshape(a.shape[0], 6)

    weight = normal(6, 6)
    program = exported(function, (X, weight))
    inputs = (normal(rows, 6), weight)
    np.testing.assert_allclose(
        lowered_results(program, inputs)[0], function(*inputs).numpy(), rtol=2e-6, atol=2e-6
    )


def assigned(a: Tensor, i: Tensor) -> Tensor:
    made = a.new_empty(a.shape[0], 8)
    made[:, :6] = a
    made[:, 6:] = i[:, :1]
    return made


RETRACED: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "assignments": (assigned, (X, IDS)),
    "in place": (lambda a, b: (a * 2).add_(b).mul_(b).clamp_(max=1.5), (X, Y)),
    "softmax and casts": (
        lambda a, i: ((a.softmax(-1) * 2).add_(1), i.float() @ a[:3, :]),
        (X, IDS),
    ),
}


def retraced(function: Function, inputs: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    """What the pass that removes mutation makes of an exported program."""
    program, record = functionalize(exported(function, inputs, fewest_rows=4))
    assert record.matches > 0
    return remove_dead_code(program)[0]


@pytest.mark.parametrize("case", RETRACED)
def test_a_functionalised_graph_computes_what_pytorch_does(case: str) -> None:
    function, inputs = RETRACED[case]
    expected = function(*inputs)
    wanted = expected if isinstance(expected, tuple) else (expected,)
    results = lowered_results(retraced(function, inputs), inputs)
    for result, value in zip(results, wanted, strict=True):
        np.testing.assert_allclose(result, value.numpy(), rtol=2e-6, atol=2e-6)


def operator_of(target: str) -> str:
    """`mul` of `aten.mul.Tensor`: overloads share their rule."""
    return target.split(".")[1]


def test_every_rule_is_tested() -> None:
    programs = [exported(*case, fewest_rows=4) for case in CASES.values()]
    programs += [retraced(*case) for case in RETRACED.values()]
    reached = {
        operator_of(target_name(node))
        for program in programs
        for node in program.graph.nodes
        if node.op == "call_function"
    }
    # Octavo's own operators have tests of their own.
    rules = {operator_of(target) for target in RULES if not target.startswith("octavo.")}
    assert rules <= reached

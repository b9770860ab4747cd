"""Fusions of norms, activations and residuals: what matches, what is left, and why."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional

from octavo.compiler.passes.batch_views import remove_identity_views, split_batch_views
from octavo.compiler.passes.conv1d import conv1d
from octavo.compiler.passes.flatten_batch import flatten_batch
from octavo.compiler.passes.fuse_activations import fuse_activations
from octavo.compiler.passes.fuse_norms import fuse_norms
from octavo.compiler.passes.fuse_residuals import fuse_residuals
from octavo.compiler.passes.matching import operator_of
from octavo.graphs.ops.activation import Function
from octavo.graphs.spec import PassRecord

Calls = Callable[..., Any]
Pass = Callable[[ExportedProgram], tuple[ExportedProgram, PassRecord]]

ROWS, DEPTH = 7, 16


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Rowwise(nn.Module):
    """Parameters beside a function of them and of the inputs."""

    def __init__(self, function: Calls) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(normal(DEPTH, seed=1))
        self.bias = nn.Parameter(normal(DEPTH, seed=2))
        self.matrix = nn.Parameter(normal(DEPTH, DEPTH, seed=3))

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def check(
    apply: Pass, function: Calls, *inputs: Tensor
) -> tuple[list[str], PassRecord, ExportedProgram]:
    return check_module(apply, Rowwise(function), *inputs)


def check_module(
    apply: Pass, module: nn.Module, *inputs: Tensor
) -> tuple[list[str], PassRecord, ExportedProgram]:
    """Runs a pass: results must stay; returns the operators left, the record and the program."""
    rows = Dim("rows", min=2, max=64)
    given = tuple({0: rows} if x.shape[0] == ROWS else {} for x in inputs)
    shapes = (given,) if isinstance(module, Rowwise) else given
    with torch.no_grad():
        exported = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
        expected = module(*inputs)
        exported, record = apply(exported)
        exported.graph.lint()
        found = exported.module()(*inputs)
    wanted = expected if isinstance(expected, tuple) else (expected,)
    results = found if isinstance(found, tuple) else (found,)
    for result, value in zip(results, wanted, strict=True):
        torch.testing.assert_close(result, value, rtol=1e-5, atol=1e-5)
    names = [operator_of(node) for node in exported.graph.nodes if node.op == "call_function"]
    return [n for n in names if n not in ("getitem", "aten.sym_size")], record, exported


def mean_square(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True) + 1e-3


def centered(m: Rowwise, x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return m.weight * ((x - mean) * torch.rsqrt(variance + 1e-3))


NORMS: dict[str, Calls] = {
    "weight before": lambda m, x: m.weight * (x * torch.rsqrt(mean_square(x))),
    "weight after": lambda m, x: (x * torch.rsqrt(mean_square(x))) * m.weight,
    "root first": lambda m, x: torch.rsqrt(mean_square(x)) * x * m.weight,
    "no weight": lambda m, x: x * torch.rsqrt(mean_square(x)),
    "one more than the weight": lambda m, x: x * torch.rsqrt(mean_square(x)) * (1.0 + m.weight),
    "weight and bias": lambda m, x: x * torch.rsqrt(mean_square(x)) * m.weight + m.bias,
    "x * x": lambda m, x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-3) * m.weight,
    "square": lambda m, x: x * torch.rsqrt(1e-3 + x.square().mean([-1], keepdim=True)),
    "power": lambda m, x: x * torch.pow(mean_square(x), -0.5) * m.weight,
    "reciprocal": lambda m, x: x * mean_square(x).sqrt().reciprocal() * m.weight,
    "rms_norm": lambda m, x: functional.rms_norm(x, (DEPTH,), m.weight, 1e-3),
    "rms_norm's own epsilon": lambda m, x: functional.rms_norm(x, (DEPTH,)),
    "layer_norm": lambda m, x: functional.layer_norm(x, (DEPTH,), m.weight, m.bias, 1e-3),
    "bare layer_norm": lambda m, x: functional.layer_norm(x, (DEPTH,)),
    "centered": centered,
}


@pytest.mark.parametrize("case", NORMS)
@pytest.mark.parametrize("heads", [None, 3])
def test_every_spelling_of_a_norm_is_one_node(case: str, heads: int | None) -> None:
    x = normal(ROWS, DEPTH) if heads is None else normal(ROWS, heads, DEPTH)
    left, record, exported = check(fuse_norms, NORMS[case], x)
    assert record.matches == 1
    views = [] if heads is None else ["aten.reshape"]
    assert left == [*views, "octavo.norm", *views]
    unused = [n for n in exported.graph.nodes if n.op == "placeholder" and not n.users]
    assert unused == []


@pytest.mark.parametrize(
    ("function", "x", "reason"),
    [
        (lambda m, x: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-3), (ROWS, DEPTH), None),
        (lambda m, x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-3), (ROWS, DEPTH), None),
        (
            lambda m, x: (x + 1) * torch.rsqrt(mean_square(x)),
            (ROWS, DEPTH),
            "1 x an inverse root of a mean square that scales something else",
        ),
        (
            lambda m, x: functional.layer_norm(x, (3, DEPTH)),
            (ROWS, 3, DEPTH),
            "1 x a norm over 2 axes",
        ),
        (
            lambda m, x: functional.layer_norm(x.double(), (DEPTH,)),
            (ROWS, DEPTH),
            "1 x a norm of values other than float32 rows",
        ),
    ],
)
def test_what_is_no_norm_of_rows_is_left(function: Calls, x: Any, reason: str | None) -> None:
    left, record, _ = check(fuse_norms, function, normal(*x))
    assert "octavo.norm" not in left
    assert record.skipped == (() if reason is None else (reason,))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(mean_square(x)))


def test_the_addition_before_norms_goes_into_the_first_and_its_sum_stays() -> None:
    def function(m: Rowwise, x: Tensor, y: Tensor) -> Any:
        total = x + y
        return rms_norm(total, m.weight), functional.layer_norm(total, (DEPTH,)), total * 2

    left, record, _ = check(fuse_norms, function, normal(ROWS, DEPTH), normal(ROWS, DEPTH, seed=5))
    assert left == ["octavo.norm", "octavo.norm", "aten.mul"]
    assert record.notes == ("1 with the residual's addition",)


@pytest.mark.parametrize(
    "addition",
    [
        lambda m, x, y: functional.linear(x, m.matrix) + y,  # the layer adds for less
        lambda m, x, y: x + y[:1],
        lambda m, x, y: torch.add(x, y, alpha=2),
        lambda m, x, y: x + 1.0,
    ],
)
def test_other_additions_stay_before_the_norm(addition: Calls) -> None:
    def function(m: Rowwise, x: Tensor, y: Tensor) -> Tensor:
        return rms_norm(addition(m, x, y), m.weight)

    left, record, _ = check(fuse_norms, function, normal(ROWS, DEPTH), normal(ROWS, DEPTH, seed=5))
    assert left[-2:] == ["aten.add", "octavo.norm"]
    assert record.notes == ()


ROOT = math.sqrt(2 / math.pi)
ACTIVATIONS: dict[str, tuple[Calls, Function]] = {
    "silu": (lambda x: functional.silu(x), Function.SILU),
    "x * sigmoid": (lambda x: x * x.sigmoid(), Function.SILU),
    "gelu": (lambda x: functional.gelu(x), Function.GELU),
    "gelu by erf": (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), Function.GELU),
    "gelu tanh": (lambda x: functional.gelu(x, approximate="tanh"), Function.GELU_TANH),
    "gelu_new": (
        lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
        Function.GELU_TANH,
    ),
    "gelu_fast": (
        lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
        Function.GELU_TANH,
    ),
    "relu": (lambda x: x.relu(), Function.RELU),
    "relu squared": (lambda x: x.relu().square(), Function.RELU_SQUARED),
    "relu * relu": (lambda x: x.relu() ** 2, Function.RELU_SQUARED),
}
HALVES: dict[str, Calls] = {
    "slices": lambda x: (x[..., : DEPTH // 2], x[..., DEPTH // 2 :]),
    "chunk": lambda x: x.chunk(2, -1),
    "split": lambda x: x.split(DEPTH // 2, -1),
    "split sizes": lambda x: x.split([DEPTH // 2, DEPTH // 2], -1),
}


def activate_node(exported: ExportedProgram) -> tuple[Any, ...]:
    (node,) = [n for n in exported.graph.nodes if operator_of(n) == "octavo.activate"]
    return tuple(node.args[1:])


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_every_spelling_of_an_activation_is_one_node(case: str) -> None:
    apply, function = ACTIVATIONS[case]
    left, record, exported = check(fuse_activations, lambda m, x: apply(x + 1), normal(ROWS, DEPTH))
    assert left == ["aten.add", "octavo.activate"]
    assert activate_node(exported) == (function, 0)
    assert record.notes == ("1 x plain",)

    def gated(m: Rowwise, x: Tensor) -> Tensor:
        gate, factor = x.chunk(2, -1)
        return cast(Tensor, factor * apply(gate))

    left, record, exported = check(fuse_activations, gated, normal(ROWS, DEPTH))
    assert left == ["octavo.activate"]
    assert activate_node(exported) == (function, 1)
    assert record.notes == ("1 x gated",)


@pytest.mark.parametrize("case", HALVES)
def test_halves_are_found_however_they_are_cut(case: str) -> None:
    def gated(m: Rowwise, x: Tensor) -> Tensor:
        gate, factor = HALVES[case](x)
        return cast(Tensor, functional.silu(gate) * factor)

    assert check(fuse_activations, gated, normal(ROWS, DEPTH))[0] == ["octavo.activate"]
    left, record, _ = check(fuse_activations, gated, normal(ROWS, 3, DEPTH))
    assert left == ["aten.reshape", "octavo.activate", "aten.reshape"]
    assert record.skipped == ()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, x: functional.silu(x.chunk(2, -1)[1]) * x.chunk(2, -1)[0], "lies before it"),
        (lambda m, x: functional.silu(x[:, 8:]) * x[:, :8], "lies before it"),
        (lambda m, x: functional.silu(x[:, ::2]) * x[:, 1::2], "separate tensors"),
        (lambda m, x: functional.silu(x[:, :8]) * x[:, 6:14], "separate tensors"),
        (lambda m, x: functional.silu(x) * (x + 1), "separate tensors"),
    ],
)
def test_a_gate_apart_from_its_factor_is_a_plain_activation(function: Calls, reason: str) -> None:
    left, record, exported = check(fuse_activations, function, normal(ROWS, DEPTH))
    assert left[-1] == "aten.mul"
    assert activate_node(exported) == (Function.SILU, 0)
    (skipped,) = record.skipped
    assert skipped.startswith("1 x a gate apart from its product: ")
    assert skipped.endswith(reason)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x * torch.sigmoid(1.702 * x),
        lambda m, x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.05 * x**3))),
        lambda m, x: 30 * torch.tanh(x / 30),
        lambda m, x: x * (1 + torch.erf(x / math.sqrt(2))),
    ],
)
def test_other_functions_are_left(function: Calls) -> None:
    left, record, _ = check(fuse_activations, function, normal(ROWS, DEPTH))
    assert "octavo.activate" not in left
    assert record.matches == 0


def test_an_addition_goes_into_the_later_of_two_layers() -> None:
    def function(m: Rowwise, x: Tensor) -> Tensor:
        first = functional.linear(x, m.matrix)
        return functional.linear(first.relu(), m.matrix, m.bias) + functional.linear(x, m.matrix)

    left, record, exported = check(fuse_residuals, function, normal(ROWS, DEPTH))
    assert left == ["aten.linear", "aten.relu", "aten.linear", "octavo.linear_residual"]
    assert record.matches == 1
    (fused,) = [n for n in exported.graph.nodes if operator_of(n) == "octavo.linear_residual"]
    assert fused.args[2].meta["val"].shape == (0,)  # the later layer is the one without bias


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda m, x: (lambda y: (y + x, y * 2))(functional.linear(x, m.matrix)),
            "1 x a linear layer's result has other readers",
        ),
        (
            lambda m, x: functional.linear(x, m.matrix) + m.bias,
            "1 x what is added to a linear layer has another shape",
        ),
    ],
)
def test_additions_that_a_layer_cannot_take_are_left(function: Calls, reason: str) -> None:
    left, record, _ = check(fuse_residuals, function, normal(ROWS, DEPTH))
    assert "octavo.linear_residual" not in left
    assert record.skipped == (reason,)


def test_conv1d_is_a_linear_layer() -> None:
    left, record, exported = check(
        conv1d, lambda m, x: torch.addmm(m.bias, x, m.matrix), normal(ROWS, DEPTH)
    )
    assert (left, record.matches) == (["aten.linear"], 1)
    assert set(exported.state_dict) == {"bias", "matrix.transposed"}
    torch.testing.assert_close(
        exported.state_dict["matrix.transposed"], normal(DEPTH, DEPTH, seed=3).t()
    )
    left, record, _ = check(
        conv1d, lambda m, x: torch.addmm(m.bias, x, x.t() @ x), normal(ROWS, DEPTH)
    )
    assert record.matches == 0


def test_views_that_add_or_drop_the_batch_axis_do_not_keep_it() -> None:
    def function(m: Rowwise, x: Tensor) -> Tensor:
        batch = x.view(1, -1, DEPTH) * 2 + x[None]
        return functional.linear(batch.view(-1, DEPTH), m.matrix).view(-1, DEPTH)

    def flatten(exported: ExportedProgram) -> tuple[ExportedProgram, PassRecord]:
        exported, record = split_batch_views(exported)
        assert record.matches == 2
        exported, _ = flatten_batch(exported)
        return remove_identity_views(exported)

    left, _, _ = check(flatten, function, normal(ROWS, DEPTH))
    assert left == ["aten.mul", "aten.add", "aten.linear"]

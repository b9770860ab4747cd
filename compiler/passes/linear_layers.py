"""The linear layers of a graph, in whatever operator they are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from torch import Tensor, fx
from torch.export import ExportedProgram

from octavo.compiler.passes.matching import argument, operator_of, tensor_of
from octavo.compiler.passes.parameters import parameter, parameter_name

# What computes new features of a token from old ones, as linear layers do.
_MIXERS = frozenset(
    {
        "aten.addmm",
        "aten.bmm",
        "aten.linear",
        "aten.matmul",
        "aten.mm",
        "octavo.fused_paged_attention",
        "octavo.linear_residual",
        "octavo.paged_attention",
        "octavo.quantized_linear",
    }
)


@dataclass(frozen=True)
class LinearLayer:
    """rows @ matrix.T + bias + residual; the node's result has the leading sizes of `rows`."""

    node: fx.Node
    rows: fx.Node  # [..., K]
    weight: fx.Node
    transposed: bool  # the weight is [K, N]
    bias: fx.Node | None
    residual: fx.Node | None
    name: str  # of the weight
    matrix: Tensor  # [N, K], a view of the weight


def linear_layers(exported: ExportedProgram) -> Iterator[LinearLayer]:
    """Those whose weights are parameters, in the graph's order."""
    for node in list(exported.graph.nodes):
        operands = _operands(node)
        if operands is None:
            continue
        rows, weight, bias, residual = operands
        tensor = parameter(exported, weight)
        if tensor is None or tensor.dim() != 2:
            continue
        transposed = operator_of(node) == "aten.addmm"
        yield LinearLayer(
            node=node,
            rows=rows,
            weight=weight,
            transposed=transposed,
            bias=bias,
            residual=residual,
            name=(parameter_name(exported, weight) or node.name).removesuffix(".weight"),
            matrix=tensor.detach().t() if transposed else tensor.detach(),
        )


def mixers_behind(node: fx.Node) -> set[fx.Node]:
    """The linear layers and attentions that `node` is computed from without passing another."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if operator_of(current) in _MIXERS:
            found.add(current)
        else:
            pending.extend(current.all_input_nodes)
    return found


_Operands = tuple[fx.Node, fx.Node, fx.Node | None, fx.Node | None]


def _operands(node: fx.Node) -> _Operands | None:
    """Rows, weight, bias, residual."""
    name = operator_of(node)
    if name == "aten.linear":
        bias = argument(node, 2, "bias")
        return cast(_Operands, (node.args[0], node.args[1], bias, None))
    if name == "octavo.linear_residual":
        return cast(_Operands, tuple(node.args[:4]))
    if name == "aten.addmm" and _adds_a_bias(node):
        return cast(_Operands, (node.args[1], node.args[2], node.args[0], None))
    return None


def _adds_a_bias(node: fx.Node) -> bool:
    """addmm(bias [N], rows, weight [K, N])"""
    bias, weight = tensor_of(node.args[0]), tensor_of(node.args[2])
    factors = (node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1))
    return (
        factors == (1, 1)
        and bias is not None
        and weight is not None
        and bias.dim() == 1
        and bias.shape[0] == weight.shape[1]
    )

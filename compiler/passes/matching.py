"""What passes ask of a node, and how they write one."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from octavo.compiler.passes.parameters import add_parameter, call

_NO_OPERANDS = {1: "no_vector", 2: "no_rows"}  # by rank


def operator_of(node: object) -> str:
    """`aten.add` of `aten.add.Tensor`, whatever the overload; "getitem"; "" for what is no call."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return ""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target.overloadpacket.__name__}"
    return str(getattr(target, "__name__", target))


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument that may be given by position, by name or not at all."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def tensor_of(node: object) -> Tensor | None:
    """The fake tensor that a node stands for."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def size_key(size: Any) -> object:
    """Comparing symbolic sizes themselves could add a guard to the program."""
    return size if isinstance(size, int) else size.node.expr


def same_shape(a: object, b: object) -> bool:
    first, second = tensor_of(a), tensor_of(b)
    if first is None or second is None:
        return False
    return [*map(size_key, first.shape)] == [*map(size_key, second.shape)]


def is_float(node: object) -> bool:
    """Whether a node is a float32 tensor [..., K], the rows of which a kernel can work on."""
    value = tensor_of(node)
    if value is None or value.dtype != torch.float32 or value.dim() < 2:
        return False
    unknown = [size for size in value.shape if not isinstance(size, int)]
    return isinstance(value.shape[-1], int) and len(unknown) <= 1


def is_rows(node: object) -> bool:
    """Whether a node is a float32 matrix [M, K]."""
    return is_float(node) and cast(Tensor, tensor_of(node)).dim() == 2


def is_vector(node: object, size: int) -> bool:
    value = tensor_of(node)
    return value is not None and value.dtype == torch.float32 and list(value.shape) == [size]


def summands(node: object) -> tuple[Any, Any] | None:
    """Both operands of a plain addition."""
    if operator_of(node) != "aten.add" or cast(fx.Node, node).kwargs.get("alpha", 1) != 1:
        return None
    return cast("tuple[Any, Any]", cast(fx.Node, node).args[:2])


def factors(node: object) -> tuple[Any, Any] | None:
    if operator_of(node) != "aten.mul":
        return None
    return cast("tuple[Any, Any]", cast(fx.Node, node).args[:2])


def square_base(node: object) -> fx.Node | None:
    """x of x ** 2, x * x or square(x)."""
    name = operator_of(node)
    arguments = cast(fx.Node, node).args if name else ()
    squared = (
        (name == "aten.pow" and arguments[1] == 2)
        or (name == "aten.mul" and arguments[0] is arguments[1])
        or name == "aten.square"
    )
    return cast(fx.Node, arguments[0]) if squared else None


def only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def result(graph: fx.Graph, node: fx.Node, index: int) -> fx.Node:
    """One of the results of a node with several."""
    item: fx.Node = graph.call_function(operator.getitem, (node, index))
    item.meta["val"] = node.meta["val"][index]
    return item


def as_rows(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """[..., K] -> [M, K]"""
    value = cast(Tensor, tensor_of(node))
    if value.dim() == 2:
        return node
    return call(graph, torch.ops.aten.reshape.default, node, [-1, value.shape[-1]], like=node)


def shaped_like(graph: fx.Graph, rows: fx.Node, like: fx.Node) -> fx.Node:
    """[M, K] -> [..., K]; the leading sizes are those of `like`, at most one of them unknown."""
    value, depth = cast(Tensor, tensor_of(like)), cast(Tensor, tensor_of(rows)).shape[-1]
    if value.dim() == 2:
        return rows
    sizes = [size if isinstance(size, int) else -1 for size in value.shape[:-1]]
    return call(graph, torch.ops.aten.reshape.default, rows, [*sizes, depth], like=like)


def replace(exported: ExportedProgram, node: fx.Node, replacement: fx.Node) -> None:
    """The replacement stands for the node everywhere else, also as a result of the program."""
    node.replace_all_uses_with(replacement, delete_user_cb=lambda user: user is not replacement)
    exported.graph_signature.replace_all_uses(node.name, replacement.name)


def remove_unused(exported: ExportedProgram, nodes: Sequence[fx.Node]) -> None:
    """Erases those of `nodes`, and of what they read, that nobody reads."""
    pending, erased = list(nodes), set[fx.Node]()
    while pending:
        node = pending.pop()
        if node.op == "call_function" and not node.users and node not in erased:
            pending.extend(node.all_input_nodes)
            exported.graph.erase_node(node)
            erased.add(node)


def no_operand(exported: ExportedProgram, rank: int) -> fx.Node:
    """The empty tensor that says "not given", [0] or [0, 0]."""
    name = _NO_OPERANDS[rank]
    for spec in exported.graph_signature.input_specs:
        if spec.target == name:
            found: fx.Node = next(n for n in exported.graph.nodes if n.name == spec.arg.name)
            return found
    return add_parameter(exported, name, torch.zeros([0] * rank))

"""Parameters of an exported program: adding some, and dropping those that nothing reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

_KEPT_BY_NAME = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def add_parameter(
    exported: ExportedProgram, name: str, tensor: Tensor, before_node: fx.Node | None = None
) -> fx.Node:
    """The placeholder of a new parameter `name`, with dots as a module's parameters have them.

    It stands before `before_node` if that is a placeholder, else before the program's inputs. A
    name that is taken gets a number.
    """
    specs = exported.graph_signature.input_specs
    placeholders = exported.graph.find_nodes(op="placeholder")
    if before_node in placeholders:
        position = placeholders.index(cast(fx.Node, before_node))
    else:
        position = next(i for i, spec in enumerate(specs) if spec.kind is InputKind.USER_INPUT)
    name = _free_name(exported, name)
    with exported.graph.inserting_before(placeholders[position]):
        node: fx.Node = exported.graph.placeholder(f"p_{name.replace('.', '_')}")
    node.meta["val"] = _fake(placeholders, tensor)
    spec = InputSpec(InputKind.PARAMETER, TensorArgument(node.name), name)
    specs.insert(position, spec)
    exported.state_dict[name] = nn.Parameter(tensor.detach(), requires_grad=False)
    return node


def tensors_by_name(exported: ExportedProgram) -> Mapping[str, Tensor]:
    """The tensor of every placeholder that is a parameter, a buffer or a constant, by its name."""
    found: dict[str, Tensor] = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind in _KEPT_BY_NAME:
            target = cast(str, spec.target)
            tensor = exported.state_dict.get(target)
            tensor = exported.constants[target] if tensor is None else tensor
            found[cast(str, spec.arg.name)] = cast(Tensor, tensor)
    return found


def parameter_name(exported: ExportedProgram, node: fx.Node) -> str | None:
    """What the module calls the parameter or buffer that `node` stands for; None if it is none."""
    for spec in exported.graph_signature.input_specs:
        if spec.arg.name == node.name and spec.kind in _KEPT_BY_NAME:
            return cast(str, spec.target)
    return None


def parameter(exported: ExportedProgram, node: fx.Node) -> Tensor | None:
    """The tensor of the parameter or buffer that `node` stands for; None if it is none."""
    name = parameter_name(exported, node)
    if name is None:
        return None
    tensor = exported.state_dict.get(name)
    return cast(Tensor, exported.constants[name] if tensor is None else tensor)


def remove_unused_parameters(exported: ExportedProgram) -> int:
    """Drops parameters without users, so that their memory is freed; returns how many."""
    specs = exported.graph_signature.input_specs
    unused = {node.name for node in exported.graph.find_nodes(op="placeholder") if not node.users}
    dropped = [s for s in specs if s.kind in _KEPT_BY_NAME and s.arg.name in unused]
    names = {spec.arg.name for spec in dropped}
    for node in exported.graph.find_nodes(op="placeholder"):
        if node.name in names:
            exported.graph.erase_node(node)
    specs[:] = [spec for spec in specs if spec.arg.name not in names]
    for target in {spec.target for spec in dropped} - {spec.target for spec in specs}:
        exported.state_dict.pop(cast(str, target), None)
        exported.constants.pop(cast(str, target), None)
    return len(dropped)


def call(graph: fx.Graph, target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
    """A call at the graph's insertion point, with its result's shape; `like`: what it replaces."""
    node = graph.call_function(target, args, kwargs)
    if "nn_module_stack" in like.meta:
        node.meta["nn_module_stack"] = like.meta["nn_module_stack"]
    given = fx.node.map_arg((args, kwargs), lambda argument: argument.meta["val"])
    node.meta["val"] = target(*given[0], **given[1])
    return node


def _free_name(exported: ExportedProgram, name: str) -> str:
    taken = {spec.target for spec in exported.graph_signature.input_specs}
    free, count = name, 1
    while free in taken:
        count += 1
        free = f"{name}_{count}"
    return free


def _fake(placeholders: list[fx.Node], tensor: Tensor) -> Tensor:
    """A stand-in for `tensor` of the same fake world as the program's other values."""
    modes = [getattr(node.meta.get("val"), "fake_mode", None) for node in placeholders]
    mode: Any = next(mode for mode in modes if mode is not None)
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

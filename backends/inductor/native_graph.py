"""The captured graph with Octavo's native operators, which change the caches in place.

What is left to AOTInductor is what our kernels do not cover.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from octavo.backends.kernels import torch_operators
from octavo.backends.torch_cuda.operator import operator as operator_on_cuda
from octavo.graphs.ops import fused_paged_attention, linear, linear_torch, paged_attention
from octavo.graphs.ops.schema import DOMAIN, OperatorSchema

_SCHEMAS = {schema.name: schema for schema in torch_operators.SCHEMAS}
_ATTENTIONS = {
    schema.name
    for schema in (
        paged_attention.SCHEMA,
        fused_paged_attention.SCHEMA,
        fused_paged_attention.INT8_SCHEMA,
    )
}
_K_TRANSPOSED = -1  # the attentions' last attribute
_LINEAR = torch.ops.aten.linear.default
_ADDMM = torch.ops.aten.addmm.default


def native_module(exported: ExportedProgram) -> fx.GraphModule:
    """The program for CPUs, its inputs and caches as plain arguments.

    Linear layers are packed. It returns no caches, but changes those it is given; a block's keys
    are transposed in them.
    """
    return _rewritten(exported, Natives(torch_operators.operators(), packs=True, k_transposed=1))


def cuda_module(exported: ExportedProgram, device: str) -> fx.GraphModule:
    """The program on `device`, with attention by our kernel there, caches as they are declared."""
    attention = {paged_attention.SCHEMA.name: operator_on_cuda()}
    moved = move_to_device_pass(exported, device)
    return _rewritten(moved, Natives(attention, packs=False, k_transposed=0))


@dataclass(frozen=True)
class Natives:
    """Operators by the name of the reference that each stands for, and how they want the graph."""

    operators: Mapping[str, Any]
    packs: bool  # whether linear layers become `linear` with packed weights
    k_transposed: int


def _rewritten(exported: ExportedProgram, natives: Natives) -> fx.GraphModule:
    module = exported.module(check_guards=False)
    if not isinstance(module, fx.GraphModule):
        raise TypeError("an exported program's module is a graph")
    _Rewriting(module, natives).run()
    return fx.GraphModule(module, module.graph)  # without the weights that were packed


class _Rewriting:
    """Changes the nodes of one module."""

    def __init__(self, module: fx.GraphModule, natives: Natives) -> None:
        self._module = module
        self._graph = module.graph
        self._natives = natives
        self._native = natives.operators
        self._packed: dict[tuple[str, bool], str] = {}

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node.op == "call_function":
                with self._graph.inserting_before(node):
                    self._rewrite(node)
        self._return_no_caches()
        self._graph.eliminate_dead_code()

    def _rewrite(self, node: fx.Node) -> None:
        if node.target in (_LINEAR, _ADDMM):
            if self._natives.packs:
                self._pack(node)
        elif isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == DOMAIN:
            name = node.target._opname
            if name == linear.LINEAR_RESIDUAL.name:
                self._pack_with_residual(node)
            elif name in self._native:
                self._make_native(node, _SCHEMAS[name])

    def _make_native(self, node: fx.Node, schema: OperatorSchema) -> None:
        count = len(schema.inputs)
        operands = [self._contiguous(cast(fx.Node, operand)) for operand in node.args[:count]]
        attributes = list(node.args[count:])
        if schema.name in _ATTENTIONS:
            attributes[_K_TRANSPOSED] = self._natives.k_transposed
        native = self._graph.call_function(self._native[schema.name], (*operands, *attributes))
        if not schema.changed_inputs:
            _replace(node, native)
            return
        for user in list(node.users):
            output = cast(int, user.args[1])  # of getitem
            changed = schema.changed_inputs.get(output)
            if changed is None:
                _replace(user, native)
            else:
                user.replace_all_uses_with(operands[changed])

    def _contiguous(self, operand: fx.Node) -> fx.Node:
        fake = operand.meta.get("val")
        if not isinstance(fake, Tensor) or fake.is_contiguous():
            return operand
        copied = self._graph.call_function(torch.ops.aten.contiguous.default, (operand,))
        copied.meta["val"] = fake.contiguous()
        return copied

    def _pack(self, node: fx.Node) -> None:
        if node.target is _ADDMM:
            bias, rows, weight = cast(tuple[fx.Node, ...], node.args[:3])
            plain = not node.kwargs and len(node.args) == 3 and bias.meta["val"].dim() == 1
        else:
            rows, weight = cast(tuple[fx.Node, ...], node.args[:2])
            bias = cast(fx.Node, node.args[2] if len(node.args) > 2 else None)
            plain = not node.kwargs
        packed = self._packed_weight(weight, node.target is _ADDMM) if plain else None
        if packed is None:
            return
        fake = rows.meta["val"]
        flat = rows
        if fake.dim() != 2:
            shape = [-1, int(fake.shape[-1])]
            flat = self._graph.call_function(torch.ops.aten.reshape.default, (rows, shape))
            flat.meta["val"] = fake.reshape(shape)
        columns = int(node.meta["val"].shape[-1])
        product = self._linear(self._contiguous(flat), packed, bias, None, columns)
        if fake.dim() != 2:
            sizes = [
                self._graph.call_function(torch.ops.aten.sym_size.int, (rows, axis))
                for axis in range(fake.dim() - 1)
            ]
            product = self._graph.call_function(
                torch.ops.aten.reshape.default, (product, [*sizes, columns])
            )
        _replace(node, product)

    def _pack_with_residual(self, node: fx.Node) -> None:
        rows, weight, bias, residual = cast(tuple[fx.Node, ...], node.args)
        packed = self._packed_weight(weight, transposed=False)
        if packed is None:
            raise TypeError(f"the weight of {node.name} is no parameter")
        columns = int(weight.meta["val"].shape[0])
        operands = self._contiguous(rows), packed, bias, self._contiguous(residual)
        _replace(node, self._linear(*operands, columns))

    def _linear(
        self,
        rows: fx.Node,
        packed: fx.Node,
        bias: fx.Node | None,
        residual: fx.Node | None,
        columns: int,
    ) -> fx.Node:
        bias = bias or self._constant("no_bias", torch.zeros(0))
        residual = residual or self._constant("no_residual", torch.zeros(0, 0))
        return self._graph.call_function(
            self._native[linear.SCHEMA.name], (rows, packed, bias, residual, columns)
        )

    def _packed_weight(self, weight: fx.Node, transposed: bool) -> fx.Node | None:
        """The weight in panels if it is a float32 parameter; tied ones are packed once."""
        if weight.op != "get_attr":
            return None
        name = str(weight.target)
        tensor = _attribute(self._module, name)
        if tensor.dtype != torch.float32 or tensor.dim() != 2:
            return None
        key = (name, transposed)
        if key not in self._packed:
            rows = tensor.detach().t() if transposed else tensor.detach()
            self._packed[key] = f"packed_{len(self._packed)}"
            self._module.register_buffer(self._packed[key], linear_torch.packed(rows))
        return self._graph.get_attr(self._packed[key])

    def _constant(self, name: str, tensor: Tensor) -> fx.Node:
        if not hasattr(self._module, name):
            self._module.register_buffer(name, tensor)
        return self._graph.get_attr(name)

    def _return_no_caches(self) -> None:
        """Outputs that are inputs, changed in place, are the caches."""
        (output,) = self._graph.find_nodes(op="output")
        results = cast(Sequence[fx.Node], output.args[0])
        output.args = (tuple(one for one in results if one.op != "placeholder"),)
        self._graph.set_codegen(fx.graph.CodeGen())


def _replace(node: fx.Node, other: fx.Node) -> None:
    """`other`, of the same shape, is used instead of `node`."""
    other.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(other)


def _attribute(module: nn.Module, name: str) -> Tensor:
    return cast(Tensor, operator.attrgetter(name)(module))

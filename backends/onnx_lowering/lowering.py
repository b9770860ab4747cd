"""A captured program becomes an ONNX model, one ATen operator at a time.

The table of rules is `RULES`; `rules_*.py` fill it. A node without a rule is reported by name, so
nothing falls back silently.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from octavo.backends.base import Report, UnsupportedNode
from octavo.backends.onnx_lowering.builder import IR_VERSION, OPSET_VERSION, GraphBuilder
from octavo.backends.onnx_lowering.functions import bodies_of
from octavo.graphs import bindings
from octavo.graphs.errors import UnsupportedModelError
from octavo.graphs.ops.accept import SCHEMA as ACCEPT
from octavo.graphs.ops.schema import DOMAIN
from octavo.graphs.ops.schema import OPSET_VERSION as DOMAIN_VERSION
from octavo.graphs.program import CapturedProgram
from octavo.graphs.spec import ModelSpec

# What an FX node's value is while lowering: an ONNX value, several, or a Python constant.
Lowered = Any
Rule = Callable[..., Lowered]
RULES: dict[str, Rule] = {}


def lowers(*targets: str) -> Callable[[Rule], Rule]:
    """Registers a rule `f(context, *args, **kwargs)` for ATen targets such as `aten.mul.Tensor`."""

    def register(rule: Rule) -> Rule:
        for target in targets:
            if target in RULES:
                raise AssertionError(f"two rules lower {target}")
            RULES[target] = rule
        return rule

    return register


def target_name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.zeros(0, dtype=dtype).numpy().dtype


@dataclass(frozen=True)
class Layouts:
    """How a backend wants what the graph leaves open; the defaults are the reference's."""

    k_transposed: bool = False  # keys within a cache block
    packed_linear: bool = False  # `octavo::Linear` for linear layers with float32 parameters
    # Of the caches; None: as they were captured.
    cache_dtype: torch.dtype | None = None
    # Operators of ours, by ONNX name, without their bodies: TensorRT prefers a body to a plugin.
    without_bodies: frozenset[str] = frozenset()


class LoweringContext:
    """What a rule needs: the builder, the node at hand, and the types of its tensors."""

    def __init__(self, builder: GraphBuilder, layouts: Layouts) -> None:
        self.builder = builder
        self.layouts = layouts
        self.node: fx.Node

    @property
    def fake(self) -> torch.Tensor:
        """The node's (first) result: dtype and shape, with symbolic sizes."""
        value = self.node.meta["val"]
        return cast(torch.Tensor, value[0] if isinstance(value, (tuple, list)) else value)

    def fake_of(self, index: int) -> torch.Tensor:
        """The tensor that is the node's argument `index`."""
        return cast(torch.Tensor, cast(fx.Node, self.node.args[index]).meta["val"])

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        return self.builder.op(op_type, *inputs, **attributes)

    def ints(self, *values: int) -> ir.Value:
        return self.builder.ints(*values)

    def scalar(self, value: float | bool, dtype: torch.dtype) -> ir.Value:
        if dtype == torch.bfloat16:
            return self.cast(self.builder.constant(value, np.float32), dtype)
        return self.builder.constant(value, numpy_dtype(dtype))

    def cast(self, value: ir.Value, dtype: torch.dtype) -> ir.Value:
        return self.op("Cast", value, to=int(tensor_adapters.from_torch_dtype(dtype)))

    def operand(self, index: int, value: Any, dtype: torch.dtype) -> ir.Value:
        """Argument `index`, already lowered to `value`, as a tensor of `dtype`."""
        if not isinstance(value, ir.Value):
            return self.scalar(value, dtype)
        argument = self.node.args[index]
        fake = argument.meta.get("val") if isinstance(argument, fx.Node) else None
        if isinstance(fake, torch.Tensor):
            return value if fake.dtype == dtype else self.cast(value, dtype)
        squeezed = self.op("Squeeze", value, self.ints(0))  # a symbolic size, i64 [1]
        return squeezed if dtype == torch.int64 else self.cast(squeezed, dtype)

    def size(self, value: Any) -> ir.Value:
        """A size, Python int or symbolic, as i64 [1]."""
        return value if isinstance(value, ir.Value) else self.ints(int(value))

    def shape(self, sizes: Sequence[Any]) -> ir.Value:
        """A shape to reshape to: one unknown size is written -1, several are computed."""
        unknown = [size for size in sizes if isinstance(size, ir.Value)]
        if len(unknown) <= 1 and -1 not in [s for s in sizes if not isinstance(s, ir.Value)]:
            return self.ints(*[-1 if isinstance(s, ir.Value) else int(s) for s in sizes])
        return self.exact_shape(sizes)

    def exact_shape(self, sizes: Sequence[Any]) -> ir.Value:
        if not any(isinstance(size, ir.Value) for size in sizes):
            return self.ints(*[int(s) for s in sizes])
        return self.op("Concat", *[self.size(s) for s in sizes], axis=0)


def _mapped(argument: Any, values: dict[fx.Node, Lowered]) -> Any:
    return fx.node.map_aggregate(argument, lambda a: values[a] if isinstance(a, fx.Node) else a)


def supports(program: CapturedProgram) -> Report:
    """Every node that no rule lowers."""
    return Report(
        tuple(
            UnsupportedNode(node.name, target_name(node), "it has no ONNX lowering yet")
            for node in program.exported.graph.nodes
            if node.op == "call_function" and target_name(node) not in RULES
        )
    )


def to_onnx(program: CapturedProgram, layouts: Layouts) -> ir.Model:
    """Lowers a program; inputs and outputs are named as `octavo.graphs.bindings` declares.

    Weights stay shared with the program's tensors. Raises UnsupportedModelError naming a node that
    no rule lowers.
    """
    graph = lower_graph(program.exported, layouts)
    _name_inputs(graph.inputs, program.inputs)
    if layouts.cache_dtype is not None:
        for cache in graph.inputs[len(program.inputs) :]:
            cache.type = ir.TensorType(tensor_adapters.from_torch_dtype(layouts.cache_dtype))
    _name_outputs(graph.outputs, program.spec, graph.inputs[len(program.inputs) :])
    return _model(graph, layouts.without_bodies)


def accept_to_onnx(exported: ExportedProgram) -> ir.Model:
    """The acceptance graph: its inputs keep the names of the operands of `octavo::accept`."""
    graph = lower_graph(exported, Layouts())
    (tokens,) = graph.outputs
    tokens.name, tokens.shape = ACCEPT.outputs[0].name, ir.Shape([bindings.LOGITS_ROWS])
    return _model(graph)


def _model(graph: ir.Graph, without_bodies: frozenset[str] = frozenset()) -> ir.Model:
    used = {node.op_type for node in graph if node.domain == DOMAIN} - without_bodies
    functions = [cast(ir.Function, ir.from_proto(body)) for body in bodies_of(used)]
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="octavo", functions=functions)


def lower_graph(exported: ExportedProgram, layouts: Layouts) -> ir.Graph:
    """Any exported program as an ONNX graph, its inputs and outputs under the captured names."""
    builder = GraphBuilder()
    context = LoweringContext(builder, layouts)
    values: dict[fx.Node, Lowered] = {}
    inputs = _lower_placeholders(exported, builder, values)
    outputs: Sequence[ir.Value] = ()
    for node in exported.graph.nodes:
        if node.op == "call_function":
            values[node] = _lower_node(context, node, values)
        elif node.op == "output":
            outputs = _mapped(node.args[0], values)
    return ir.Graph(
        inputs,
        list(outputs),
        nodes=builder.nodes,
        initializers=[v for v in builder.initializers if v.uses()],
        opset_imports={"": OPSET_VERSION, DOMAIN: DOMAIN_VERSION},
        name="decoder",
    )


def _lower_placeholders(
    exported: ExportedProgram, builder: GraphBuilder, values: dict[fx.Node, Lowered]
) -> list[ir.Value]:
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    inputs: list[ir.Value] = []
    for spec in exported.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            value = _input(node.name, node.meta["val"])
            inputs.append(value)
        else:
            name = cast(str, spec.target)
            tensor = exported.state_dict.get(name)
            tensor = exported.constants[name] if tensor is None else tensor
            value = builder.weight(name.removeprefix("model."), cast(torch.Tensor, tensor))
        values[node] = value
    return inputs


def _input(name: str, fake: torch.Tensor) -> ir.Value:
    return ir.Value(
        name=name,
        shape=ir.Shape([size if isinstance(size, int) else None for size in fake.shape]),
        type=ir.TensorType(tensor_adapters.from_torch_dtype(fake.dtype)),
    )


def _lower_node(context: LoweringContext, node: fx.Node, values: dict[fx.Node, Lowered]) -> Lowered:
    name = target_name(node)
    rule = RULES.get(name)
    if rule is None:
        raise UnsupportedModelError(
            f"the node {node.name} calls {name}, which has no ONNX lowering: use --backend torch"
        )
    context.node = node
    before = len(context.builder.nodes)
    lowered = rule(context, *_mapped(node.args, values), **_mapped(node.kwargs, values))
    added = context.builder.nodes[before:]
    _name_results(node, lowered, added)
    return lowered


def _name_results(node: fx.Node, lowered: Lowered, added: list[ir.Node]) -> None:
    """ONNX nodes and values carry the captured node's name, so that a profile can be read."""
    for index, onnx_node in enumerate(added):
        last = index == len(added) - 1
        onnx_node.name = node.name if last else f"{node.name}.{index}"
        for position, output in enumerate(onnx_node.outputs):
            suffix = f".{position}" if position else ""
            output.name = f"{onnx_node.name}{suffix}"
    fake = node.meta.get("val")
    results = lowered if isinstance(lowered, tuple) else (lowered,)
    fakes = fake if isinstance(fake, (tuple, list)) else (fake,)
    for value, tensor in zip(results, fakes, strict=False):
        if isinstance(value, ir.Value) and isinstance(tensor, torch.Tensor) and value.producer():
            value.type = ir.TensorType(tensor_adapters.from_torch_dtype(tensor.dtype))


def _name_inputs(inputs: Sequence[ir.Value], declared: Sequence[bindings.Binding]) -> None:
    """The declared ones, then every layer's cache, then the scales of caches of int8."""
    for value, binding in zip(inputs, declared, strict=False):
        value.name, value.shape = binding.name, ir.Shape(list(binding.shape))
    caches = inputs[len(declared) :]
    for cache, name in zip(caches, _cache_names(caches), strict=True):
        cache.name = name
        sizes = list(cast(ir.Shape, cache.shape))[1:]
        cache.shape = ir.Shape([bindings.CACHE_BLOCKS, *sizes])


def _name_outputs(outputs: Sequence[ir.Value], spec: ModelSpec, before: Sequence[ir.Value]) -> None:
    """The spec's outputs, then what was changed of caches and scales, shaped as it came in."""
    declared = spec.output_bindings
    for value, binding in zip(outputs, declared, strict=False):
        value.name, value.shape = binding.name, ir.Shape(list(binding.shape))
    caches = outputs[len(declared) :]
    for cache, given in zip(caches, before, strict=True):
        cache.name = bindings.cache_output_name(cast(str, given.name))
        cache.shape, cache.type = given.shape, given.type


def _cache_names(caches: Sequence[ir.Value]) -> list[str]:
    is_integer = any(cache.dtype == ir.DataType.INT8 for cache in caches)
    layers = range(len(caches) // 2 if is_integer else len(caches))
    names = [bindings.kv_cache_name(layer) for layer in layers]
    return names + [bindings.kv_scales_name(layer) for layer in layers if is_integer]


@lowers("_operator.getitem")
def _getitem(_: LoweringContext, values: tuple[Any, ...], index: int) -> Lowered:
    return operator.getitem(values, index)

"""The paged cache keeps keys and values as 8-bit integers, each token and head with its scale.

Every layer's cache becomes an int8 input and output, and after all caches come as many of scales.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from octavo.compiler.passes.matching import operator_of, remove_unused, replace, result
from octavo.compiler.passes.parameters import call
from octavo.graphs.errors import BuildError
from octavo.graphs.ops.fused_paged_attention import INT8_SCHEMA, SCHEMA
from octavo.graphs.spec import PassRecord

_CACHE = [operand.name for operand in SCHEMA.inputs].index("kv_cache")


def quantize_cache(exported: ExportedProgram) -> tuple[ExportedProgram, PassRecord]:
    """Raises BuildError where an attention layer is not fused: only fused ones read integers."""
    counts = Counter(operator_of(node) for node in exported.graph.nodes)
    unfused = counts["octavo.paged_attention"]
    if unfused:
        layers = unfused + counts[f"octavo.{SCHEMA.name}"]
        raise BuildError(
            f"{unfused} of {layers} attention layers are not fused, and only fused ones read a "
            "cache of int8: build with --kv-cache-dtype auto"
        )
    caches = _caches(exported)
    scales = [_add_scales(exported, cache) for cache in caches]
    scales_of = dict(zip(caches, scales, strict=True))
    changed_scales = {}
    for node in list(exported.graph.nodes):
        if operator_of(node) == f"octavo.{SCHEMA.name}":
            cache = cast(fx.Node, node.args[_CACHE])
            changed_scales[cache] = _quantized_attention(exported, node, scales_of[cache])
    _add_outputs(exported, [changed_scales[cache] for cache in caches])
    _extend_calling_convention(exported, len(caches))
    exported.graph_module.recompile()
    return exported, PassRecord(name="quantize_cache", matches=len(caches))


def _caches(exported: ExportedProgram) -> list[fx.Node]:
    """The placeholders of the caches; their dtype becomes int8."""
    placeholders = {node.name: node for node in exported.graph.find_nodes(op="placeholder")}
    inputs = exported.graph_signature.user_inputs
    caches = [placeholders[str(name)] for name in inputs[-_num_caches(exported) :]]
    for cache in caches:
        value = cache.meta["val"]
        cache.meta["val"] = value.new_empty(value.shape, dtype=torch.int8)
        cache.meta.pop("tensor_meta", None)
    return caches


def _num_caches(exported: ExportedProgram) -> int:
    """They are the last argument, a list."""
    in_spec: Any = exported.module_call_graph[0].signature.in_spec
    arguments, _ = pytree.tree_unflatten(list(range(in_spec.num_leaves)), in_spec)
    return len(arguments[-1])


def _add_scales(exported: ExportedProgram, cache: fx.Node) -> fx.Node:
    """A placeholder f32 [N, 2, Hkv, block_size] after all others."""
    last = exported.graph.find_nodes(op="placeholder")[-1]
    with exported.graph.inserting_after(last):
        node = exported.graph.placeholder(f"{cache.name}_scales")
    value: Tensor = cache.meta["val"]
    node.meta["val"] = value.new_empty(value.shape[:4], dtype=torch.float32)
    spec = InputSpec(InputKind.USER_INPUT, TensorArgument(node.name), None)
    exported.graph_signature.input_specs.append(spec)
    return cast(fx.Node, node)


def _quantized_attention(exported: ExportedProgram, node: fx.Node, scales: fx.Node) -> fx.Node:
    """Replaces a fused attention; returns the changed scales."""
    graph = exported.graph
    operands = [*node.args[: _CACHE + 1], scales, *node.args[_CACHE + 1 :]]
    target: Any = getattr(torch.ops.octavo, INT8_SCHEMA.name).default
    with graph.inserting_before(node):
        attention = call(graph, target, *operands, like=node)
        results = [result(graph, attention, index) for index in range(3)]
    for user in list(node.users):
        replace(exported, user, results[cast(int, user.args[1])])
        remove_unused(exported, [user])
    return results[2]


def _add_outputs(exported: ExportedProgram, changed: list[fx.Node]) -> None:
    output = exported.graph.output_node()
    output.args = ((*cast("tuple[fx.Node, ...]", output.args[0]), *changed),)
    exported.graph_signature.output_specs.extend(
        OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in changed
    )


def _extend_calling_convention(exported: ExportedProgram, layers: int) -> None:
    """The list of caches, taken and returned, is one of caches and scales."""
    signature: Any = exported.module_call_graph[0].signature
    arguments, named = pytree.tree_unflatten(
        list(range(signature.in_spec.num_leaves)), signature.in_spec
    )
    given = (*arguments[:-1], [*arguments[-1], *[0] * layers])
    *results, changed = pytree.tree_unflatten(
        list(range(signature.out_spec.num_leaves)), signature.out_spec
    )
    signature.in_spec = pytree.tree_structure((given, named))
    signature.out_spec = pytree.tree_structure((*results, [*changed, *[0] * layers]))
    specs = exported.graph_signature
    signature.inputs = [TensorArgument(str(name)) for name in specs.user_inputs]
    signature.outputs = [TensorArgument(str(name)) for name in specs.user_outputs]

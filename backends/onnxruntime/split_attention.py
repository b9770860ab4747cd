"""`octavo::PagedAttention` becomes `com.microsoft::PagedAttention`, with separate caches."""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import cast

import numpy as np
import onnx_ir as ir

from octavo.backends.onnxruntime.split_layout import (
    ATTENTION_METADATA,
    SplitCache,
    flash_fits,
    key_cache_name,
    split_caches,
    value_cache_name,
)
from octavo.graphs import bindings
from octavo.graphs.ops.paged_attention import SCHEMA
from octavo.graphs.ops.schema import DOMAIN
from octavo.graphs.spec import AttentionSpec, FloatDType, ModelSpec

MICROSOFT_DOMAIN = "com.microsoft"
MICROSOFT_OPSET = 1
PAGED_ATTENTION = "PagedAttention"
# Positions of the operator's inputs, in the order of its schema; None: not given.
INPUTS = (
    "query",
    "key",
    "value",
    "key_cache",
    "value_cache",
    "cumulative_sequence_length",
    "past_seqlens",
    "block_table",
    "cos_cache",
    "sin_cache",
    "slot_mapping",
    "head_sink",
    "q_norm_weight",
    "k_norm_weight",
    "k_scale",
    "v_scale",
    "attention_metadata",
)
_EVERY_KEY = -1  # of `local_window_size`


def split_attention(model: ir.Model, spec: ModelSpec, block_size: int) -> None:
    """Rewrites a model lowered in the reference layout, in place.

    Where FlashAttention can be used everywhere the graph also gets the input `attention_metadata`,
    which lets it split long sequences. Without it, kernels that gather keys size their memory by
    what the step has instead of by its bounds, which for small blocks is worth more.
    """
    graph = model.graph
    nodes = {_cache_of(node): node for node in graph if _is_attention(node)}
    dtype = cast(ir.Value, next(iter(nodes.values())).inputs[0]).dtype
    metadata = None
    if flash_fits(spec.layers, block_size):
        metadata = _value(ATTENTION_METADATA, ir.DataType.INT32, (3,))
        graph.inputs.append(metadata)
    cache_dtype: FloatDType = "float16" if dtype == ir.DataType.FLOAT16 else "bfloat16"
    caches = {cache.name: cache for cache in split_caches(spec, block_size, cache_dtype)}
    for index, layer in enumerate(spec.layers):
        name = bindings.kv_cache_name(index)
        pair = (caches[key_cache_name(index)], caches[value_cache_name(index)])
        _Rewrite(graph, nodes[name], layer).apply(pair, metadata)
    del model.functions[(DOMAIN, SCHEMA.onnx_name, "")]
    graph.opset_imports[MICROSOFT_DOMAIN] = MICROSOFT_OPSET


class _Rewrite:
    """Of one layer's node."""

    def __init__(self, graph: ir.Graph, node: ir.Node, layer: AttentionSpec) -> None:
        self._graph, self._node, self._layer = graph, node, layer
        self._inputs = dict(zip((one.name for one in SCHEMA.inputs), node.inputs, strict=True))
        self._dtype = cast(ir.DataType, cast(ir.Value, node.inputs[0]).dtype)

    def apply(self, pair: tuple[SplitCache, SplitCache], metadata: ir.Value | None) -> None:
        layer, node = self._layer, self._node
        caches = [_cache_value(cache.name, self._dtype, cache) for cache in pair]
        changed = [_cache_value(cache.output_name, self._dtype, cache) for cache in pair]
        attention = self._attention(caches, changed, metadata)
        rows = self._reshaped(attention, "rows", (-1, layer.num_heads, layer.value_head_dim))
        rows.type = ir.TensorType(self._dtype)
        before, after = node.outputs
        ir.convenience.replace_all_uses_with(before, rows, replace_graph_outputs=True)
        _replace(self._graph.inputs, cast(ir.Value, self._inputs["kv_cache"]), caches)
        _replace(self._graph.outputs, after, changed)
        self._drop_unread()

    def _attention(
        self, caches: list[ir.Value], changed: list[ir.Value], metadata: ir.Value | None
    ) -> ir.Value:
        """The operator's output [T, H * D]."""
        layer = self._layer
        query_size = layer.num_heads * layer.head_dim
        key_size = layer.num_kv_heads * layer.head_dim
        given = {
            "query": self._reshaped(self._inputs["query"], "query", (-1, query_size)),
            "key": self._reshaped(self._inputs["key"], "key", (-1, key_size)),
            "value": self._reshaped(self._inputs["value"], "value", (-1, key_size)),
            "key_cache": caches[0],
            "value_cache": caches[1],
            "cumulative_sequence_length": self._inputs["query_start_loc"],
            "past_seqlens": self._inputs["prefix_offsets"],
            "block_table": self._inputs["block_tables"],
            "slot_mapping": self._inputs["slot_mapping"],
            "head_sink": self._sinks(),
            "attention_metadata": metadata,
        }
        inputs = [given.get(name) for name in INPUTS]
        while inputs[-1] is None:
            inputs.pop()
        output = ir.Value(name=f"{self._node.name}.attention", type=ir.TensorType(self._dtype))
        self._insert(
            ir.node(
                PAGED_ATTENTION,
                inputs,
                {
                    "num_heads": layer.num_heads,
                    "kv_num_heads": layer.num_kv_heads,
                    "scale": layer.scale,
                    "softcap": layer.softcap,
                    "local_window_size": layer.sliding_window or _EVERY_KEY,
                },
                domain=MICROSOFT_DOMAIN,
                outputs=[output, *changed],
                name=self._node.name,
            )
        )
        return output

    def _sinks(self) -> ir.Value | None:
        if not self._layer.has_sinks:
            return None
        output = ir.Value(name=f"{self._node.name}.sinks", type=ir.TensorType(self._dtype))
        cast_node = ir.node(
            "Cast",
            [self._inputs["sinks"]],
            {"to": int(self._dtype)},
            outputs=[output],
            name=output.name,
        )
        self._insert(cast_node)
        return output

    def _reshaped(self, value: ir.Value | None, part: str, shape: tuple[int, ...]) -> ir.Value:
        name = f"{self._node.name}.{part}"
        target = ir.Value(
            name=f"{name}_shape",
            shape=ir.Shape([len(shape)]),
            type=ir.TensorType(ir.DataType.INT64),
            const_value=ir.Tensor(np.asarray(shape, np.int64), name=f"{name}_shape"),
        )
        self._graph.register_initializer(target)
        output = ir.Value(name=name, type=ir.TensorType(self._dtype))
        self._insert(ir.node("Reshape", [value, target], outputs=[output], name=name))
        return output

    def _insert(self, node: ir.Node) -> None:
        self._graph.insert_before(self._node, node)

    def _drop_unread(self) -> None:
        """The old node, and what only it read: the empty sinks and slopes, for instance."""
        read = [value for value in self._node.inputs if value is not None]
        self._graph.remove(self._node, safe=True)
        for value in read:
            if not value.uses():
                self._graph.initializers.pop(cast(str, value.name), None)


def _is_attention(node: ir.Node) -> bool:
    return node.domain == DOMAIN and node.op_type == SCHEMA.onnx_name


def _cache_of(node: ir.Node) -> str:
    index = [operand.name for operand in SCHEMA.inputs].index("kv_cache")
    return cast(str, cast(ir.Value, node.inputs[index]).name)


def _cache_value(name: str, dtype: ir.DataType, cache: SplitCache) -> ir.Value:
    return _value(name, dtype, (bindings.CACHE_BLOCKS, *cache.block_shape))


def _value(name: str, dtype: ir.DataType, shape: tuple[str | int, ...]) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(list(shape)), type=ir.TensorType(dtype))


def _replace(values: MutableSequence[ir.Value], old: ir.Value, new: list[ir.Value]) -> None:
    """Puts `new` where `old` is in a graph's inputs or outputs."""
    at = next(index for index, value in enumerate(values) if value is old)
    values[at : at + 1] = new

"""The graph that copies cache blocks on the device, for engines whose caches are not the host's.

Gathering comes before scattering in each cache, so every copy reads what was there before all of
them. Input and output of a cache are bound to one buffer: nothing else is moved.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from octavo.backends.onnx_lowering.builder import IR_VERSION, OPSET_VERSION
from octavo.backends.onnxruntime.split_layout import (
    COPY_DESTINATIONS,
    COPY_SOURCES,
    split_caches,
)
from octavo.graphs import bindings
from octavo.graphs.spec import FloatDType, ModelSpec

_COPIES = "C"  # the number of copies


def block_copies(spec: ModelSpec, block_size: int, dtype: FloatDType) -> ir.Model:
    """Inputs: every cache, `sources` i64 [C] and `destinations` i64 [C, 1]; outputs: the caches."""
    sources = _value(COPY_SOURCES, ir.DataType.INT64, [_COPIES])
    destinations = _value(COPY_DESTINATIONS, ir.DataType.INT64, [_COPIES, 1])
    inputs, outputs, nodes = [sources, destinations], [], []
    element_type = ir.DataType[{"float16": "FLOAT16", "bfloat16": "BFLOAT16"}[dtype]]
    for cache in split_caches(spec, block_size, dtype):
        shape = (bindings.CACHE_BLOCKS, *cache.block_shape)
        before = _value(cache.name, element_type, shape)
        after = _value(cache.output_name, element_type, shape)
        blocks = _value(f"{cache.name}.blocks", element_type, (_COPIES, *cache.block_shape))
        nodes += [
            ir.node("Gather", [before, sources], {"axis": 0}, outputs=[blocks]),
            ir.node("ScatterND", [before, destinations, blocks], outputs=[after]),
        ]
        inputs.append(before)
        outputs.append(after)
    graph = ir.Graph(
        inputs, outputs, nodes=nodes, opset_imports={"": OPSET_VERSION}, name="copy_blocks"
    )
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="octavo")


def _value(name: str, dtype: ir.DataType, shape: Sequence[str | int]) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(list(shape)), type=ir.TensorType(dtype))

"""An engine for CUDA made to run on a CPU: the attention of ONNX Runtime, which has no kernel
there, is replaced by that of Octavo as a function of standard operators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.helper import get_attribute_value, make_node, make_opsetid

from octavo.graphs.ops import paged_attention_onnx

_DOMAIN = "stand_in"
_CONSTANTS: dict[str, Any] = {
    "stand_in.first": np.int64(0),
    "stand_in.second": np.int64(1),
    "stand_in.axis": np.array([1], np.int64),
    "stand_in.none": np.zeros(0, np.float32),
}


def runs_on_cpu(path: Path, folder: Path) -> Path:
    """A copy in `folder` of the graph in the file `path`, without attention of ONNX Runtime."""
    model = onnx.load(path)
    nodes = [new for node in model.graph.node for new in _replaced(node, model)]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(array), name) for name, array in _CONSTANTS.items()
    )
    body = paged_attention_onnx.function()
    body.domain = _DOMAIN  # in its own domain the kernel would be taken, which is one of float32
    model.functions.append(body)
    model.opset_import.append(make_opsetid(_DOMAIN, 1))
    copy = folder / f"{len(list(folder.iterdir()))}.onnx"
    onnx.save(model, copy)
    return copy


def _replaced(node: onnx.NodeProto, model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    if (node.domain, node.op_type) != ("com.microsoft", "PagedAttention"):
        yield node
        return
    given = {one.name: get_attribute_value(one) for one in node.attribute}
    inputs, name = [*node.input, *[""] * 7], node.name
    heads = {"q": given["num_heads"], "k": given["kv_num_heads"], "v": given["kv_num_heads"]}
    for part, source in zip("qkv", inputs, strict=False):
        shape = numpy_helper.from_array(
            np.array([0, heads[part], -1], np.int64), f"{name}.{part}_shape"
        )
        model.graph.initializer.append(shape)
        yield make_node("Reshape", [source, shape.name], [f"{name}.{part}"])
    for part, source in zip("kv", inputs[3:], strict=False):
        # [N, block_size, Hkv, D] -> [N, 1, Hkv, block_size, D]
        yield make_node("Transpose", [source], [f"{name}.{part}_turned"], perm=[0, 2, 1, 3])
        yield make_node(
            "Unsqueeze", [f"{name}.{part}_turned", "stand_in.axis"], [f"{name}.{part}_plane"]
        )
    yield make_node("Concat", [f"{name}.k_plane", f"{name}.v_plane"], [f"{name}.cache"], axis=1)
    sinks = "stand_in.none"
    if inputs[11]:
        sinks = f"{name}.float_sinks"
        yield make_node("Cast", [inputs[11]], [sinks], to=onnx.TensorProto.FLOAT)
    yield make_node(
        "PagedAttention",
        [
            *[f"{name}.{part}" for part in ("q", "k", "v", "cache")],
            *[inputs[index] for index in (10, 7, 5, 6)],
            sinks,
            "stand_in.none",
        ],
        [f"{name}.rows_by_head", f"{name}.cache_out"],
        domain=_DOMAIN,
        scale=given["scale"],
        softcap=given["softcap"],
        causal=1,
        sliding_window=max(0, given["local_window_size"]),
        k_transposed=0,
    )
    flat = numpy_helper.from_array(np.array([0, -1], np.int64), f"{name}.flat_shape")
    model.graph.initializer.append(flat)
    yield make_node("Reshape", [f"{name}.rows_by_head", flat.name], [node.output[0]])
    for part, index, target in (
        ("k", "stand_in.first", node.output[1]),
        ("v", "stand_in.second", node.output[2]),
    ):
        yield make_node("Gather", [f"{name}.cache_out", index], [f"{name}.{part}_out"], axis=1)
        yield make_node("Transpose", [f"{name}.{part}_out"], [target], perm=[0, 2, 1, 3])

"""ONNX -> TensorRT network, all of it or an error that names the node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.backends.tensorrt import plugin
from octavo.backends.tensorrt.flavour import Flavour
from octavo.backends.tensorrt.library_log import Log, last_error
from octavo.graphs.errors import BuildError

# Nodes named in an error: enough to see the pattern.
_NODES_SHOWN = 3


def parse(trt: Any, builder: Any, log: Log, model: Path, flavour: Flavour) -> Any:
    """The strongly typed network of an ONNX file: every node is placed, or BuildError raised."""
    network = builder.create_network(_strongly_typed(trt))
    parser = trt.OnnxParser(network, log)
    parsed = parser.parse_from_file(str(model))
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    if parsed and not errors:
        return network
    found = list(dict.fromkeys(_sentence_part(error) for error in errors)) or [last_error(log)]
    more = f" and {len(found) - _NODES_SHOWN} more" if len(found) > _NODES_SHOWN else ""
    raise BuildError(
        f"{flavour.title} cannot place {'; '.join(found[:_NODES_SHOWN])}{more}: "
        "choose another backend for this model"
    )


def require_attention(trt: Any, network: Any, wanted: int) -> None:
    """Raises BuildError unless every attention layer became a plugin."""
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    found = sum(layer.type == trt.LayerType.PLUGIN_V3 for layer in layers)
    if found != wanted:
        raise BuildError(
            f"the network has {found} plugin layers and the model {wanted} attention layers: "
            "build for another backend, and report this model"
        )


def require_aliases(network: Any, aliases: dict[str, str]) -> None:
    """Raises BuildError unless each pair of an output and an input of the network is there."""
    inputs = {network.get_input(index).name for index in range(network.num_inputs)}
    outputs = {network.get_output(index).name for index in range(network.num_outputs)}
    for output, given in aliases.items():
        if output not in outputs or given not in inputs:
            raise BuildError(
                f"the network has no output {output} that shares memory with an input {given}: "
                "build for another backend, and report this model"
            )


def _strongly_typed(trt: Any) -> int:
    """TensorRT 11 knows no other networks, and may drop the flag."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _sentence_part(error: Any) -> str:
    """`node (op): reason` of one parser error."""
    node, op = error.node_name() or "a node", error.node_operator() or "of an unknown operator"
    reason = " ".join(str(error.desc()).split())
    if op == plugin.NAME and "lugin" in reason:
        reason = f"the plugin {plugin.NAMESPACE}::{plugin.NAME} is not registered"
    code = str(error.code()).rpartition(".")[2].lower().replace("_", " ")
    return f"{node} ({op}): {reason if len(reason) > 5 else code}"

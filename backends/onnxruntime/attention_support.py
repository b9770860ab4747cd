"""What `com.microsoft::PagedAttention` cannot run of a captured program's attention.

Source: the checks in `paged_attention_helper.h` and the choice of a kernel in `paged_attention.cc`
of ONNX Runtime 1.32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from octavo.backends.base import UnsupportedNode
from octavo.backends.onnx_lowering.lowering import target_name
from octavo.backends.onnxruntime.split_layout import (
    HEAD_SIZE_MULTIPLE,
    LARGEST_FLASH_HEAD_SIZE,
    LARGEST_HEAD_SIZE,
    flash_block_size,
)
from octavo.graphs.ops.paged_attention import SCHEMA

if TYPE_CHECKING:
    from torch import fx

    from octavo.graphs.program import CapturedProgram
    from octavo.graphs.spec import Device

_TARGET = f"octavo.{SCHEMA.name}.default"
_OPERANDS = [operand.name for operand in SCHEMA.inputs]
_ATTRIBUTES = [attribute.name for attribute in SCHEMA.attributes]


def device_of(program: CapturedProgram) -> Device:
    """The device that a program was captured for: caches of 16-bit floats are CUDA's alone."""
    nodes = _attention_nodes(program)
    return "cuda" if any(_operands(node)["kv_cache"].itemsize == 2 for node in nodes) else "cpu"


def unsupported_attention(program: CapturedProgram) -> Iterator[UnsupportedNode]:
    for node in _attention_nodes(program):
        for reason in _reasons(node, program.block_size):
            yield UnsupportedNode(node.name, _TARGET, reason)


def _reasons(node: fx.Node, block_size: int) -> Iterator[str]:
    operands, attributes = _operands(node), _attributes(node)
    heads, head_size = (int(size) for size in operands["query"].shape[1:])
    value_head_size = int(operands["value"].shape[2])
    if value_head_size != head_size:
        yield (
            f"its values have {value_head_size} elements a head and its keys {head_size}, which "
            "ONNX Runtime's paged attention needs to be equal"
        )
    if head_size % HEAD_SIZE_MULTIPLE or head_size > LARGEST_HEAD_SIZE:
        yield (
            f"its heads have {head_size} elements, ONNX Runtime's paged attention takes multiples "
            f"of {HEAD_SIZE_MULTIPLE} up to {LARGEST_HEAD_SIZE}"
        )
    if not attributes["causal"]:
        yield "it lets tokens see later tokens, which few of ONNX Runtime's kernels can"
    if operands["alibi_slopes"].numel():
        yield f"it has ALiBi slopes for {heads} heads, which ONNX Runtime's attention does not take"
    if operands["sinks"].numel():
        yield from _sink_reasons(head_size, block_size)


def _sink_reasons(head_size: int, block_size: int) -> Iterator[str]:
    """Of the kernels for prefills, only FlashAttention has sinks."""
    if head_size > LARGEST_FLASH_HEAD_SIZE:
        yield (
            f"its heads have sinks and {head_size} elements, ONNX Runtime's kernel with sinks "
            f"takes at most {LARGEST_FLASH_HEAD_SIZE}"
        )
    elif block_size % flash_block_size(head_size):
        needed = flash_block_size(head_size)
        yield (
            f"its heads have sinks, which ONNX Runtime runs in cache blocks of {needed} tokens "
            f"only, not of {block_size} (build with --block-size {needed})"
        )


def _attention_nodes(program: CapturedProgram) -> list[fx.Node]:
    return [
        node
        for node in program.exported.graph.nodes
        if node.op == "call_function" and target_name(node) == _TARGET
    ]


def _operands(node: fx.Node) -> dict[str, Any]:
    """The fake tensors by name."""
    arguments = cast("tuple[fx.Node, ...]", node.args[: len(_OPERANDS)])
    return dict(zip(_OPERANDS, (one.meta["val"] for one in arguments), strict=True))


def _attributes(node: fx.Node) -> dict[str, Any]:
    return dict(zip(_ATTRIBUTES, node.args[len(_OPERANDS) :], strict=True))

"""Embedding tables keep 8 bits an element; the rows that a step reads become floats again.

A tied head has the same numbers packed for matrix products, so the floats would be a second copy,
several times its size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from octavo.compiler.passes.matching import operator_of, remove_unused, replace
from octavo.compiler.passes.parameters import (
    add_parameter,
    call,
    parameter,
    parameter_name,
    remove_unused_parameters,
)
from octavo.compiler.quantization import tables
from octavo.compiler.quantization.tables import Table
from octavo.graphs.errors import BuildError
from octavo.graphs.spec import PassRecord

if TYPE_CHECKING:
    from octavo.compiler.quantization.gguf_blocks import GgufBlocks

_ATEN = torch.ops.aten
# A smaller table, such as one of positions, is not worth the nodes of a lookup.
_SMALLEST_TABLE = 1 << 20


def quantize_embeddings(
    exported: ExportedProgram, blocks: GgufBlocks | None = None, smallest: int = _SMALLEST_TABLE
) -> tuple[ExportedProgram, PassRecord]:
    """`smallest`: elements that a table must have. Blocks of the checkpoint are taken exactly."""
    notes, skipped, matches = [], [], 0
    for node in list(exported.graph.nodes):
        weight = parameter(exported, node.args[0]) if _is_lookup(node) else None
        if weight is None or weight.dtype != torch.float32:
            continue
        name = (parameter_name(exported, node.args[0]) or node.name).removesuffix(".weight")
        if weight.numel() < smallest:
            skipped.append(f"{name} stays float32: {weight.numel():,} elements are few")
            continue
        table, how = _table(weight.detach(), name, blocks)
        notes.append(f"{name}: {how}, {weight.nbytes:,} bytes became {table.num_bytes:,}")
        _write_lookup(exported, node, table, name)
        matches += 1
    exported.graph_module.recompile()
    return exported, PassRecord(
        name="quantize_embeddings", matches=matches, notes=tuple(notes), skipped=tuple(skipped)
    )


def _is_lookup(node: fx.Node) -> bool:
    return operator_of(node) == "aten.embedding"


def _table(weight: Tensor, name: str, blocks: GgufBlocks | None) -> tuple[Table, str]:
    if not all(map(torch.isfinite, torch.aminmax(weight))):
        raise BuildError(
            f"{name} holds numbers that are not finite, which have no integers: check the "
            "checkpoint or build with --quantization none"
        )
    imported = blocks.find(weight, (4, 8)) if blocks is not None else None
    if imported is not None:
        kept = f"{imported.block_type} blocks of the checkpoint as they are"
        return tables.from_packed(imported.packed, weight.shape[1]), kept
    return tables.quantize(weight), "8 bits in groups of 32"


def _write_lookup(exported: ExportedProgram, node: fx.Node, table: Table, name: str) -> None:
    graph, weight = exported.graph, cast(fx.Node, node.args[0])
    integers = add_parameter(exported, f"{name}.quantized_rows", table.integers, weight)
    scales = add_parameter(exported, f"{name}.row_scales", table.scales, weight)
    minimums = None
    if table.minimums is not None:
        minimums = add_parameter(exported, f"{name}.row_minimums", table.minimums, weight)
    shape, depth = node.meta["val"].shape, node.meta["val"].shape[-1]

    def add(target: Any, *operands: Any, **options: Any) -> fx.Node:
        return call(graph, target, *operands, like=node, **options)

    with graph.inserting_before(node):
        ids = add(_ATEN.reshape.default, node.args[1], [-1])
        rows = add(_ATEN.index_select.default, integers, 0, ids)
        floats = add(_ATEN._to_copy.default, rows, dtype=torch.float32)
        values = add(_ATEN.mul.Tensor, floats, add(_ATEN.index_select.default, scales, 0, ids))
        if minimums is not None:
            chosen = add(_ATEN.index_select.default, minimums, 0, ids)
            values = add(_ATEN.add.Tensor, values, chosen)
        flat = add(_ATEN.reshape.default, values, [-1, table.integers[0].numel()])
        if table.integers[0].numel() != depth:
            flat = add(_ATEN.slice.Tensor, flat, 1, 0, depth)
        if len(shape) != 2:
            sizes = [size if isinstance(size, int) else -1 for size in shape]
            flat = add(_ATEN.reshape.default, flat, sizes)
    replace(exported, node, flat)
    remove_unused(exported, [node])
    remove_unused_parameters(exported)

"""Linear layers get weights of 8 or 4 bits and quantised activations.

Each weight is packed on its own and its floats are freed at once where nobody else reads them, so
that memory never holds more than the floats left, the integers made and one matrix.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from octavo.compiler.passes.linear_layers import LinearLayer, linear_layers, mixers_behind
from octavo.compiler.passes.matching import (
    as_rows,
    is_float,
    no_operand,
    operator_of,
    remove_unused,
    replace,
    result,
    shaped_like,
)
from octavo.compiler.passes.parameters import add_parameter, call, remove_unused_parameters
from octavo.compiler.quantization import int4, int8
from octavo.compiler.quantization.packing import PackedWeight
from octavo.graphs.errors import BuildError
from octavo.graphs.ops.quantization import GROUP
from octavo.graphs.ops.quantization_torch import OPERATOR as QUANTIZE
from octavo.graphs.ops.quantized_linear import PANEL
from octavo.graphs.ops.quantized_linear_torch import OPERATOR as QUANTIZED_LINEAR
from octavo.graphs.spec import PassRecord

if TYPE_CHECKING:
    from octavo.compiler.quantization.gguf_blocks import GgufBlocks

Mode = Literal["int8", "int4"]

# A smaller matrix saves nothing: one panel of columns and one group of activations at least.
_SMALLEST_COLUMNS = PANEL
_SMALLEST_DEPTH = GROUP


@dataclass(frozen=True)
class _Weight:
    """A packed matrix in the graph."""

    operands: tuple[fx.Node, fx.Node, fx.Node, fx.Node]
    columns: int
    bits: int
    zero_point: int


@dataclass
class _Quantizer:
    exported: ExportedProgram
    mode: Mode
    blocks: GgufBlocks | None
    routers: set[fx.Node]
    heads: set[fx.Node]
    weights: dict[fx.Node, _Weight] = field(default_factory=dict)
    activations: dict[fx.Node, tuple[fx.Node, fx.Node, fx.Node]] = field(default_factory=dict)
    made: Counter[str] = field(default_factory=Counter)
    kept: dict[str, list[str]] = field(default_factory=dict)
    empty_groups: fx.Node | None = None
    float_bytes: int = 0
    packed_bytes: int = 0

    def visit(self, layer: LinearLayer) -> None:
        reason = self._obstacle(layer)
        if reason is not None:
            self.kept.setdefault(reason, []).append(layer.name)
            return
        graph, node = self.exported.graph, layer.node
        weight = self._weight(layer)
        with graph.inserting_before(node):
            residual = None if layer.residual is None else as_rows(graph, layer.residual)
            output = call(
                graph,
                QUANTIZED_LINEAR,
                *self._activations(layer.rows),
                *weight.operands,
                layer.bias or no_operand(self.exported, 1),
                residual or no_operand(self.exported, 2),
                weight.columns,
                weight.bits,
                weight.zero_point,
                like=node,
            )
            replace(self.exported, node, shaped_like(graph, output, node))
        remove_unused(self.exported, [node])
        remove_unused_parameters(self.exported)

    def _obstacle(self, layer: LinearLayer) -> str | None:
        columns, depth = layer.matrix.shape
        if layer.node in self.routers:
            return "it chooses experts"
        if columns < _SMALLEST_COLUMNS or depth < _SMALLEST_DEPTH:
            return f"a matrix of {columns} x {depth} is too small to gain"
        if layer.matrix.dtype != torch.float32 or not is_float(layer.rows):
            return "it is not of float32"
        return None

    def _weight(self, layer: LinearLayer) -> _Weight:
        if layer.weight not in self.weights:
            if not all(map(torch.isfinite, torch.aminmax(layer.matrix))):
                raise BuildError(
                    f"{layer.name} holds weights that are no finite numbers, which have no "
                    "integers: check the checkpoint or build with --quantization none"
                )
            packed = self._packed(layer)
            _require_finite_groups(packed, layer.name)
            self.float_bytes += layer.matrix.nbytes
            self.packed_bytes += packed.num_bytes
            self.weights[layer.weight] = self._parameters(packed, layer)
        return self.weights[layer.weight]

    def _packed(self, layer: LinearLayer) -> PackedWeight:
        is_head = layer.node in self.heads
        if self.blocks is not None:
            wanted = (8,) if self.mode == "int8" else (4, 8) if is_head else (4,)
            imported = self.blocks.find(layer.matrix, wanted)
            if imported is not None:
                self.made[f"{imported.block_type} blocks of the checkpoint as they are"] += 1
                return imported.packed
        if self.mode == "int8" or is_head:
            which = " (the head, whose errors are the logits')" if self.mode == "int4" else ""
            self.made[f"8 bits, one scale a column{which}"] += 1
            return int8.quantize(layer.matrix)
        self.made["4 bits in groups of 32"] += 1
        return int4.quantize(layer.matrix)

    def _parameters(self, packed: PackedWeight, layer: LinearLayer) -> _Weight:
        weight, column_scales, group_scales, group_minimums = packed.tensors
        return _Weight(
            (
                add_parameter(self.exported, f"{layer.name}.quantized", weight, layer.weight),
                self._or_none(column_scales, f"{layer.name}.scales", layer.weight),
                self._or_none(group_scales, f"{layer.name}.group_scales", layer.weight),
                self._or_none(group_minimums, f"{layer.name}.group_minimums", layer.weight),
            ),
            packed.columns,
            packed.bits,
            packed.zero_point,
        )

    def _or_none(self, tensor: Tensor, name: str, before: fx.Node) -> fx.Node:
        if tensor.numel():
            return add_parameter(self.exported, name, tensor, before)
        return no_operand(self.exported, 1) if tensor.dim() == 1 else self._no_groups(tensor)

    def _no_groups(self, empty: Tensor) -> fx.Node:
        if self.empty_groups is None:
            first = next(iter(self.exported.graph.nodes))
            self.empty_groups = add_parameter(self.exported, "no_groups", empty, first)
        return self.empty_groups

    def _activations(self, rows: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
        """A value that several layers read is quantised once, before the first of them."""
        if rows not in self.activations:
            graph = self.exported.graph
            quantized = call(graph, QUANTIZE, as_rows(graph, rows), like=rows)
            first, second, third = (result(graph, quantized, i) for i in range(3))
            self.activations[rows] = first, second, third
        return self.activations[rows]

    def note_stacked_weights(self) -> None:
        """Experts are matrices side by side, of which each token takes its own."""
        for name, tensor in self.exported.state_dict.items():
            if tensor.dim() == 3 and tensor.dtype == torch.float32 and tensor.numel():
                reason = "matrices of experts are no linear layer"
                self.kept.setdefault(reason, []).append(name)

    def record(self) -> PassRecord:
        notes = [f"{count} x {how}" for how, count in sorted(self.made.items())]
        if self.float_bytes:
            notes.append(f"{self.float_bytes:,} bytes of weights became {self.packed_bytes:,}")
        if self.blocks is not None and self.blocks.foreign_types:
            types = ", ".join(self.blocks.foreign_types)
            notes.append(f"blocks of other types ({types}) were rounded again from their floats")
        skipped = [
            f"{len(names)} x stays float32: {reason} ({names[0]})"
            for reason, names in self.kept.items()
        ]
        return PassRecord(
            name=f"quantize_{self.mode}",
            matches=self.made.total(),
            notes=tuple(notes),
            skipped=tuple(skipped),
        )


def quantize_weights(
    exported: ExportedProgram, mode: Mode, blocks: GgufBlocks | None = None
) -> tuple[ExportedProgram, PassRecord]:
    """`blocks`: what the checkpoint's weights were dequantised from, imported where it fits.

    Raises BuildError for weights that are no numbers or too large for float16 scales.
    """
    nodes = list(exported.graph.nodes)
    choices = [node for node in nodes if operator_of(node) == "aten.topk"]
    logits = cast("tuple[tuple[fx.Node, ...], ...]", nodes[-1].args)[0][0]
    quantizer = _Quantizer(
        exported,
        mode,
        blocks,
        routers=set().union(*map(mixers_behind, choices)),
        heads=mixers_behind(logits),
    )
    _forget_unread_tensors(exported)
    for layer in linear_layers(exported):
        quantizer.visit(layer)
    quantizer.note_stacked_weights()
    exported.graph_module.recompile()
    return exported, quantizer.record()


def _require_finite_groups(packed: PackedWeight, name: str) -> None:
    for values in (packed.group_scales, packed.group_minimums):
        if not torch.isfinite(values).all():
            raise BuildError(
                f"{name} holds weights beyond 65,504, the largest float16, which the scales of "
                "4-bit groups are kept in: build with --quantization int8"
            )


def _forget_unread_tensors(exported: ExportedProgram) -> None:
    """Tied weights are in the state under several names, of which the program reads one."""
    read = {spec.target for spec in exported.graph_signature.input_specs}
    for name in set(exported.state_dict) - read:
        del exported.state_dict[name]

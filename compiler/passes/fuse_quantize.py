"""A norm or an activation that is only quantised is quantised where it is computed."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

from torch import fx
from torch.export import ExportedProgram

from octavo.compiler.passes import matching
from octavo.compiler.passes.matching import operator_of
from octavo.compiler.passes.parameters import call
from octavo.graphs.ops.activation_torch import ACTIVATE_QUANTIZE_OPERATOR
from octavo.graphs.ops.norm_torch import NORM_QUANTIZE_OPERATOR
from octavo.graphs.ops.quantization import QUANTIZED
from octavo.graphs.spec import PassRecord

_SUM = len(QUANTIZED)  # the position of norm_quantize's sum


def fuse_quantize(exported: ExportedProgram) -> tuple[ExportedProgram, PassRecord]:
    kinds: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    nodes: list[fx.Node] = list(exported.graph.nodes)
    for node in nodes:
        if operator_of(node) != "octavo.quantize":
            continue
        source = cast(fx.Node, node.args[0])
        kind = _kind(source)
        if kind is None:
            skipped[f"{operator_of(source) or 'an input'} does not quantise"] += 1
        elif matching.only_user(source) is not node:
            skipped[f"the float result of {kind} has other readers"] += 1
        else:
            _fuse(exported, node, source)
            kinds[kind] += 1
    exported.graph_module.recompile()
    return exported, PassRecord(
        name="fuse_quantize",
        matches=kinds.total(),
        notes=tuple(f"{count} x {kind}" for kind, count in sorted(kinds.items())),
        skipped=tuple(f"{count} x {reason}" for reason, count in sorted(skipped.items())),
    )


def _kind(source: fx.Node) -> str | None:
    if operator_of(source) == "octavo.activate":
        return "activate"
    if operator_of(source) == "getitem" and source.args[1] == 0:
        return "norm" if operator_of(source.args[0]) == "octavo.norm" else None
    return None


def _fuse(exported: ExportedProgram, quantize: fx.Node, source: fx.Node) -> None:
    """The fused node stands where the float one stood, as others may read its sum."""
    graph = exported.graph
    is_norm = operator_of(source) == "getitem"
    computed = cast(fx.Node, source.args[0]) if is_norm else source
    target: Any = NORM_QUANTIZE_OPERATOR if is_norm else ACTIVATE_QUANTIZE_OPERATOR
    results = {item: cast(int, item.args[1]) for item in quantize.users}
    results |= {item: _SUM for item in computed.users if is_norm and item is not source}
    with graph.inserting_before(computed):
        fused = call(graph, target, *computed.args, like=computed)
        for item, position in results.items():
            matching.replace(exported, item, matching.result(graph, fused, position))
            graph.erase_node(item)
    matching.remove_unused(exported, [quantize])

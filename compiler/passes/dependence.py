"""Which values of a program depend on a step's tokens, and which on their positions alone."""

from __future__ import annotations

from torch import Tensor, fx
from torch.export import ExportedProgram

from octavo.compiler.passes.matching import operator_of
from octavo.graphs.bindings import POSITIONS

_MIXERS = frozenset({"addmm", "bmm", "embedding", "linear", "matmul", "mm"})


class Dependence:
    """The nodes on both sides of that line; parameters and what comes of them are on neither."""

    def __init__(self, exported: ExportedProgram) -> None:
        inputs = exported.graph_signature.user_inputs
        self.on_tokens: set[fx.Node] = set()
        self.on_positions: set[fx.Node] = set()
        for node in exported.graph.nodes:
            if node.op == "placeholder":
                if node.name == POSITIONS.name:
                    self.on_positions.add(node)
                elif node.name in inputs:
                    self.on_tokens.add(node)
            elif isinstance(node.meta.get("val"), (Tensor, list, tuple)):
                sources = node.all_input_nodes
                if any(source in self.on_tokens for source in sources):
                    self.on_tokens.add(node)
                elif any(source in self.on_positions for source in sources):
                    self.on_positions.add(node)

    def merge_repeated_angles(self, exported: ExportedProgram) -> None:
        """Layers that compute the same from the positions share the first one's nodes."""
        first: dict[str, fx.Node] = {}
        for node in list(exported.graph.nodes):
            if node in self.on_positions and node.op == "call_function":
                same = first.setdefault(f"{node.target}{node.args}{node.kwargs}", node)
                if same is not node:
                    node.replace_all_uses_with(same)
                    exported.graph.erase_node(node)

    def meets_positions(self, node: fx.Node) -> bool:
        """Whether positions went into a node after the linear layers that it comes from."""
        seen: set[fx.Node] = set()
        pending = [node]
        while pending:
            current = pending.pop()
            if current in self.on_positions:
                return True
            if current in self.on_tokens and current not in seen and not _mixes(current):
                seen.add(current)
                pending.extend(current.all_input_nodes)
        return False


def _mixes(node: fx.Node) -> bool:
    namespace, _, name = operator_of(node).rpartition(".")
    return namespace == "octavo" or name in _MIXERS

"""CUDA graphs of the decode steps that come again: one launch instead of hundreds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.backends.tensorrt.contexts import Context
from octavo.backends.tensorrt.cuda_runtime import CudaRuntime

MOST_GRAPHS = 32
_MOST_KEYS_SEEN = 1024
Key = tuple[int, ...]


@dataclass(frozen=True)
class _Graph:
    graph: Any
    context: Context  # which TensorRT forbids to change while its graph is in use


class DecodeGraphs:
    """Graphs by the exact sizes of a step, those used longest ago are dropped.

    A step runs plainly the first time its sizes are seen. The second time it runs in a context of
    its own, which gets TensorRT ready, and is recorded; from then on the graph is launched.
    """

    def __init__(self, cuda: CudaRuntime, most: int = MOST_GRAPHS) -> None:
        self._cuda = cuda
        self._most = most
        self._graphs: OrderedDict[Key, _Graph] = OrderedDict()
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self._refused: set[Key] = set()

    def launch(self, key: Key) -> bool:
        """Enqueues the graph of `key`; False where there is none."""
        found = self._graphs.get(key)
        if found is None:
            return False
        self._graphs.move_to_end(key)
        self._cuda.launch_graph(found.graph)
        return True

    def wants(self, key: Key) -> bool:
        """Whether a step of these sizes should be recorded: when it comes the second time."""
        if key in self._refused:
            return False
        if key in self._seen:
            return True
        self._seen[key] = None
        while len(self._seen) > _MOST_KEYS_SEEN:
            self._seen.popitem(last=False)
        return False

    def record(self, key: Key, context: Context, enqueue: Callable[[Context], None]) -> None:
        """Runs a step in `context`, which must be new and ready, then records it for later."""
        enqueue(context)
        if not context.is_capturable(self._cuda.stream):
            self._refused.add(key)
            return
        with self._cuda.capture() as graphs:
            enqueue(context)
        self._graphs[key] = _Graph(graphs[0], context)
        while len(self._graphs) > self._most:
            _, oldest = self._graphs.popitem(last=False)
            self._cuda.free_graph(oldest.graph)

    def clear(self) -> None:
        """Forgets the graphs: they hold the addresses of the caches."""
        while self._graphs:
            _, dropped = self._graphs.popitem()
            self._cuda.free_graph(dropped.graph)

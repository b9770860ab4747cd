"""A proof at every build: nothing but paged attention mixes the tokens of a flattened batch.

Two random sequences are run flattened together, then each alone, then the second in two chunks. A
convolution, a scan or linear attention would leak from one request into the next, or lose its
state between two steps. Every intermediate value that has a token axis is compared, so that the
first node that mixes is named. What is proven is the captured graph, which is what gets built; HF's
eager modules can be run through the same proof, to say why a model could not be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from octavo.graphs.errors import UnsupportedModelError
from octavo.graphs.spec import ModelSpec

# Lengths and sums that are unlikely dimensions of a model: a token axis is found by its size.
_LENGTHS = (11, 18)
_FIRST_CHUNK = 7
PROBE_TOKENS = sum(_LENGTHS)  # of the longest step of a proof
# Eager kernels block their sums by the batch's size, which moves values by 1e-6 of their scale in
# float32, and by 2 roundings in half precision; another request's tokens move them by a tenth.
_LEAST_TOLERANCE = 2e-4
_ROUNDINGS = 8

# A name to show -> what went into that module or node and what came out, in order of completion.
Trace = dict[str, tuple[Any, Any]]
# Of the logits, hidden states if there are any, and the changed caches.
Tracer = Callable[[tuple[Any, ...]], tuple[Trace, tuple[Any, ...]]]


@dataclass(frozen=True)
class _Part:
    """Tokens `start` to `end` of one sequence, in a step."""

    sequence: int
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@contextmanager
def one_thread() -> Iterator[None]:
    """Steps of a few tokens spend their time starting threads, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def prove_isolation(tracer: Tracer, spec: ModelSpec, block_size: int, dtype: torch.dtype) -> None:
    """Raises UnsupportedModelError, naming the culprit, if tokens mix outside paged attention.

    `tracer` runs one step (inputs as `bindings.STEP_INPUTS`, features of a drafter, then the
    caches) and returns the value of every intermediate, and the step's outputs.
    """
    probe = _Probe(tracer, spec, block_size, dtype)
    tolerance = max(_LEAST_TOLERANCE, _ROUNDINGS * torch.finfo(dtype).eps)
    first, second = (_Part(i, 0, length) for i, length in enumerate(_LENGTHS))
    together, logits, _ = probe.run([first, second])
    for part, start in ((first, 0), (second, len(first))):
        alone, own_logits, _ = probe.run([part])
        culprit = _first_difference(together, alone, start, len(part), tolerance)
        own_rows = logits[start : start + len(part)]
        if culprit is None and not _close(own_rows, own_logits, tolerance):
            culprit = "an operator that could not be located"
        if culprit is not None:
            raise UnsupportedModelError(
                f"{spec.architecture} mixes tokens of different requests in {culprit}, which has "
                "no state of its own in a paged engine: choose a model that mixes tokens by "
                "attention only"
            )
    head = _Part(second.sequence, 0, _FIRST_CHUNK)
    tail = _Part(second.sequence, _FIRST_CHUNK, len(second))
    _, head_logits, caches = probe.run([first, head])
    _, tail_logits, _ = probe.run([tail], caches)
    chunked = torch.cat([head_logits[len(first) :], tail_logits])
    if not _close(logits[len(first) :], chunked, tolerance):
        raise UnsupportedModelError(
            f"{spec.architecture} gives another result for a prompt in two chunks than for the "
            "whole, so it keeps state outside the paged cache: choose another model"
        )


class _Probe:
    def __init__(
        self, tracer: Tracer, spec: ModelSpec, block_size: int, dtype: torch.dtype
    ) -> None:
        self._tracer, self._spec = tracer, spec
        self._block_size, self._dtype = block_size, dtype
        generator = torch.Generator().manual_seed(0)
        self._tokens = [
            torch.randint(0, spec.vocab_size, (n,), generator=generator) for n in _LENGTHS
        ]
        self._features = [torch.randn(n, spec.feature_size, generator=generator) for n in _LENGTHS]
        self._pages = -(-max(_LENGTHS) // block_size)

    def _empty_caches(self) -> list[Tensor]:
        blocks = 1 + self._pages * len(_LENGTHS)
        return [
            torch.zeros(
                blocks,
                2,
                layer.num_kv_heads,
                self._block_size,
                layer.cache_row_size,
                dtype=self._dtype,
            )
            for layer in self._spec.layers
        ]

    def _inputs(self, parts: list[_Part]) -> tuple[Tensor, ...]:
        """The inputs of a step of `parts`, in the order of STEP_INPUTS, then features if there are
        any; all rows' logits are wanted."""
        size, pages = self._block_size, self._pages
        at = [torch.arange(part.start, part.end) for part in parts]
        tables = torch.tensor([[1 + p.sequence * pages + i for i in range(pages)] for p in parts])
        slots = [t[x // size] * size + x % size for t, x in zip(tables, at, strict=True)]
        starts = torch.tensor([0] + [len(x) for x in at]).cumsum(0)
        values = (
            torch.cat([self._tokens[p.sequence][p.start : p.end] for p in parts]),
            torch.cat(at),
            torch.cat(slots),
            tables,
            starts,
            torch.tensor([p.start for p in parts]),
            torch.arange(int(starts[-1])),
        )
        step = tuple(value.to(torch.int32) for value in values)
        if not self._spec.feature_size:
            return step
        return (*step, torch.cat([self._features[p.sequence][p.start : p.end] for p in parts]))

    @torch.no_grad()
    def run(
        self, parts: list[_Part], caches: list[Tensor] | None = None
    ) -> tuple[Trace, Tensor, list[Tensor]]:
        given = self._empty_caches() if caches is None else caches
        trace, outputs = self._tracer((*self._inputs(parts), given))
        return trace, outputs[0], outputs[-1]


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    finite = torch.isfinite(b)
    if not torch.equal(a[~finite], b[~finite]):  # the logits of tokens that are never drafted
        return False
    if not finite.any():
        return True
    scale = float(b[finite].abs().max()) + 1e-6
    return bool((a[finite] - b[finite]).abs().max() <= tolerance * scale)


def _first_difference(
    together: Trace, alone: Trace, start: int, own: int, tolerance: float
) -> str | None:
    """The first place where a sequence's rows go in as when it is alone, and come out otherwise."""
    for name, (given, result) in together.items():
        if name not in alone:
            continue
        given_alone, result_alone = alone[name]
        if _same_rows(given, given_alone, start, own, tolerance) and not _same_rows(
            result, result_alone, start, own, tolerance
        ):
            return name
    return None


def _same_rows(together: Any, alone: Any, start: int, own: int, tolerance: float) -> bool:
    for flattened, single in _tensor_pairs(together, alone):
        axis = _token_axis(flattened, single, own)
        if axis is None or not single.is_floating_point():
            continue
        if not _close(flattened.narrow(axis, start, own).float(), single.float(), tolerance):
            return False
    return True


def _tensor_pairs(a: Any, b: Any) -> Iterator[tuple[Tensor, Tensor]]:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        yield a, b
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        for x, y in zip(a, b, strict=False):
            yield from _tensor_pairs(x, y)


def _token_axis(flattened: Tensor, single: Tensor, own: int) -> int | None:
    """The axis along which `flattened` has all tokens and `single` only its own."""
    if flattened.dim() != single.dim():
        return None
    sizes = list(zip(flattened.shape, single.shape, strict=True))
    return sizes.index((sum(_LENGTHS), own)) if (sum(_LENGTHS), own) in sizes else None


def module_tracer(decoder: nn.Module) -> Tracer:
    """Traces eager modules, innermost first."""

    def trace(arguments: tuple[Any, ...]) -> tuple[Trace, tuple[Any, ...]]:
        values: Trace = {}
        handles = []
        for name, module in decoder.named_modules():
            shown = f"{type(module).__name__} ({name.removeprefix('model.')})"

            def record(
                _: nn.Module, given: Any, named: Any, output: Any, shown: str = shown
            ) -> None:
                values.setdefault(shown, ((*given, *named.values()), output))

            handles.append(module.register_forward_hook(record, with_kwargs=True))
        try:
            return values, decoder(*arguments)
        finally:
            for handle in handles:
                handle.remove()

    return trace


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: Trace = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "call_function":
            # A node's inputs are nodes before it: the first that differs is the one that mixes.
            self.values[_described(n)] = ((), value)
        return value


def _described(node: fx.Node) -> str:
    """The node and the innermost of HF's modules that it was captured from."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    if not modules:
        return f"{node.target} ({node.name})"
    path, module_type = modules[-1]
    name = getattr(module_type, "__name__", str(module_type).rpartition(".")[2])
    return f"{name} ({path.removeprefix('model.')}: {node.target}, node {node.name})"


def graph_tracer(exported: torch.export.ExportedProgram) -> Tracer:
    """Traces a captured graph, node by node."""
    module = exported.module()

    def trace(arguments: tuple[Any, ...]) -> tuple[Trace, tuple[Any, ...]]:
        recorder = _Recorder(module)
        *indices, caches = arguments
        return recorder.values, recorder.run(*indices, *caches)

    return trace

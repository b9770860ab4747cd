"""What the tests of the attention kernels share: cases, histories, paged steps, references.

The reference walks each sequence's own history token by token; it knows nothing of pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from octavo.graphs.ops.schema import DOMAIN, Operand, OperatorSchema
from tests.backend.kernel_variants import library_of, selected

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

# "T" is the type of the plain op's floats.
ELEMENT_TYPES = {
    "T": TensorProto.FLOAT,
    "float32": TensorProto.FLOAT,
    "int32": TensorProto.INT32,
    "int8": TensorProto.INT8,
}


@dataclass(frozen=True)
class Attention:
    heads: int = 4
    kv_heads: int = 2
    key_size: int = 16
    value_size: int = 16
    block_size: int = 16
    causal: bool = True
    sliding_window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    scale: float = 0.3

    @property
    def attributes(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "causal": int(self.causal),
            "sliding_window": self.sliding_window,
            "softcap": self.softcap,
            "k_transposed": 1,
        }

    @property
    def output_shape(self) -> tuple[int, ...]:
        return self.heads, self.value_size

    @property
    def sink_values(self) -> Floats:
        return np.linspace(-1.5, 2.5, self.heads if self.sinks else 0, dtype=np.float32)

    @property
    def slopes(self) -> Floats:
        count = self.heads if self.alibi else 0
        return np.asarray([2.0 ** -(1 + h) for h in range(count)], np.float32)


@dataclass(frozen=True)
class History:
    """All of a sequence's queries, keys and values."""

    query: Floats  # [L, H, Dk]
    key: Floats  # [L, Hkv, Dk]
    value: Floats  # [L, Hkv, Dv]

    @staticmethod
    def random(spec: Attention, length: int, seed: int) -> History:
        rng = np.random.default_rng(seed)

        def normal(heads: int, size: int) -> Floats:
            return rng.standard_normal((length, heads, size), dtype=np.float32)

        return History(
            normal(spec.heads, spec.key_size),
            normal(spec.kv_heads, spec.key_size),
            normal(spec.kv_heads, spec.value_size),
        )


def reference(spec: Attention, history: History, start: int, count: int) -> NDArray[np.float64]:
    """[count, H, Dv]: each query head of each token against the keys that it sees, in float64."""
    result = np.zeros((count, spec.heads, spec.value_size))
    for position in range(start, start + count):
        last = position + 1 if spec.causal else start + count
        first = max(0, position - spec.sliding_window + 1) if spec.sliding_window else 0
        for head in range(spec.heads):
            kv_head = head // (spec.heads // spec.kv_heads)
            keys = history.key[first:last, kv_head].astype(np.float64)
            scores = keys @ history.query[position, head].astype(np.float64) * spec.scale
            if spec.softcap:
                scores = spec.softcap * np.tanh(scores / spec.softcap)
            if spec.alibi:
                scores += float(spec.slopes[head]) * (np.arange(first, last) - position)
            logits = np.append(scores, spec.sink_values[head] if spec.sinks else -np.inf)
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            result[position - start, head] = weights[:-1] @ history.value[first:last, kv_head]
    return result


@dataclass(frozen=True)
class Chunk:
    """`count` tokens of sequence `sequence`, from position `start` on."""

    sequence: int
    start: int
    count: int


@dataclass
class PagedRun:
    """A cache full of NaN, sequences in blocks at random places, and steps over it."""

    session: onnxruntime.InferenceSession
    spec: Attention
    histories: Sequence[History]
    seed: int = 0
    cache: NDArray[Any] = field(init=False)
    tables: list[Ints] = field(init=False)

    def __post_init__(self) -> None:
        spec = self.spec
        needed = [-(-len(h.query) // spec.block_size) for h in self.histories]
        blocks = np.random.default_rng(self.seed).permutation(sum(needed) + 3).astype(np.int32)
        self.tables = np.split(blocks, np.cumsum(needed))[:-1]
        self.allocate(len(blocks))

    def allocate(self, num_blocks: int) -> None:
        spec = self.spec
        width = max(spec.key_size, spec.value_size)
        shape = (num_blocks, 2, spec.kv_heads, spec.block_size, width)
        self.cache = np.full(shape, np.nan, np.float32)

    def slots(self, sequence: int, positions: Ints) -> Ints:
        size = self.spec.block_size
        return self.tables[sequence][positions // size] * size + positions % size

    def preload(self, sequence: int, length: int) -> None:
        """Puts a prefix into the cache as an earlier step would have."""
        history = self.histories[sequence]
        slots = self.slots(sequence, np.arange(length, dtype=np.int32))
        blocks, offsets = slots // self.spec.block_size, slots % self.spec.block_size
        n, _, heads, size, width = self.cache.shape
        transposed = self.cache.reshape(n, 2, heads, width, size)
        transposed[blocks, 0, :, : self.spec.key_size, offsets] = history.key[:length]
        self.cache[blocks, 1, :, offsets, : self.spec.value_size] = history.value[:length]

    def gather(self, name: str, chunks: Sequence[Chunk]) -> NDArray[Any]:
        """A field of the chunks' histories, for all tokens of the step."""
        parts = [
            getattr(self.histories[c.sequence], name)[c.start : c.start + c.count] for c in chunks
        ]
        return np.concatenate(parts)

    def token_feeds(self, chunks: Sequence[Chunk]) -> dict[str, NDArray[Any]]:
        return {name: self.gather(name, chunks) for name in ("query", "key", "value")}

    def cache_feeds(self) -> dict[str, NDArray[Any]]:
        return {"kv_cache": self.cache}

    def feeds(self, chunks: Sequence[Chunk]) -> dict[str, NDArray[Any]]:
        slots = [
            self.slots(c.sequence, np.arange(c.start, c.start + c.count, dtype=np.int32))
            for c in chunks
        ]
        width = max(len(self.tables[c.sequence]) for c in chunks) + 1
        # Entries behind a sequence's blocks are never read.
        tables = np.full((len(chunks), width), -7, np.int32)
        for row, chunk in enumerate(chunks):
            table = self.tables[chunk.sequence]
            tables[row, : len(table)] = table
        return {
            **self.token_feeds(chunks),
            **self.cache_feeds(),
            "slot_mapping": np.concatenate(slots).astype(np.int32),
            "block_tables": tables,
            "query_start_loc": np.cumsum([0, *(c.count for c in chunks)], dtype=np.int32),
            "prefix_offsets": np.asarray([c.start for c in chunks], np.int32),
            "sinks": self.spec.sink_values,
            "alibi_slopes": self.spec.slopes,
        }

    def step(self, *chunks: Chunk) -> list[Floats]:
        feeds = self.feeds(chunks)
        attention = run_in_place(self.session, feeds, self.spec)
        heads = attention.reshape(-1, self.spec.heads, self.spec.value_size)
        return np.split(heads, feeds["query_start_loc"][1:-1])

    def chunked(self, size: int, sequence: int = 0, start: int = 0) -> Floats:
        length = len(self.histories[sequence].query)
        steps = range(start, length, size)
        return np.concatenate(
            [self.step(Chunk(sequence, at, min(size, length - at)))[0] for at in steps]
        )


def run_in_place(
    session: onnxruntime.InferenceSession, feeds: dict[str, NDArray[Any]], spec: Attention
) -> Floats:
    """One run with each changed input bound to its output, as the runtime does it."""
    tokens = len(feeds["slot_mapping"])
    attention = np.full((tokens, *spec.output_shape), np.nan, np.float32)
    values = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
        for name, array in {**feeds, "attention": attention}.items()
    }
    binding = session.io_binding()
    for name in feeds:
        binding.bind_ortvalue_input(name, values[name])
    for output in session.get_outputs():
        binding.bind_ortvalue_output(output.name, values[output.name.removesuffix("_out")])
    session.run_with_iobinding(binding)
    return attention


def one_node_model(schema: OperatorSchema, attributes: dict[str, Any]) -> bytes:
    """Says nothing of shapes, so that wrong ones reach the kernel."""

    def info(operand: Operand) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(operand.name, ELEMENT_TYPES[operand.type_group], None)

    inputs, outputs = ([info(o) for o in side] for side in (schema.inputs, schema.outputs))
    node = helper.make_node(
        schema.onnx_name,
        [value.name for value in inputs],
        [value.name for value in outputs],
        domain=DOMAIN,
        **attributes,
    )
    graph = helper.make_graph([node], "attention", inputs, outputs)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return bytes(model.SerializeToString())


def open_session(
    variant: str, schema: OperatorSchema, attributes: dict[str, Any], threads: int = 1
) -> onnxruntime.InferenceSession:
    """A session of one node with an instruction set's build of the kernel."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library_of(variant)))
    with selected(variant):
        return onnxruntime.InferenceSession(
            one_node_model(schema, attributes), options, providers=["CPUExecutionProvider"]
        )


def assert_same_bits(actual: Floats, expected: Floats) -> None:
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


def assert_close(actual: Floats, expected: NDArray[np.float64]) -> None:
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=4e-6)


Change = Callable[[NDArray[Any]], NDArray[Any]]


def put(index: int | tuple[int, ...], value: int) -> Change:
    def change(array: NDArray[Any]) -> NDArray[Any]:
        copy = array.copy()
        copy[index] = value
        return copy

    return change


def keep(*slices: slice) -> Change:
    return lambda array: array[slices]


def zeros(*shape: int) -> Change:
    return lambda array: np.zeros(shape, array.dtype)


Steps = list[list[tuple[int, int]]]  # of (sequence, count)


@st.composite
def step_lists(draw: st.DrawFn) -> tuple[list[int], Steps]:
    """Sequence lengths, and steps that feed all their tokens."""
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    remaining, steps = list(lengths), []
    while any(remaining):
        waiting = [s for s, left in enumerate(remaining) if left]
        chosen = draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
        steps.append([(s, draw(st.integers(1, remaining[s]))) for s in chosen])
        for sequence, count in steps[-1]:
            remaining[sequence] -= count
    return lengths, steps

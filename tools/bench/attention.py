"""`python -m octavo.tools.bench.attention`: the attention kernels alone, through ONNX Runtime.

A model of several layers, each with a cache of its own, runs as a step of an engine does. Prefill
is measured in GFLOP/s a thread, counting only the products that causal attention needs. Decode is
measured in GB/s of keys and values, beside the rate at which NumPy reads the same memory in the
same process at the same time: on a shared machine only their ratio means something. The fastest of
all runs counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import onnxruntime
import typer
from numpy.typing import NDArray
from onnx import TensorProto, helper

from octavo.backends import kernels
from octavo.graphs.ops import fused_paged_attention, paged_attention
from octavo.graphs.ops.schema import DOMAIN, OPSET_VERSION, Operand, OperatorSchema
from octavo.tools import console
from octavo.tools.bench import kernel_session

Arrays = dict[str, NDArray[Any]]

BLOCK_SIZE = 16
SCHEMAS = {
    "plain": paged_attention.SCHEMA,
    "fused": fused_paged_attention.SCHEMA,
    "int8": fused_paged_attention.INT8_SCHEMA,
}
ELEMENT_TYPES = {
    "T": TensorProto.FLOAT,
    "float32": TensorProto.FLOAT,
    "int32": TensorProto.INT32,
    "int8": TensorProto.INT8,
}


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_size: int
    prefix: int  # tokens of each sequence that are in the cache already
    tokens: int  # of each sequence in this step
    sequences: int = 1
    layers: int = 1

    @property
    def length(self) -> int:
        return self.prefix + self.tokens

    @property
    def flops(self) -> int:
        """Of a layer's two products, a multiply-add counting as two."""
        visible = sum(range(self.prefix + 1, self.length + 1))
        return 4 * self.heads * self.head_size * visible * self.sequences

    def cache_bytes(self, op: str) -> int:
        """That a layer reads, scales included."""
        head_bytes = self.head_size + 4 if op == "int8" else 4 * self.head_size
        return 2 * self.kv_heads * head_bytes * self.length * self.sequences


PREFILLS = (Shape(9, 3, 64, 0, 512), Shape(16, 8, 128, 0, 512), Shape(9, 3, 64, 0, 2048))
# As many layers as keep their caches out of the processor's own.
LONG_DECODES = (Shape(16, 8, 128, 3999, 1, layers=8), Shape(9, 3, 64, 3999, 1, layers=16))
SHORT_DECODES = tuple(
    Shape(9, 3, 64, prefix, 1, sequences, layers=30)
    for sequences in (1, 8, 32)
    for prefix in (127, 255)
)

app = console.application("Measures the attention kernels.")


@app.command()
def attention(
    op: Annotated[str, typer.Option(help=f"One of {', '.join(SCHEMAS)}.")] = "fused",
    threads: Annotated[int, typer.Option(help="Intra-op threads of ONNX Runtime.")] = 1,
    runs: Annotated[int, typer.Option(help="Measured runs, of which the fastest counts.")] = 20,
) -> None:
    """Print the results as JSON on stdout."""
    if op not in SCHEMAS:
        raise typer.BadParameter(f"{op!r} is not one of {', '.join(SCHEMAS)}", param_hint="--op")
    console.print_json(
        {
            "instruction_set": kernels.instruction_set(),
            "op": op,
            "threads": threads,
            "prefill": [_prefill(shape, op, threads, runs) for shape in PREFILLS],
            "decode": [
                _decode(shape, op, threads, runs) for shape in (*LONG_DECODES, *SHORT_DECODES)
            ],
        }
    )


def _prefill(shape: Shape, op: str, threads: int, runs: int) -> dict[str, Any]:
    step = _Step(shape, op, threads)
    seconds = min(kernel_session.seconds_of(step.run, runs)) / shape.layers
    return {
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_size": shape.head_size,
        "tokens": shape.tokens,
        "milliseconds": round(seconds * 1e3, 3),
        "gflops_per_thread": round(shape.flops / seconds / threads / 1e9, 1),
    }


def _decode(shape: Shape, op: str, threads: int, runs: int) -> dict[str, Any]:
    step = _Step(shape, op, threads)
    attend, read = [], []
    for _ in range(runs):
        attend += kernel_session.seconds_of(step.run, 1)
        read += kernel_session.seconds_of(step.read, 1)
    rates = [shape.layers * shape.cache_bytes(op) / min(times) / 1e9 for times in (attend, read)]
    return {
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_size": shape.head_size,
        "context": shape.length,
        "sequences": shape.sequences,
        "microseconds_per_layer": round(min(attend) * 1e6 / shape.layers, 2),
        "gb_per_second": round(rates[0], 2),
        "one_thread_read_gb_per_second": round(rates[1], 2),
        "share_of_one_thread_read": round(rates[0] / rates[1], 2),
    }


class _Step:
    """One step of all layers, their caches bound in place."""

    def __init__(self, shape: Shape, op: str, threads: int) -> None:
        schema = SCHEMAS[op]
        generator = np.random.default_rng(0)
        self._session = kernel_session.open_session(_model(shape, schema), threads)
        self._caches = _caches(shape, op, generator)
        arrays = {**_tokens(shape, op, generator), **_places(shape, generator)}
        for layer, cache in enumerate(self._caches):
            arrays |= {_of_layer(name, layer): array for name, array in cache.items()}
        rows, heads, size = shape.sequences * shape.tokens, shape.heads, shape.head_size
        output_shape = (rows, heads, size) if op == "plain" else (rows, heads * size)
        output = np.zeros(output_shape, np.float32)
        arrays |= {_of_layer("attention", i): output for i in range(shape.layers)}
        # Kept, because a binding does not keep what it is bound to.
        self._values = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()
        }
        self._binding = self._session.io_binding()
        for value in self._session.get_inputs():
            self._binding.bind_ortvalue_input(value.name, self._values[value.name])
        for value in self._session.get_outputs():
            bound = self._values[value.name.replace("_out", "")]
            self._binding.bind_ortvalue_output(value.name, bound)
        self.run()

    def run(self) -> None:
        self._session.run_with_iobinding(self._binding)

    def read(self) -> None:
        """As fast as one thread of NumPy reads the caches."""
        for cache in self._caches:
            for array in cache.values():
                array.view(np.float32).max()


def _tokens(shape: Shape, op: str, generator: np.random.Generator) -> Arrays:
    """What the step's tokens bring along."""
    rows, size = shape.sequences * shape.tokens, shape.head_size

    def random(*dims: int) -> NDArray[np.float32]:
        return generator.standard_normal((rows, *dims), dtype=np.float32)

    if op == "plain":
        heads = {"query": shape.heads, "key": shape.kv_heads, "value": shape.kv_heads}
        return {name: random(count, size) for name, count in heads.items()}
    none = np.zeros(0, np.float32)
    return {
        "qkv": random((shape.heads + 2 * shape.kv_heads) * size),
        "cos": random(size),
        "sin": random(size),
        "query_norm": none,
        "key_norm": none,
    }


def _places(shape: Shape, generator: np.random.Generator) -> Arrays:
    """Sequences in blocks at random places."""
    width = -(-shape.length // BLOCK_SIZE)
    tables = generator.permutation(shape.sequences * width).astype(np.int32).reshape(-1, width)
    positions = np.arange(shape.prefix, shape.length)
    slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return {
        "slot_mapping": slots.reshape(-1).astype(np.int32),
        "block_tables": tables,
        "query_start_loc": np.arange(shape.sequences + 1, dtype=np.int32) * shape.tokens,
        "prefix_offsets": np.full(shape.sequences, shape.prefix, np.int32),
        "sinks": np.zeros(0, np.float32),
        "alibi_slopes": np.zeros(0, np.float32),
    }


def _caches(shape: Shape, op: str, generator: np.random.Generator) -> list[Arrays]:
    """One a layer, cut from large arrays, which the system gives large pages."""
    blocks = shape.sequences * -(-shape.length // BLOCK_SIZE)
    dims = (shape.layers, blocks, 2, shape.kv_heads, BLOCK_SIZE, shape.head_size)
    arrays = {"kv_cache": kernel_session.aligned(generator.standard_normal(dims, dtype=np.float32))}
    if op == "int8":
        arrays = {
            "kv_cache": kernel_session.aligned(generator.integers(-127, 128, dims, dtype=np.int8)),
            "kv_scales": kernel_session.aligned(np.full(dims[:-1], 0.01, np.float32)),
        }
    return [{name: array[i] for name, array in arrays.items()} for i in range(shape.layers)]


def _of_layer(name: str, layer: int) -> str:
    return f"{name}.{layer}"


def _model(shape: Shape, schema: OperatorSchema) -> bytes:
    attributes: dict[str, Any] = {"scale": shape.head_size**-0.5, "k_transposed": 1}
    if schema is not paged_attention.SCHEMA:
        attributes |= {
            "num_heads": shape.heads,
            "num_kv_heads": shape.kv_heads,
            "head_size": shape.head_size,
        }
    shared = [o for o in schema.inputs if not o.name.startswith("kv_")]
    own = [o for o in schema.inputs if o.name.startswith("kv_")]
    layers = range(shape.layers)
    nodes = [
        helper.make_node(
            schema.onnx_name,
            [_of_layer(o.name, i) if o in own else o.name for o in schema.inputs],
            [_of_layer(o.name, i) for o in schema.outputs],
            domain=DOMAIN,
            **attributes,
        )
        for i in layers
    ]
    inputs = [_info(o, o.name) for o in shared]
    inputs += [_info(o, _of_layer(o.name, i)) for i in layers for o in own]
    outputs = [_info(o, _of_layer(o.name, i)) for i in layers for o in schema.outputs]
    return _serialized(nodes, inputs, outputs)


def _info(operand: Operand, name: str) -> Any:
    return helper.make_tensor_value_info(name, ELEMENT_TYPES[operand.type_group], None)


def _serialized(nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> bytes:
    graph = helper.make_graph(nodes, "attention", inputs, outputs)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, OPSET_VERSION)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return bytes(model.SerializeToString())


if __name__ == "__main__":
    app()

"""`python -m octavo.tools.bench.linear`: the linear layers alone, through ONNX Runtime.

A model of several layers, each with weights of its own, runs as a step of an engine does. Many rows
are measured in GFLOP/s a thread, one row in GB/s of weights, beside the rate at which NumPy reads
the same memory in the same process at the same time: on a shared machine only their ratio means
something. The fastest of all runs counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import onnxruntime
import typer
from numpy.typing import NDArray
from onnx import TensorProto, helper

from octavo.backends import kernels
from octavo.graphs.ops import linear, quantization, quantized_linear
from octavo.graphs.ops.schema import DOMAIN, OPSET_VERSION, OperatorSchema
from octavo.tools import console
from octavo.tools.bench import kernel_session

Arrays = dict[str, NDArray[Any]]

PRECISIONS = ("float32", "int8", "int4")
ROWS = (1, 8, 32, 256, 512)
COLD_BYTES = 1 << 26  # of weights that keep each other out of the processor's caches
# Of a run, unless one layer takes more: a run of a few milliseconds may go undisturbed.
MOST_FLOPS = 1 << 29
PER_LAYER = ("weight", "column_scales", "group_scales", "group_minimums")
ELEMENT_TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int8): TensorProto.INT8,
    np.dtype(np.uint8): TensorProto.UINT8,
}


@dataclass(frozen=True)
class Shape:
    depth: int
    columns: int

    def flops(self, rows: int) -> int:
        """A multiply-add counts as two."""
        return 2 * rows * self.depth * self.columns


# SmolLM2-135M: QKV, gate and up, down, logits; a Llama of 1.1B: QKV, gate and up, down.
SHAPES = (
    Shape(576, 960),
    Shape(576, 3072),
    Shape(1536, 576),
    Shape(576, 49152),
    Shape(2048, 2560),
    Shape(2048, 11264),
    Shape(5632, 2048),
)

app = console.application("Measures the linear kernels.")


@app.command()
def linears(
    precision: Annotated[str, typer.Option(help=f"One of {', '.join(PRECISIONS)}.")] = "int8",
    threads: Annotated[int, typer.Option(help="Intra-op threads of ONNX Runtime.")] = 1,
    runs: Annotated[int, typer.Option(help="Measured runs, of which the fastest counts.")] = 20,
    rows: Annotated[list[int] | None, typer.Option(help="Rows; repeat it for more.")] = None,
) -> None:
    """Print the results as JSON on stdout."""
    if precision not in PRECISIONS:
        message = f"{precision!r} is not one of {', '.join(PRECISIONS)}"
        raise typer.BadParameter(message, param_hint="--precision")
    console.print_json(
        {
            "instruction_set": kernels.instruction_set(),
            "precision": precision,
            "threads": threads,
            "results": [
                _measure(shape, precision, count, threads, runs)
                for shape in SHAPES
                for count in rows or ROWS
            ],
        }
    )


def _measure(shape: Shape, precision: str, rows: int, threads: int, runs: int) -> dict[str, Any]:
    step = _Step(shape, precision, rows, threads)
    multiply, read = [], []
    for _ in range(runs):
        multiply += kernel_session.seconds_of(step.run, 1)
        read += kernel_session.seconds_of(step.read, 1)
    seconds = min(multiply) / step.num_layers
    rates = [step.num_bytes / min(times) / 1e9 for times in (multiply, read)]
    return {
        "depth": shape.depth,
        "columns": shape.columns,
        "rows": rows,
        "microseconds": round(seconds * 1e6, 1),
        "gflops_per_thread": round(shape.flops(rows) / seconds / threads / 1e9, 1),
        "gb_per_second": round(rates[0], 2),
        "one_thread_read_gb_per_second": round(rates[1], 2),
        "share_of_one_thread_read": round(rates[0] / rates[1], 2),
    }


class _Step:
    """All layers on the same rows, one after the other."""

    def __init__(self, shape: Shape, precision: str, rows: int, threads: int) -> None:
        generator = np.random.default_rng(0)
        weights = _weights(shape, precision, generator)
        layer_bytes = sum(array.nbytes for array in weights.values())
        most = max(1, MOST_FLOPS // shape.flops(rows))
        self.num_layers = min(-(-COLD_BYTES // layer_bytes), most)
        self.num_bytes = self.num_layers * layer_bytes
        self._weights = [
            {name: kernel_session.aligned(array) for name, array in weights.items()}
            for _ in range(self.num_layers)
        ]
        arrays = _rows(shape, precision, rows, generator)
        for layer, own in enumerate(self._weights):
            arrays |= {_of_layer(name, layer): array for name, array in own.items()}
        self._session = kernel_session.open_session(
            _model(shape, precision, arrays, self.num_layers), threads
        )
        # Kept, because a binding does not keep what it is bound to.
        output = np.zeros((rows, shape.columns), np.float32)
        self._values = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(array)
            for name, array in {**arrays, "output": output}.items()
        }
        self._binding = self._session.io_binding()
        for name in arrays:
            self._binding.bind_ortvalue_input(name, self._values[name])
        for value in self._session.get_outputs():
            self._binding.bind_ortvalue_output(value.name, self._values["output"])
        self.run()

    def run(self) -> None:
        self._session.run_with_iobinding(self._binding)

    def read(self) -> None:
        """As fast as one thread of NumPy reads the weights."""
        for layer in self._weights:
            for array in layer.values():
                array.view(np.int32).max(initial=0)


def _schema(precision: str) -> OperatorSchema:
    return linear.SCHEMA if precision == "float32" else quantized_linear.SCHEMA


def _rows(shape: Shape, precision: str, rows: int, generator: np.random.Generator) -> Arrays:
    """What all layers share."""
    arrays: Arrays = {"bias": np.zeros(0, np.float32), "residual": np.zeros((0, 0), np.float32)}
    if precision == "float32":
        return {"input": generator.standard_normal((rows, shape.depth), np.float32), **arrays}
    groups = shape.depth // quantization.GROUP
    quantized = generator.integers(-127, 128, (rows, groups, quantization.GROUP), np.int8)
    return {
        "quantized": quantized.reshape(rows, -1),
        "scales": np.full((rows, shape.depth // quantization.GROUP), 0.01, np.float32),
        "sums": quantized.sum(2, dtype=np.int32),
        **arrays,
    }


def _weights(shape: Shape, precision: str, generator: np.random.Generator) -> Arrays:
    if precision == "float32":
        panel_shape = (-(-shape.columns // linear.PANEL), shape.depth, linear.PANEL)
        return {"weight": generator.standard_normal(panel_shape, np.float32)}
    panels = -(-shape.columns // quantized_linear.PANEL)
    bits = 8 if precision == "int8" else 4
    steps = shape.depth * bits // 8 // quantized_linear.DEPTH
    grouped = (panels, shape.depth // quantization.GROUP, quantized_linear.PANEL)
    halves = (0, 0, 0) if precision == "int8" else grouped
    dims = (panels, steps, quantized_linear.PANEL, quantized_linear.DEPTH)
    return {
        "weight": generator.integers(0, 256, dims, np.uint8),
        "column_scales": np.full(shape.columns if precision == "int8" else 0, 0.01, np.float32),
        "group_scales": np.full(halves, 0.01, np.float16),
        "group_minimums": np.full(halves, -0.08, np.float16),
    }


def _of_layer(name: str, layer: int) -> str:
    return f"{name}.{layer}" if name in PER_LAYER else name


def _model(shape: Shape, precision: str, arrays: Arrays, num_layers: int) -> bytes:
    schema = _schema(precision)
    attributes: dict[str, Any] = {"columns": shape.columns}
    if precision == "int8":
        attributes |= {"bits": 8, "zero_point": 128}
    elif precision == "int4":
        attributes |= {"bits": 4, "zero_point": 0}
    nodes = [
        helper.make_node(
            schema.onnx_name,
            [_of_layer(operand.name, layer) for operand in schema.inputs],
            [f"output.{layer}"],
            domain=DOMAIN,
            **attributes,
        )
        for layer in range(num_layers)
    ]
    graph = helper.make_graph(
        nodes,
        "linears",
        [
            helper.make_tensor_value_info(name, ELEMENT_TYPES[array.dtype], None)
            for name, array in arrays.items()
        ],
        [
            helper.make_tensor_value_info(f"output.{layer}", TensorProto.FLOAT, None)
            for layer in range(num_layers)
        ],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, OPSET_VERSION)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return bytes(model.SerializeToString())


if __name__ == "__main__":
    app()

"""`python -m octavo.tools.bench.attention`: the attention kernel alone, through ONNX Runtime.

Prefill is measured in GFLOP/s a thread, counting only the products that causal attention needs.
Decode is measured in GB/s of keys and values, beside the rate at which NumPy reads memory in the
same process at the same time: on a shared machine only their ratio means something.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import onnxruntime
import typer
from numpy.typing import NDArray
from onnx import TensorProto, helper

from octavo.backends import kernels
from octavo.tools import console

BLOCK_SIZE = 16
ALIGNMENT = 64  # bytes; a row of 16 keys is then one cache line
DECODE_LAYERS = 8  # cycled, so that no cache is still in the processor's own


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_size: int
    prefix: int  # tokens already in the cache
    tokens: int  # of this step

    @property
    def length(self) -> int:
        return self.prefix + self.tokens

    @property
    def flops(self) -> int:
        """Of both products, a multiply-add counting as two."""
        visible = sum(range(self.prefix + 1, self.length + 1))
        return 4 * self.heads * self.head_size * visible

    @property
    def cache_bytes(self) -> int:
        return 2 * 4 * self.kv_heads * self.head_size * self.length


PREFILLS = (Shape(9, 3, 64, 0, 512), Shape(16, 8, 128, 0, 512), Shape(9, 3, 64, 0, 2048))
DECODES = (Shape(16, 8, 128, 3999, 1), Shape(9, 3, 64, 3999, 1))

app = console.application("Measures the attention kernel.")


@app.command()
def attention(
    threads: Annotated[int, typer.Option(help="Intra-op threads of ONNX Runtime.")] = 1,
    runs: Annotated[int, typer.Option(help="Measured runs, of which the median counts.")] = 20,
) -> None:
    """Print the results as JSON on stdout."""
    console.print_json(
        {
            "instruction_set": kernels.instruction_set(),
            "threads": threads,
            "prefill": [_prefill(shape, threads, runs) for shape in PREFILLS],
            "decode": [_decode(shape, threads, runs) for shape in DECODES],
        }
    )


def _prefill(shape: Shape, threads: int, runs: int) -> dict[str, Any]:
    step = _Step(shape, _session(shape, threads))
    seconds = _measure(step.run, runs)
    return {
        **_describe(shape),
        "milliseconds": round(statistics.median(seconds) * 1e3, 3),
        "gflops_per_thread": round(shape.flops / statistics.median(seconds) / threads / 1e9, 1),
        "best_gflops_per_thread": round(shape.flops / min(seconds) / threads / 1e9, 1),
    }


def _decode(shape: Shape, threads: int, runs: int) -> dict[str, Any]:
    session = _session(shape, threads)
    layers = [_Step(shape, session) for _ in range(DECODE_LAYERS)]
    attend, read = [], []
    for layer, other in zip(layers * runs, layers[DECODE_LAYERS // 2 :] * 2 * runs, strict=False):
        attend += _measure(layer.run, 1)
        read += _measure(other.read, 1)
    rate, limit = (shape.cache_bytes / statistics.median(times) / 1e9 for times in (attend, read))
    return {
        **_describe(shape),
        "milliseconds": round(statistics.median(attend) * 1e3, 3),
        "gb_per_second": round(rate, 2),
        "one_thread_read_gb_per_second": round(limit, 2),
        "share_of_one_thread_read": round(rate / limit, 2),
    }


def _describe(shape: Shape) -> dict[str, Any]:
    return {
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_size": shape.head_size,
        "context": shape.length,
    }


def _measure(function: Callable[[], object], runs: int) -> list[float]:
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return seconds


class _Step:
    """One layer's step with its own cache, bound in place."""

    def __init__(self, shape: Shape, session: onnxruntime.InferenceSession) -> None:
        generator = np.random.default_rng(0)
        num_blocks = -(-shape.length // BLOCK_SIZE)
        block_table = generator.permutation(num_blocks).astype(np.int32)
        positions = np.arange(shape.prefix, shape.length)
        slots = block_table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        cache_shape = (num_blocks, 2, shape.kv_heads, BLOCK_SIZE, shape.head_size)
        self._cache = _aligned(generator.standard_normal(cache_shape, dtype=np.float32))

        def random(heads: int) -> NDArray[np.float32]:
            size = (shape.tokens, heads, shape.head_size)
            return generator.standard_normal(size, dtype=np.float32)

        inputs: dict[str, NDArray[Any]] = {
            "query": random(shape.heads),
            "key": random(shape.kv_heads),
            "value": random(shape.kv_heads),
            "kv_cache": self._cache,
            "slot_mapping": slots.astype(np.int32),
            "block_tables": block_table[None],
            "query_start_loc": np.asarray([0, shape.tokens], np.int32),
            "prefix_offsets": np.asarray([shape.prefix], np.int32),
            "sinks": np.zeros(0, np.float32),
            "alibi_slopes": np.zeros(0, np.float32),
        }
        output = np.zeros((shape.tokens, shape.heads, shape.head_size), np.float32)
        # Kept, because a binding does not keep what it is bound to.
        self._values = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(array)
            for name, array in {**inputs, "attention": output}.items()
        }
        self._binding = session.io_binding()
        for name in inputs:
            self._binding.bind_ortvalue_input(name, self._values[name])
        self._binding.bind_ortvalue_output("attention", self._values["attention"])
        self._binding.bind_ortvalue_output("kv_cache_out", self._values["kv_cache"])
        self._session = session
        self.run()

    def run(self) -> None:
        self._session.run_with_iobinding(self._binding)

    def read(self) -> object:
        """As fast as one thread of NumPy reads the cache."""
        return self._cache.max()


def _aligned(array: NDArray[np.float32]) -> NDArray[np.float32]:
    room = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    aligned = room[start : start + array.nbytes].view(np.float32).reshape(array.shape)
    aligned[...] = array
    return aligned


def _session(shape: Shape, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(kernels.library_path()))
    return onnxruntime.InferenceSession(_model(shape), options, providers=["CPUExecutionProvider"])


def _model(shape: Shape) -> bytes:
    floats = ("query", "key", "value", "kv_cache")
    integers = ("slot_mapping", "block_tables", "query_start_loc", "prefix_offsets")
    types = {
        **dict.fromkeys(floats, TensorProto.FLOAT),
        **dict.fromkeys(integers, TensorProto.INT32),
        **dict.fromkeys(("sinks", "alibi_slopes"), TensorProto.FLOAT),
    }
    outputs = ("attention", "kv_cache_out")
    node = helper.make_node(
        "PagedAttention",
        list(types),
        list(outputs),
        domain="octavo",
        scale=shape.head_size**-0.5,
        k_transposed=1,
    )
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, kind, None) for name, kind in types.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("octavo", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return bytes(model.SerializeToString())


if __name__ == "__main__":
    app()

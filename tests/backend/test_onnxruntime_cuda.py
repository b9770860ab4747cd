"""ONNX Runtime engines for CUDA: built here, and computed without CUDA as far as that goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as onnxruntime_state

from octavo.backends import registry
from octavo.backends.base import EngineKind
from octavo.backends.bundle import read_manifest
from octavo.backends.onnxruntime import split_attention
from octavo.backends.onnxruntime.split_layout import flash_block_size
from octavo.graphs.errors import BuildError, UnsupportedModelError
from tests.backend.cuda_engines import NUM_BLOCKS, OTHER, SEQUENCE, CudaEngines, assert_close, steps
from tests.backend.paged_attention_schema import Evaluated
from tests.backend.steps import BLOCK_SIZE, pack

# --- the operator ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def schema() -> Any:
    (found,) = [
        one
        for one in onnxruntime_state.get_all_operator_schema()
        if (one.domain, one.name) == ("com.microsoft", "PagedAttention")
    ]
    return found


def test_inputs_are_those_of_the_installed_onnx_runtime(schema: Any) -> None:
    assert tuple(one.name for one in schema.inputs) == split_attention.INPUTS
    outputs = [one.name for one in schema.outputs]
    assert outputs == ["output", "key_cache_out", "value_cache_out"]
    assert schema.since_version == split_attention.MICROSOFT_OPSET


def test_the_documentation_that_the_rewrite_relies_on(schema: Any) -> None:
    """The layout, what -1 means, and which axis a window counts on."""
    inputs = {one.name: " ".join(one.description.split()) for one in schema.inputs}
    for name in ("key_cache", "value_cache"):
        assert "(num_blocks, block_size, kv_num_heads, cache_head_size)" in inputs[name]
        assert "updated in place" in inputs[name]
    assert "A value of -1 skips the cache write" in inputs["slot_mapping"]
    assert "shape (2) or (3)" in inputs["attention_metadata"]
    assert "in CPU memory" in inputs["attention_metadata"]
    attributes = schema.attributes
    assert "Default value is 1" in attributes["is_causal"].description
    assert "Default value is -1 meaning unused" in attributes["local_window_size"].description
    types = {one.type_param_str: list(one.allowed_type_strs) for one in schema.type_constraints}
    assert types["T"] == ["tensor(float16)", "tensor(bfloat16)"]


# --- what is built --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_engine_for_cuda(cuda_engines: CudaEngines, dtype: str) -> None:
    path = cuda_engines.build("llama", dtype=dtype)
    manifest = read_manifest(path)
    assert manifest.target.device == "cuda"
    assert manifest.kv_layout == "split_nhd"
    assert (manifest.dtype, manifest.kv_cache_dtype) == (dtype, dtype)
    assert "kv_cache.1" in {binding.name for binding in manifest.inputs}  # as the spec calls it
    assert {"model.onnx", "model.onnx.data", "copy_blocks.onnx"} <= {
        record.path for record in manifest.files
    }

    model = onnx.load(path / "model.onnx", load_external_data=False)
    onnx.checker.check_model(str(path / "model.onnx"))
    shapes = {
        value.name: [one.dim_param or one.dim_value for one in value.type.tensor_type.shape.dim]
        for value in (*model.graph.input, *model.graph.output)
    }
    for layer in (0, 1):
        for kind in ("key", "value"):
            assert shapes[f"{kind}_cache.{layer}"] == ["N", 16, 2, 16]
            assert shapes[f"{kind}_cache_out.{layer}"] == ["N", 16, 2, 16]
    assert not [name for name in shapes if name.startswith("kv_cache")]
    assert {(one.domain, one.version) for one in model.opset_import} >= {("com.microsoft", 1)}
    assert not model.functions  # nothing of ours is left in the graph


def attention_nodes(path: Path) -> list[dict[str, Any]]:
    """Attributes and inputs of every attention node."""
    model = onnx.load(path / "model.onnx", load_external_data=False)
    return [
        {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
        | {"inputs": list(node.input)}
        for node in model.graph.node
        if (node.domain, node.op_type) == ("com.microsoft", "PagedAttention")
    ]


def test_the_attributes_of_each_layer(cuda_engines: CudaEngines) -> None:
    """Gemma 2 alternates windows of 24 tokens with whole attention."""
    first, second = attention_nodes(cuda_engines.build("gemma2"))
    assert [one["local_window_size"] for one in (first, second)] == [24, -1]
    for one in (first, second):
        assert (one["num_heads"], one["kv_num_heads"]) == (4, 2)
        assert one["softcap"] == 2.0
        assert one["scale"] == 1.0  # query_pre_attn_scalar is 1


def test_bounds_are_an_input_where_flash_attention_fits(cuda_engines: CudaEngines) -> None:
    small = cuda_engines.build("llama")
    large = cuda_engines.build("llama", size=256)  # heads of 16 elements are padded to 64
    for path, given in ((small, False), (large, True)):
        for one in attention_nodes(path):
            assert ("attention_metadata" in one["inputs"]) is given
    assert [flash_block_size(size) for size in (64, 72, 128, 136, 256)] == [256, 128, 128, 64, 64]


MODEL_TYPES = ("llama", "qwen2", "qwen3", "gemma2", "gpt2", "phi3", "mixtral", "gpt_oss")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_only_attention_lacks_a_kernel_on_a_cpu(cuda_engines: CudaEngines, model_type: str) -> None:
    """ONNX Runtime takes types and shapes of every node, and runs all the others even here."""
    path = cuda_engines.build(model_type, size=256)
    with pytest.raises(Exception, match="Could not find an implementation for") as caught:
        onnxruntime.InferenceSession(str(path / "model.onnx"))
    assert "PagedAttention(1)" in str(caught.value)

    model = onnx.load(path / "model.onnx")
    for node in model.graph.node:
        if node.op_type == "PagedAttention":
            del node.attribute[:]
            node.domain, node.op_type = "test", "PassOn"
            node.input[:] = [node.input[0], node.input[3], node.input[4]]
    body = """<domain: "test", opset_import: ["": 21]>
        PassOn (query, keys, values) => (output, keys_out, values_out) {
          output = Identity (query)
          keys_out = Identity (keys)
          values_out = Identity (values)
        }"""
    model.functions.append(onnx.parser.parse_function(body))
    model.opset_import.append(onnx.helper.make_opsetid("test", 1))
    onnxruntime.InferenceSession(model.SerializeToString())


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "size"), [("llama", 16), ("qwen2", 16), ("gemma2", 16), ("gpt_oss", 256)]
)
def test_the_graph_computes_what_pytorch_does(
    cuda_engines: CudaEngines, model_type: str, size: int
) -> None:
    evaluated = Evaluated(cuda_engines.build(model_type, size=size), NUM_BLOCKS)
    oracle = cuda_engines.oracle(model_type, size)
    for parts in steps(size):
        assert_close(evaluated.logits(parts), oracle.run(pack(parts, size)).logits)


def test_a_slot_of_minus_1_writes_nothing(cuda_engines: CudaEngines) -> None:
    evaluated = Evaluated(cuda_engines.build("llama"), NUM_BLOCKS)
    evaluated.logits([(SEQUENCE, 0, 32)])
    before = {name: cache.copy() for name, cache in evaluated.caches.items()}
    step = pack([(OTHER, 0, 3)])
    step.slot_mapping[:] = (-1, 13 * BLOCK_SIZE + 5, -1)
    evaluated.run(step)
    for name, cache in evaluated.caches.items():
        changed = np.argwhere((cache != before[name]).any(axis=(2, 3)))
        assert changed.tolist() == [[13, 5]]


# --- refusals -------------------------------------------------------------------------------------


def refusal(**changes: Any) -> str:
    kind: dict[str, Any] = {"dtype": "float16", "kv_cache_dtype": "float16", "device": "cuda"}
    block_size = changes.pop("block_size", 16)
    with pytest.raises(BuildError) as caught:
        registry.get("onnxruntime").require(EngineKind(**kind | changes), block_size)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dtype": "float32"}, "attends in 16-bit floats on CUDA, not in float32: build with"),
        ({"quantization": "int4", "dtype": "float32"}, "--quantization int4 has no kernels"),
        ({"kv_cache_dtype": "int8", "dtype": "float32"}, "--kv-cache-dtype int8 needs scales"),
        ({"compute_capabilities": ("8.9",)}, "--compute-capability 8.9 is not for the onnxruntime"),
        ({"block_size": 24}, "block_size 24 is not a power of two from 16 on"),
        ({"block_size": 8}, "block_size 8 is not a power of two from 16 on"),
    ],
)
def test_what_cannot_be_built(changes: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(**changes)


@pytest.mark.parametrize(
    ("model_type", "dtype", "size", "sentence"),
    [
        ("deepseek_v3", "float16", 16, "its values have 12 elements a head and its keys 24"),
        ("gpt_oss", "float16", 16, "sinks, which ONNX Runtime runs in cache blocks of 256 tokens"),
        ("gpt_oss", "bfloat16", 256, "no CUDA kernel of TopK in bfloat16 (build with --dtype"),
    ],
)
def test_nodes_that_cannot_be_run_are_named(
    cuda_engines: CudaEngines, model_type: str, dtype: str, size: int, sentence: str
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        cuda_engines.build(model_type, dtype=dtype, size=size)
    message = str(caught.value)
    assert sentence in message
    assert "paged_attention (octavo.paged_attention.default)" in message or "topk (" in message

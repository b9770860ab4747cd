"""Engines that TensorRT-RTX builds here, without a GPU, and what it refuses.

The attention kernel is a fake: Triton takes seconds for what these tests do not look at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from octavo.backends import registry
from octavo.backends.base import EngineKind, LoadOptions, TensorRtOptions
from octavo.backends.bundle import read_manifest, verify_files
from octavo.backends.gpu_attention import AttentionShape
from octavo.backends.manifest import Manifest
from octavo.backends.tensorrt import plugin
from octavo.backends.tensorrt.child import run_builder
from octavo.backends.tensorrt.flavour import TENSORRT_RTX
from octavo.backends.tensorrt.request import EngineReport, EngineRequest
from octavo.backends.tensorrt.step_shapes import ShapeProfile
from octavo.compiler import BuildConfig, build_engine
from octavo.graphs.errors import BackendError, BuildError
from tests.backend import fake_gpu_attention
from tests.parity import tiny_models
from tests.unit.drafter_heads_files import medusa_tensors, write

pytest.importorskip("tensorrt_rtx")

VERSION = TENSORRT_RTX.version
STEP_INPUTS = [
    "token_ids",
    "positions",
    "slot_mapping",
    "block_tables",
    "query_start_loc",
    "prefix_offsets",
    "logits_indices",
]


@pytest.fixture(scope="module", autouse=True)
def _fake_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        fake_gpu_attention.install(patch)
        yield


def build(folder: Path, model_type: str, **options: Any) -> Manifest:
    checkpoint, _ = tiny_models.checkpoint(folder / "checkpoint", model_type)
    config = BuildConfig(
        model=str(checkpoint),
        output=folder / "engine",
        backend="tensorrt_rtx",
        use_cache=False,
        **{"max_model_len": 128, "dtype": "float16", **options},
    )
    return build_engine(config).manifest


# --- what is built --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensorrt")
    build(folder, "llama", compute_capabilities=("8.9", "12.0"))
    return folder / "engine"


def test_the_bundle_is_whole_and_has_nothing_else(llama: Path) -> None:
    manifest = read_manifest(llama)
    verify_files(llama, manifest.files)
    assert [record.path for record in manifest.files] == [
        "generation_config.json",
        "kernels/12.0/0.bin",
        "kernels/8.9/0.bin",
        "model.engine",
    ]
    assert sorted(path.name for path in llama.iterdir()) == [
        "generation_config.json",
        "kernels",
        "manifest.json",
        "model.engine",
    ]


def test_the_manifest_names_library_plugin_and_capabilities(llama: Path) -> None:
    manifest = read_manifest(llama)
    assert manifest.backend == "tensorrt_rtx"
    assert manifest.versions["tensorrt_rtx"] == VERSION
    assert manifest.target.device == "cuda"
    assert manifest.target.compute_capabilities == ("8.9", "12.0")
    assert manifest.kv_layout == "reference"
    data = manifest.backend_data
    assert data["plugin"] == {"name": "octavo::PagedAttention", "version": "1", "layers": 2}
    assert data["compute_capabilities"] == ["8.9", "12.0"]
    assert data["kernels"] == {"8.9": ["kernels/8.9/0.bin"], "12.0": ["kernels/12.0/0.bin"]}


def test_the_manifest_lists_layers_and_bindings(llama: Path) -> None:
    data = read_manifest(llama).backend_data
    assert data["layers"]["PLUGIN_V3"] == 2  # one for each of two layers
    assert data["layers"]["MATRIX_MULTIPLY"] == 15  # seven in each layer, and the logits
    assert sum(data["layers"].values()) == data["num_layers"]
    assert data["inputs"] == [*STEP_INPUTS, "kv_cache.0", "kv_cache.1"]
    assert data["outputs"] == ["logits", "kv_cache_out.0", "kv_cache_out.1"]
    assert data["aliased"] == {"kv_cache_out.0": "kv_cache.0", "kv_cache_out.1": "kv_cache.1"}


def test_every_profile_is_in_the_engine(llama: Path) -> None:
    manifest = read_manifest(llama)
    profiles = {one["name"]: one["shapes"] for one in manifest.backend_data["profiles"]}
    assert list(profiles) == ["decode", "prefill", "mixed", "verify"]
    assert profiles["decode"]["token_ids"] == [[1], [16], [64]]
    assert profiles["prefill"]["token_ids"] == [[1], [512], [1024]]
    assert profiles["decode"]["block_tables"] == [[1, 1], [16, 2], [64, 8]]
    assert profiles["decode"]["query_start_loc"] == [[2], [17], [65]]
    # A step without logits, which the manifest allows, is run with one row.
    assert [p.dims["L"].min for p in manifest.profiles] == [0, 0, 0, 0]
    assert profiles["verify"]["logits_indices"] == [[1], [272], [1024]]
    # 64 sequences of 8 blocks; and 2**31 - 1 elements in blocks of 2 x 2 x 16 x 16 of them.
    assert profiles["mixed"]["kv_cache.0"] == [
        [1, 2, 2, 16, 16],
        [512, 2, 2, 16, 16],
        [2097151, 2, 2, 16, 16],
    ]


def test_the_kernels_are_those_of_the_layers(llama: Path) -> None:
    image = fake_gpu_attention.KernelImage.from_bytes((llama / "kernels/8.9/0.bin").read_bytes())
    assert image.capability == "8.9"
    assert image.shape == AttentionShape(
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        value_head_size=16,
        block_size=16,
        scale=0.25,
        causal=True,
        sliding_window=0,
        softcap=0.0,
        has_sinks=False,
        has_alibi=False,
        dtype="float16",
        cache_dtype="float16",
    )


def test_without_a_choice_all_capabilities_are_built_for(tmp_path: Path) -> None:
    manifest = build(tmp_path, "llama", dtype="auto")
    assert manifest.dtype == "float32"
    assert manifest.target.compute_capabilities == ("8.0", "8.6", "8.9", "12.0")


@pytest.mark.parametrize(
    ("model_type", "options", "num_kernels"),
    [
        ("gpt_oss", {"dtype": "bfloat16"}, 2),  # sinks and experts, a window in every other layer
        ("gemma2", {}, 2),  # capped scores, windows
        ("gpt2", {}, 1),  # LayerNorm and learned positions
        ("deepseek_v3", {}, 1),  # values narrower than keys
    ],
)
def test_other_architectures(
    tmp_path: Path, model_type: str, options: dict[str, Any], num_kernels: int
) -> None:
    manifest = build(tmp_path, model_type, compute_capabilities=("8.9",), **options)
    assert manifest.backend_data["plugin"]["layers"] == len(manifest.spec.layers) == 2
    assert len(manifest.backend_data["kernels"]["8.9"]) == num_kernels


def test_a_cache_of_fp8(tmp_path: Path) -> None:
    manifest = build(tmp_path, "llama", kv_cache_dtype="fp8", compute_capabilities=("8.0", "8.9"))
    assert (manifest.dtype, manifest.kv_cache_dtype) == ("float16", "float8_e4m3fn")
    assert manifest.cache_block_bytes == 2 * 2 * 2 * 16 * 16  # layers, planes, heads, rows, bytes
    (image,) = map(
        fake_gpu_attention.KernelImage.from_bytes,
        (path.read_bytes() for path in tmp_path.glob("engine/kernels/8.9/*")),
    )
    assert (image.shape.dtype, image.shape.cache_dtype) == ("float16", "float8_e4m3fn")


def test_a_drafter_is_an_engine_of_its_own(tmp_path: Path) -> None:
    """Of heads, without attention. There is no acceptance graph: drafts are accepted exactly."""
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    tensors = medusa_tensors(3, vocab_size=tiny_models.VOCAB_SIZE, hidden_size=64)
    heads = write(tmp_path / "heads", config, tensors, "medusa_lm_head.safetensors")
    chosen = [{"method": "medusa", "model": str(heads), "num_speculative_tokens": 3}]
    manifest = build(tmp_path, "llama", compute_capabilities=("8.9",), speculative=chosen)
    assert manifest.accept_file is None
    assert "hidden_states" in manifest.backend_data["outputs"]
    drafter = read_manifest(tmp_path / "engine/drafter/medusa")
    assert drafter.backend_data["inputs"] == ["token_ids", "features"]
    assert drafter.backend_data["kernels"] == {}
    assert drafter.backend_data["plugin"]["layers"] == 0


def test_every_option_is_taken(tmp_path: Path) -> None:
    options = {"builder_optimization_level": 0, "workspace_mib": 64, "weight_streaming": True}
    manifest = build(tmp_path, "llama", compute_capabilities=("8.9",), tensorrt=options)
    assert manifest.backend_data["options"] == options


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"compute_capabilities": ("9.0",)}, "does not build for compute capability 9.0: choose"),
        ({"quantization": "int8", "dtype": "auto"}, "builds weights of floats, not of int8"),
        (
            {"kv_cache_dtype": "int8", "dtype": "auto"},
            r"in float32, .* or in fp8, not in int8: leave",
        ),
        ({"device": "cpu"}, "does not build for the device cpu: choose cuda"),
    ],
)
def test_what_cannot_be_built_is_refused_at_once(
    tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    config = BuildConfig(
        model="nowhere",
        output=tmp_path / "engine",
        backend="tensorrt_rtx",
        **{"dtype": "float16", **options},
    )
    with pytest.raises(BuildError, match=sentence):
        build_engine(config)


def test_tensorrt_itself_builds_where_its_gpu_is() -> None:
    kind = EngineKind(dtype="float16", kv_cache_dtype="float16", device="cuda")
    reason = registry.get("tensorrt").can_build(kind).reason
    assert str(reason).startswith("TensorRT is not installed here (there is no package tensorrt-")


def one_node(folder: Path, op: str, domain: str = "", **attributes: Any) -> EngineRequest:
    """A request to build x -> op -> y, f32 [N], with one profile of 1 to 64."""
    shape = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N"]) for name in ("x", "y")]
    node = helper.make_node(op, ["x"], ["y"], name="the_node", domain=domain, **attributes)
    graph = helper.make_graph([node], "g", shape[:1], shape[1:])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("octavo", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), folder / "m.onnx")
    return EngineRequest(
        flavour="tensorrt_rtx",
        model=folder / "m.onnx",
        engine=folder / "m.engine",
        report=folder / "report.json",
        profiles=(ShapeProfile("decode", {"x": ((1,), (16,), (64,))}),),
        compute_capabilities=("8.9",),
        aliases={},
        num_attention_layers=0,
        options=TensorRtOptions(),
    )


def run(request: EngineRequest) -> EngineReport:
    return run_builder(request, TENSORRT_RTX, request.report.parent)


def test_one_node_builds(tmp_path: Path) -> None:
    report = run(one_node(tmp_path, "Relu"))
    assert (report.layers, report.inputs, report.outputs) == ({"ACTIVATION": 1}, ("x",), ("y",))
    assert (tmp_path / "m.engine").stat().st_size > 0


@pytest.mark.parametrize(
    "bounds", [((1,), (65,), (64,)), ((17,), (16,), (64,)), ((0,), (16,), (64,))]
)
def test_a_shape_outside_its_profile_is_named(tmp_path: Path, bounds: Any) -> None:
    request = replace(one_node(tmp_path, "Relu"), profiles=(ShapeProfile("decode", {"x": bounds}),))
    low, typical, high = (list(bound) for bound in bounds)
    with pytest.raises(BuildError) as raised:
        run(request)
    assert str(raised.value).startswith(
        f"the profile decode has x of {low} at least, {typical} typically and {high} at most"
    )


def test_a_profile_without_an_input_is_refused(tmp_path: Path) -> None:
    request = replace(one_node(tmp_path, "Relu"), profiles=(ShapeProfile("decode", {}),))
    with pytest.raises(BuildError, match=r"the profile decode and the network disagree .* input x"):
        run(request)


def test_an_operator_that_there_is_not_is_named_with_its_node(tmp_path: Path) -> None:
    with pytest.raises(BuildError) as raised:
        run(one_node(tmp_path, "Compress"))
    assert "TensorRT-RTX cannot place the_node (Compress): " in str(raised.value)
    assert str(raised.value).endswith("choose another backend for this model")
    assert not (tmp_path / "m.engine").exists()


def test_a_plugin_that_there_is_not_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"cannot place the_node \(Missing\): .*[Pp]lugin"):
        run(one_node(tmp_path, "Missing", "octavo"))


def test_a_node_of_our_plugin_without_attributes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"cannot place the_node \(PagedAttention\)"):
        run(one_node(tmp_path, plugin.NAME, "octavo"))


def test_a_capability_that_the_library_lacks_is_named(tmp_path: Path) -> None:
    request = replace(one_node(tmp_path, "Relu"), compute_capabilities=("9.0",))
    with pytest.raises(BuildError) as raised:
        run(request)
    assert str(raised.value) == (
        f"TensorRT-RTX {VERSION} does not build for compute capability 9.0: "
        "choose from 7.5, 8.0, 8.6, 8.9, 12.0, 12.1"
    )


def test_a_model_whose_attention_is_no_plugin_is_refused(tmp_path: Path) -> None:
    request = replace(one_node(tmp_path, "Relu"), num_attention_layers=1)
    with pytest.raises(BuildError, match="has 0 plugin layers and the model 1 attention layers"):
        run(request)


def test_a_cache_that_is_no_output_is_refused(tmp_path: Path) -> None:
    request = replace(one_node(tmp_path, "Relu"), aliases={"kv_cache_out.0": "x"})
    with pytest.raises(BuildError, match=r"no output kv_cache_out.0 that shares memory with"):
        run(request)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    request = one_node(tmp_path, "Relu")
    request.model.write_bytes(b"no model at all")
    with pytest.raises(BuildError, match=r"TensorRT-RTX cannot place .* choose another backend"):
        run(request)


# --- the process ----------------------------------------------------------------------------------


def test_a_builder_that_aborts_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As native code does. The compiler goes on."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'octavo.backends.tensorrt.builder' in sys.orig_argv:\n"
        "    print('terminate called', flush=True)\n"
        "    os.abort()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BuildError) as raised:
        run(one_node(tmp_path, "Relu"))
    assert "the TensorRT-RTX builder was ended by SIGABRT after it said: " in str(raised.value)
    assert "terminate called" in str(raised.value)


def test_a_full_disk_is_the_reason_of_the_error(tmp_path: Path) -> None:
    """Who publishes looks for it in the chain of reasons."""
    request = replace(one_node(tmp_path, "Relu"), engine=Path("/dev/full"))
    with pytest.raises(BuildError, match="No space left on device") as raised:
        run(request)
    assert isinstance(raised.value.__cause__, OSError)
    assert raised.value.__cause__.errno == 28


def test_a_library_that_cannot_be_imported_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt_rtx.py").write_text("raise ImportError('libcuda.so.1: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BuildError) as raised:
        run(one_node(tmp_path, "Relu"))
    assert str(raised.value) == (
        "TensorRT-RTX cannot be imported (libcuda.so.1: no such file): install Octavo with its "
        "extra [tensorrt-rtx] again"
    )


def test_a_request_survives_its_file(tmp_path: Path) -> None:
    request = one_node(tmp_path, "Relu")
    request.write(tmp_path / "request.json")
    assert EngineRequest.read(tmp_path / "request.json") == request
    assert json.loads((tmp_path / "request.json").read_text())["flavour"] == "tensorrt_rtx"


# --- the engines of other machines ----------------------------------------------------------------


def test_here_the_engine_is_refused_for_want_of_what_runs_it(llama: Path) -> None:
    backend = registry.get("tensorrt_rtx")
    compatibility = backend.check(read_manifest(llama))
    assert not compatibility.ok
    assert compatibility.reason is not None
    assert compatibility.reason.startswith(("cuda-python, which", "the engine was built for CUDA"))


def test_an_engine_cannot_be_loaded_without_a_gpu(llama: Path) -> None:
    backend = registry.get("tensorrt_rtx")
    backend.import_library()
    with pytest.raises(BackendError, match="no CUDA device is visible here"):
        backend.load(llama, read_manifest(llama), LoadOptions())

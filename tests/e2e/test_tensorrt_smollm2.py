"""SmolLM2 in float16 becomes a TensorRT-RTX engine here, on a machine without a GPU."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from octavo.backends.bundle import read_manifest, verify_files
from octavo.backends.manifest import Manifest
from octavo.backends.tensorrt.flavour import TENSORRT_RTX
from octavo.compiler import BuildConfig, build_engine
from tests.e2e.conftest import SMOLLM2

pytest.importorskip("tensorrt_rtx")
pytest.importorskip("triton")

LAYERS = 30
# Of the model card: 134,515,008 parameters, two bytes each.
WEIGHT_BYTES = 2 * 134_515_008


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    started = time.perf_counter()
    config = BuildConfig(
        model=SMOLLM2,
        output=tmp_path_factory.mktemp("tensorrt") / SMOLLM2,
        backend="tensorrt_rtx",
        dtype="float16",
        compute_capabilities=("8.9", "12.0"),
        use_cache=False,
    )
    result = build_engine(config)
    stages = ", ".join(f"{stage.name} {stage.seconds:.1f}" for stage in result.stages)
    print(f"built in {time.perf_counter() - started:.1f} s ({stages})")
    return result.path


@pytest.fixture(scope="module")
def manifest(engine: Path) -> Manifest:
    return read_manifest(engine)


def test_the_bundle_is_whole(engine: Path, manifest: Manifest) -> None:
    verify_files(engine, manifest.files)
    sizes = {record.path: record.size for record in manifest.files}
    # Tied embeddings are in it twice, as a table and as a matrix; nothing is in float32.
    assert WEIGHT_BYTES < sizes["model.engine"] < 1.5 * WEIGHT_BYTES
    assert {"tokenizer.json", "chat_template.jinja"} < sizes.keys()


def test_the_manifest_lists_plugin_profiles_and_capabilities(manifest: Manifest) -> None:
    data = manifest.backend_data
    assert (manifest.backend, manifest.dtype) == ("tensorrt_rtx", "float16")
    assert manifest.versions["tensorrt_rtx"] == TENSORRT_RTX.version
    assert data["plugin"] == {"name": "octavo::PagedAttention", "version": "1", "layers": LAYERS}
    assert data["compute_capabilities"] == ["8.9", "12.0"]
    assert manifest.target.compute_capabilities == ("8.9", "12.0")
    profiles = {one["name"]: one["shapes"] for one in data["profiles"]}
    assert list(profiles) == ["decode", "prefill", "mixed", "verify"]
    assert profiles["decode"]["block_tables"][2] == [64, 512]  # 8192 tokens in blocks of 16
    assert profiles["prefill"]["token_ids"] == [[1], [512], [1024]]
    assert profiles["verify"]["logits_indices"] == [[1], [272], [1024]]


def test_every_node_was_placed(manifest: Manifest) -> None:
    """As many layers as the model has of a kind: nothing fell out and nothing fell back."""
    layers = manifest.backend_data["layers"]
    assert layers["PLUGIN_V3"] == LAYERS
    assert layers["MATRIX_MULTIPLY"] == 7 * LAYERS + 1  # the last one: the logits
    assert layers["REDUCE"] == 2 * LAYERS + 1  # of the norms


def test_every_cache_is_read_and_written_in_place(manifest: Manifest) -> None:
    aliased = manifest.backend_data["aliased"]
    assert aliased == {f"kv_cache_out.{i}": f"kv_cache.{i}" for i in range(LAYERS)}
    assert set(aliased) < set(manifest.backend_data["outputs"])
    assert set(aliased.values()) < set(manifest.backend_data["inputs"])


def test_all_layers_share_one_kernel_for_each_capability(engine: Path, manifest: Manifest) -> None:
    kernels = manifest.backend_data["kernels"]
    assert kernels == {"8.9": ["kernels/8.9/0.bin"], "12.0": ["kernels/12.0/0.bin"]}
    for files in kernels.values():
        assert (engine / files[0]).stat().st_size > 0

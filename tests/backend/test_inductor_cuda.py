"""AOTInductor for CUDA as far as a CPU goes: it is the device, and attention the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from octavo.backends import cuda_devices, registry
from octavo.backends.base import EngineKind
from octavo.backends.bundle import read_manifest
from octavo.backends.inductor import backend as inductor
from octavo.backends.torch_cuda import executable as torch_cuda
from octavo.compiler import BuildConfig, build_engine
from octavo.graphs.errors import BackendError, BuildError
from tests.backend.steps import Sequence, pack, run_step
from tests.backend.tiny_engines import TinyEngine
from tests.parity import tiny_models

KIND = EngineKind(dtype="bfloat16", kv_cache_dtype="bfloat16", device="cuda")
SEQUENCE = Sequence(np.random.default_rng(0).integers(3, tiny_models.VOCAB_SIZE, 50), [5, 2, 9, 4])
OTHER = Sequence(np.random.default_rng(1).integers(3, tiny_models.VOCAB_SIZE, 37), [1, 13, 6])


@pytest.fixture(scope="module")
def machine() -> Iterator[pytest.MonkeyPatch]:
    """Has a device of compute capability 9.0, which is its CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_devices, "compute_capabilities", lambda: ("9.0",))
        patch.setattr(inductor, "CUDA_DEVICE", "cpu")
        patch.setattr(torch_cuda, "DEVICE", "cpu")
        yield patch


@pytest.fixture(scope="module")
def engine(machine: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> TinyEngine:
    folder = tmp_path_factory.mktemp("inductor-cuda")
    checkpoint, model = tiny_models.checkpoint(folder / "model", "gemma2")
    config = BuildConfig(
        model=str(checkpoint),
        output=folder / "engine",
        backend="inductor",
        device="cuda",
        max_model_len=128,
        use_cache=False,
    )
    return TinyEngine(build_engine(config).path, model, checkpoint)


def test_the_manifest_says_what_it_was_built_for(engine: TinyEngine) -> None:
    manifest = engine.manifest
    assert (manifest.target.device, manifest.target.compute_capabilities) == ("cuda", ("9.0",))
    assert manifest.kv_layout == "reference"
    fused = [record for record in manifest.passes if record.name == "fuse_attention"]
    assert fused[0].matches == 0  # there is no kernel of it for CUDA


def test_logits_equal_transformers_in_every_schedule(engine: TinyEngine) -> None:
    """A prefill, a batch of two, chunks beside decodes, copied blocks, a step without logits."""
    executable = engine.load(num_threads=1)
    wanted = engine.expected(SEQUENCE)
    atol = 1e-5 * float(np.abs(wanted).max())
    (found,) = run_step(executable, [(SEQUENCE, 0, 50)])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)
    executable.copy_blocks([(5, 7), (2, 8), (9, 10), (4, 11)])
    moved = Sequence(SEQUENCE.tokens, [7, 8, 10, 11])
    parts = run_step(executable, [(OTHER, 0, 30), (moved, 45, 50)])
    np.testing.assert_allclose(parts[1], wanted[45:], rtol=0, atol=atol)
    nothing = dataclasses.replace(pack([(OTHER, 30, 36)]), logits_indices=np.zeros(0, np.int32))
    assert executable.run(nothing).logits.shape == (0, tiny_models.VOCAB_SIZE)
    (last,) = run_step(executable, [(OTHER, 36, 37)])
    np.testing.assert_allclose(last, engine.expected(OTHER)[36:], rtol=0, atol=atol)
    executable.close()
    with pytest.raises(BackendError, match="the engine is closed or has no cache"):
        executable.run(nothing)


def test_another_device_is_refused(engine: TinyEngine, machine: pytest.MonkeyPatch) -> None:
    manifest = read_manifest(engine.path)
    backend = registry.get("inductor")
    assert backend.check(manifest).ok
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_devices, "compute_capabilities", lambda: ("8.9",))
        said = backend.check(manifest).reason
        assert said == (
            "the engine was built for a device of compute capability 9.0, this machine's has 8.9: "
            "build it again here"
        )
        asked = dataclasses.replace(KIND, compute_capabilities=("9.0",))
        assert "9.0 is not that of this machine's device, 8.9" in str(
            backend.can_build(asked).reason
        )
        patch.setattr(cuda_devices, "compute_capabilities", lambda: ())
        assert "no CUDA device is visible here" in str(backend.check(manifest).reason)
        assert "no CUDA device is visible here" in str(backend.can_build(KIND).reason)


@pytest.mark.parametrize(("quantization", "cache"), [("int8", "float32"), ("none", "int8")])
def test_integers_are_for_cpus(quantization: Any, cache: Any) -> None:
    asked = EngineKind(
        dtype="float32", kv_cache_dtype=cache, quantization=quantization, device="cuda"
    )
    with pytest.raises(BuildError, match="has kernels of integers for CPUs alone"):
        registry.get("inductor").require(asked, 16)
    registry.get("inductor").require(KIND, 16)


def test_what_is_missing(machine: pytest.MonkeyPatch, engine: TinyEngine) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor, "version_of", lambda name: None if name == "triton" else "2.13.0")
        assert "triton, which the attention kernel on CUDA is launched by, is not" in str(
            registry.get("inductor").check(engine.manifest).reason
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", "a-compiler-of-tomorrow")
        assert "a-compiler-of-tomorrow, which the graph is compiled with, is not" in str(
            registry.get("inductor").can_build(KIND).reason
        )

"""What the TensorRT backends say of a machine, before anything of theirs is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from octavo.backends import cuda_devices
from octavo.backends.base import EngineKind
from octavo.backends.manifest import Manifest, Target
from octavo.backends.tensorrt import backend as backend_module
from octavo.backends.tensorrt.backend import TensorRtBackend
from octavo.backends.tensorrt.flavour import TENSORRT, TENSORRT_RTX, Flavour
from octavo.compiler.profiles import make_profiles
from octavo.graphs.errors import BuildError
from tests.backend import fake_cuda
from tests.backend.test_tensorrt_executable import LIMITS, SPEC

KIND = EngineKind(dtype="float16", kv_cache_dtype="float16", device="cuda")


def manifest(**changes: object) -> Manifest:
    return Manifest(
        backend="tensorrt_rtx",
        spec=SPEC,
        limits=LIMITS,
        dtype="float32",
        kv_cache_dtype="float32",
        inputs=(),
        outputs=(),
        profiles=make_profiles(LIMITS),
        target=Target(architecture="any", device="cuda", compute_capabilities=("8.0", "8.9")),
        versions={"tensorrt_rtx": "1.7.1.116"},
    ).model_copy(update=changes)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine that runs everything: tests take one thing away."""
    monkeypatch.setattr(Flavour, "version", "1.7.1.116")
    monkeypatch.setattr(backend_module, "_has_cuda_python", lambda: True)
    monkeypatch.setattr(cuda_devices, "compute_capabilities", lambda: ("8.9", "7.5"))
    return monkeypatch


def reason(given: Manifest | None = None) -> str | None:
    return TensorRtBackend(TENSORRT_RTX).check(given or manifest()).reason


def test_a_machine_that_has_everything(machine: pytest.MonkeyPatch) -> None:
    assert reason() is None


def test_a_library_that_is_missing(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(Flavour, "version", None)
    assert reason() == (
        "TensorRT-RTX is not installed here (there is no package tensorrt-rtx-cu13): install "
        "Octavo with its extra [tensorrt-rtx]"
    )


def test_a_library_of_another_version(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(Flavour, "version", "1.8.0.5")
    assert reason() == (
        "the engine was built with TensorRT-RTX 1.7.1.116 and this is 1.8.0.5, which cannot read "
        "it: install TensorRT-RTX 1.7.1.116 or build the engine again"
    )


def test_cuda_python_that_is_missing(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(backend_module, "_has_cuda_python", lambda: False)
    said = reason()
    assert said is not None
    assert said.startswith("cuda-python, which engines on a GPU are run with, is not installed")


def test_a_machine_without_a_gpu(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(cuda_devices, "compute_capabilities", lambda: ())
    said = reason()
    assert said is not None
    assert said.startswith("no CUDA device is visible here")


def test_a_gpu_that_was_not_built_for(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(cuda_devices, "compute_capabilities", lambda: ("12.0", "8.9"))
    assert reason() == (
        "the engine was built for compute capability 8.0, 8.9 and this GPU has 12.0: build it "
        "again with --compute-capability 12.0"
    )


def test_another_processor(machine: pytest.MonkeyPatch) -> None:
    other = Target(architecture="vax", device="cuda", compute_capabilities=("8.9",))
    said = reason(manifest(target=other))
    assert said is not None
    assert said.startswith("the engine was built for vax, this machine is ")


def test_cuda_python_is_looked_for_and_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [])
    assert backend_module._has_cuda_python() is False
    monkeypatch.undo()
    fake_cuda.install(monkeypatch)
    assert backend_module._has_cuda_python() is True


def test_nothing_heavy_is_imported_to_check_an_engine() -> None:
    code = """
import sys
from octavo.backends import registry
for name in ("tensorrt", "tensorrt_rtx"):
    registry.get(name).check
    registry.get(name).operators(None)
heavy = {"torch", "tensorrt", "tensorrt_rtx", "triton", "onnx", "onnx_ir", "cuda", "numpy.ma"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


# --- what is built for ----------------------------------------------------------------------------


def test_tensorrt_builds_for_the_gpu_it_runs_on(machine: pytest.MonkeyPatch) -> None:
    backend = TensorRtBackend(TENSORRT)
    assert backend._capabilities(KIND) == ("8.9",)
    asked = EngineKind(**{**vars(KIND), "compute_capabilities": ("8.0",)})
    with pytest.raises(BuildError, match=r"of compute capability 8\.9, and not for 8\.0: leave"):
        backend._capabilities(asked)
    machine.setattr(cuda_devices, "compute_capabilities", lambda: ())
    with pytest.raises(BuildError, match="builds on the GPU that is to run the engine"):
        backend._capabilities(KIND)


def test_a_machine_without_triton_cannot_build(machine: pytest.MonkeyPatch) -> None:
    machine.setattr("importlib.util.find_spec", lambda _: None)
    reason = TensorRtBackend(TENSORRT_RTX).can_build(KIND).reason
    assert str(reason).startswith("Triton, which compiles the attention kernel, is not installed")

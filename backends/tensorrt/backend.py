"""What TensorRT and TensorRT-RTX build, and where their engines run. Imports nothing heavy."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.backends import cuda_devices, host
from octavo.backends.base import (
    BuildOptions,
    BuiltFiles,
    Compatibility,
    EngineKind,
    LoadOptions,
    Report,
    Tested,
)
from octavo.backends.tensorrt.flavour import (
    DEFAULT_RTX_CAPABILITIES,
    RTX_CAPABILITIES,
    Flavour,
)
from octavo.graphs.errors import BuildError
from octavo.graphs.ops.paged_attention import SCHEMA as PAGED_ATTENTION

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from octavo.backends.manifest import Manifest
    from octavo.backends.tensorrt.executable import TensorRtExecutable
    from octavo.graphs.program import CapturedProgram
    from octavo.graphs.spec import Device

_FP8 = "float8_e4m3fn"


class TensorRtBackend:
    devices: tuple[Device, ...] = ("cuda",)

    def __init__(self, flavour: Flavour) -> None:
        self._flavour = flavour
        self.name = flavour.name
        self.libraries = flavour.distributions
        self.tested: Mapping[Device, Tested] = {"cuda": flavour.tested}

    def operators(self, kind: EngineKind) -> frozenset[str]:
        return frozenset({PAGED_ATTENTION.name})

    def require(self, kind: EngineKind, block_size: int) -> None:
        if kind.quantization != "none":
            raise BuildError(
                f"the {self.name} backend builds weights of floats, not of {kind.quantization}: "
                "leave --quantization out, or build for another backend"
            )
        if kind.kv_cache_dtype not in (kind.dtype, _FP8):
            raise BuildError(
                f"the {self.name} backend keeps the cache in {kind.dtype}, as the weights, or in "
                f"fp8, not in {kind.kv_cache_dtype}: leave --kv-cache-dtype out"
            )
        for capability in kind.compute_capabilities:
            if self._flavour.sets_capabilities and capability not in RTX_CAPABILITIES:
                raise BuildError(
                    f"{self._flavour.title} does not build for compute capability {capability}: "
                    f"choose from {', '.join(RTX_CAPABILITIES)}"
                )

    def can_build(self, kind: EngineKind) -> Compatibility:
        if self._flavour.version is None:
            return Compatibility(self._flavour.missing)
        if importlib.util.find_spec("triton") is None:
            return Compatibility(
                "Triton, which compiles the attention kernel, is not installed here: "
                f"install Octavo with its extra [{self._flavour.extra}]"
            )
        try:
            self._capabilities(kind)
        except BuildError as error:
            return Compatibility(str(error))
        return Compatibility()

    def can_run(self, device: Device) -> Compatibility:
        if self._flavour.version is None:
            return Compatibility(self._flavour.missing)
        if not _has_cuda_python():
            return Compatibility(
                "cuda-python, which engines on a GPU are run with, is not installed here: "
                f"install Octavo with its extra [{self._flavour.extra}]"
            )
        return cuda_devices.check_device()

    def _capabilities(self, kind: EngineKind) -> tuple[str, ...]:
        """Those to build for; BuildError where they cannot be built for on this machine."""
        flavour, asked = self._flavour, kind.compute_capabilities
        if flavour.sets_capabilities:
            return tuple(dict.fromkeys(asked)) or DEFAULT_RTX_CAPABILITIES
        here = cuda_devices.compute_capabilities()[:1]
        if not here:
            raise BuildError(
                f"{flavour.title} builds on the GPU that is to run the engine, and there is none "
                "here: build on a machine with one, or with --backend tensorrt_rtx"
            )
        if asked and asked != here:
            raise BuildError(
                f"{flavour.title} builds for the GPU it runs on, of compute capability {here[0]}, "
                f"and not for {', '.join(asked)}: leave --compute-capability out, or build with "
                "--backend tensorrt_rtx"
            )
        return here

    def supports(self, program: CapturedProgram) -> Report:
        """Names the nodes without ONNX lowering; `build` names those that TensorRT refuses."""
        from octavo.backends.onnx_lowering import supports

        return supports(program)

    def build(self, program: CapturedProgram, options: BuildOptions, staging: Path) -> BuiltFiles:
        from octavo.backends.tensorrt import engine_build

        capabilities = self._capabilities(options)
        return engine_build.build(self._flavour, program, options, capabilities, staging)

    def build_accept(self, exported: ExportedProgram, staging: Path) -> None:
        """There is no acceptance graph: TensorRT has no operator for it."""

    def check(self, manifest: Manifest) -> Compatibility:
        flavour = self._flavour
        installed, built = flavour.version, manifest.versions.get(flavour.module, "unknown")
        if installed is None:
            return Compatibility(flavour.missing)
        if installed != built:
            return Compatibility(
                f"the engine was built with {flavour.title} {built} and this is {installed}, which "
                f"cannot read it: install {flavour.title} {built} or build the engine again"
            )
        for compatibility in (self.can_run("cuda"), host.check_target(manifest.target)):
            if not compatibility.ok:
                return compatibility
        return _check_capability(manifest)

    def import_library(self) -> None:
        importlib.import_module("octavo.backends.tensorrt.executable")
        self._flavour.load()

    def load(self, bundle: Path, manifest: Manifest, options: LoadOptions) -> TensorRtExecutable:
        from octavo.backends.tensorrt.executable import TensorRtExecutable

        return TensorRtExecutable.load(bundle, manifest, self._flavour)


def _has_cuda_python() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings.runtime") is not None
    except ModuleNotFoundError:
        return False


def _check_capability(manifest: Manifest) -> Compatibility:
    here = cuda_devices.compute_capabilities()[0]
    built = manifest.target.compute_capabilities
    if here not in built:
        return Compatibility(
            f"the engine was built for compute capability {', '.join(built)} and this GPU has "
            f"{here}: build it again with --compute-capability {here}"
        )
    return Compatibility()

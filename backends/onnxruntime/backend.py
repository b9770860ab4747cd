"""Building and checking ONNX Runtime engines. Loading one needs neither torch nor onnx."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.backends import host
from octavo.backends.base import (
    BuildOptions,
    BuiltFiles,
    Compatibility,
    EngineKind,
    LoadOptions,
    Report,
    Tested,
)
from octavo.backends.libraries import version_of
from octavo.backends.onnxruntime.device_cpu import CpuSupport
from octavo.backends.onnxruntime.device_cuda import CudaSupport
from octavo.backends.onnxruntime.files import ACCEPT_FILE, MODEL_FILE, weights_file
from octavo.graphs.errors import BackendError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from octavo.backends.manifest import Manifest
    from octavo.backends.onnxruntime.device import DeviceSupport
    from octavo.backends.onnxruntime.executable import OnnxRuntimeExecutable
    from octavo.graphs.program import CapturedProgram
    from octavo.graphs.spec import Device

# Aligned weights can be mapped; a page is enough for every processor.
_WEIGHT_ALIGNMENT = 4096

_DEVICES: dict[Device, DeviceSupport] = {"cpu": CpuSupport(), "cuda": CudaSupport()}


class OnnxRuntimeBackend:
    name = "onnxruntime"
    devices: tuple[Device, ...] = tuple(_DEVICES)
    libraries = ("onnxruntime", "onnxruntime-gpu")
    tested: Mapping[Device, Tested] = {"cpu": "run", "cuda": "simulated"}

    def operators(self, kind: EngineKind) -> frozenset[str]:
        return _DEVICES[kind.device].operators()

    def require(self, kind: EngineKind, block_size: int) -> None:
        _DEVICES[kind.device].require(kind, block_size)

    def can_build(self, kind: EngineKind) -> Compatibility:
        if version_of("onnx-ir") is None:
            return Compatibility("onnx-ir is not installed: install Octavo with its extra [build]")
        return Compatibility()

    def can_run(self, device: Device) -> Compatibility:
        return _DEVICES[device].check()

    def supports(self, program: CapturedProgram) -> Report:
        """Names the nodes without ONNX lowering, and attention that its kernel cannot run."""
        from octavo.backends.onnx_lowering import supports
        from octavo.backends.onnxruntime.attention_support import device_of

        attention = _DEVICES[device_of(program)].supports(program)
        return Report(supports(program).unsupported + attention.unsupported)

    def build(self, program: CapturedProgram, options: BuildOptions, staging: Path) -> BuiltFiles:
        """Writes `model.onnx` and its weights, and what else the device needs."""
        import onnx_ir as ir

        from octavo.backends.manifest import Target

        device = _DEVICES[options.device]
        files: list[str] = []
        for name, model in device.lower(program, options).items():
            weights = weights_file(name) if model.graph.initializers else None
            ir.save(model, staging / name, external_data=weights, alignment=_WEIGHT_ALIGNMENT)
            files += [name, *([weights] if weights else [])]
        return BuiltFiles(
            files=tuple(files),
            target=Target(architecture=device.architecture(), device=options.device),
            kv_layout=device.kv_layout,
            versions={"onnx_ir": version_of("onnx-ir") or "unknown"},
            backend_data={"model": MODEL_FILE},
        )

    def build_accept(self, exported: ExportedProgram, staging: Path) -> str:
        """Writes `accept.onnx`, whose one node has a kernel here and a body elsewhere."""
        import onnx_ir as ir

        from octavo.backends.onnx_lowering import accept_to_onnx

        ir.save(accept_to_onnx(exported), staging / ACCEPT_FILE)
        return ACCEPT_FILE

    def check(self, manifest: Manifest) -> Compatibility:
        compatibility = self.can_run(manifest.target.device)
        return host.check_target(manifest.target) if compatibility.ok else compatibility

    def import_library(self) -> None:
        importlib.import_module("octavo.backends.onnxruntime.executable")

    def load(self, bundle: Path, manifest: Manifest, options: LoadOptions) -> OnnxRuntimeExecutable:
        model = bundle / str(manifest.backend_data.get("model", MODEL_FILE))
        if not model.is_file():
            raise BackendError(f"{model} is missing: copy or build the engine again")
        return _DEVICES[manifest.target.device].load(model, manifest, options)

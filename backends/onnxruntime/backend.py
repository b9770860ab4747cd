"""Building and checking ONNX Runtime engines. Loading one needs neither torch nor onnx."""

from __future__ import annotations

import importlib
import importlib.metadata
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
)
from octavo.backends.kernels import supported
from octavo.graphs.errors import BackendError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from octavo.backends.manifest import Manifest
    from octavo.backends.onnxruntime.executable import OnnxRuntimeExecutable
    from octavo.graphs.program import CapturedProgram
    from octavo.graphs.spec import Device

MODEL_FILE = "model.onnx"
WEIGHTS_FILE = "model.onnx.data"
ACCEPT_FILE = "accept.onnx"
# Aligned weights can be mapped; a page is enough for every processor.
_WEIGHT_ALIGNMENT = 4096
# The first release whose custom-op interface has what the native kernels call.
_MINIMUM_VERSION = (1, 31)


class OnnxRuntimeBackend:
    name = "onnxruntime"
    devices: tuple[Device, ...] = ("cpu",)

    def operators(self, kind: EngineKind) -> frozenset[str]:
        return supported.OPERATORS

    def require(self, kind: EngineKind, block_size: int) -> None:
        supported.require(self.name, kind, block_size)

    def supports(self, program: CapturedProgram) -> Report:
        """Names the nodes without ONNX lowering."""
        from octavo.backends.onnx_lowering import supports

        return supports(program)

    def build(self, program: CapturedProgram, options: BuildOptions, staging: Path) -> BuiltFiles:
        """Writes `model.onnx` and its weights; the cache keeps a block's keys transposed."""
        import onnx_ir as ir

        from octavo.backends.manifest import Target
        from octavo.backends.onnx_lowering import Layouts, to_onnx

        model = to_onnx(program, Layouts(k_transposed=True, packed_linear=True))
        ir.save(
            model,
            staging / MODEL_FILE,
            external_data=WEIGHTS_FILE,
            alignment=_WEIGHT_ALIGNMENT,
        )
        files = [name for name in (MODEL_FILE, WEIGHTS_FILE) if (staging / name).exists()]
        return BuiltFiles(
            files=tuple(files),
            target=Target(architecture=host.architecture()),
            kv_layout="k_transposed",
            versions={"onnx_ir": importlib.metadata.version("onnx-ir")},
            backend_data={"model": MODEL_FILE},
        )

    def build_accept(self, exported: ExportedProgram, staging: Path) -> str:
        """Writes `accept.onnx`, whose one node has a kernel here and a body elsewhere."""
        import onnx_ir as ir

        from octavo.backends.onnx_lowering import accept_to_onnx

        ir.save(accept_to_onnx(exported), staging / ACCEPT_FILE)
        return ACCEPT_FILE

    def check(self, manifest: Manifest) -> Compatibility:
        try:
            version = importlib.metadata.version("onnxruntime")
        except importlib.metadata.PackageNotFoundError:
            return Compatibility(
                "onnxruntime is not installed: install Octavo with its extra [cpu]"
            )
        if tuple(int(part) for part in version.split(".")[:2]) < _MINIMUM_VERSION:
            needed = ".".join(map(str, _MINIMUM_VERSION))
            return Compatibility(
                f"onnxruntime {version} is older than {needed}, which the kernels need: upgrade it"
            )
        return host.check_target(manifest.target)

    def import_library(self) -> None:
        importlib.import_module("octavo.backends.onnxruntime.executable")

    def load(self, bundle: Path, manifest: Manifest, options: LoadOptions) -> OnnxRuntimeExecutable:
        from octavo.backends.onnxruntime.executable import OnnxRuntimeExecutable

        model = bundle / str(manifest.backend_data.get("model", MODEL_FILE))
        if not model.is_file():
            raise BackendError(f"{model} is missing: copy or build the engine again")
        return OnnxRuntimeExecutable(model, manifest, options)

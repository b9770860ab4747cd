"""ONNX Runtime on a CPU: Octavo's own kernels, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.backends import host
from octavo.backends.base import Compatibility, EngineKind, LoadOptions, Report
from octavo.backends.kernels import supported
from octavo.backends.onnxruntime.device import check_release
from octavo.backends.onnxruntime.files import MODEL_FILE

if TYPE_CHECKING:
    import onnx_ir as ir

    from octavo.backends.base import BuildOptions
    from octavo.backends.manifest import KvLayout, Manifest
    from octavo.backends.onnxruntime.executable import OnnxRuntimeExecutable
    from octavo.graphs.program import CapturedProgram

# The first release whose custom-op interface has what the native kernels call.
_MINIMUM_VERSION = (1, 31)


class CpuSupport:
    kv_layout: KvLayout = "k_transposed"

    def architecture(self) -> str:
        return host.architecture()

    def operators(self) -> frozenset[str]:
        return supported.OPERATORS

    def require(self, kind: EngineKind, block_size: int) -> None:
        supported.require("onnxruntime", kind, block_size)

    def supports(self, program: CapturedProgram) -> Report:
        """The kernels run attention of every kind."""
        return Report()

    def lower(self, program: CapturedProgram, options: BuildOptions) -> Mapping[str, ir.Model]:
        """The cache keeps a block's keys transposed."""
        from octavo.backends.onnx_lowering import Layouts, to_onnx

        return {MODEL_FILE: to_onnx(program, Layouts(k_transposed=True, packed_linear=True))}

    def check(self) -> Compatibility:
        return check_release(("onnxruntime", "onnxruntime-gpu"), _MINIMUM_VERSION, "cpu")

    def load(self, model: Path, manifest: Manifest, options: LoadOptions) -> OnnxRuntimeExecutable:
        from octavo.backends.onnxruntime.executable_cpu import CpuExecutable

        return CpuExecutable(model, manifest, options)

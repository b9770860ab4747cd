"""ONNX Runtime on a CPU: Octavo's own kernels, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.backends import host
from octavo.backends.base import Compatibility, EngineKind, LoadOptions, Report
from octavo.backends.onnxruntime.device import check_release
from octavo.backends.onnxruntime.files import MODEL_FILE
from octavo.graphs.errors import BuildError
from octavo.graphs.ops.activation import ACTIVATE, ACTIVATE_QUANTIZE
from octavo.graphs.ops.fused_paged_attention import INT8_SCHEMA as FUSED_ATTENTION_INT8
from octavo.graphs.ops.fused_paged_attention import SCHEMA as FUSED_ATTENTION
from octavo.graphs.ops.linear import LINEAR_RESIDUAL
from octavo.graphs.ops.norm import NORM, NORM_QUANTIZE
from octavo.graphs.ops.quantization import SCHEMA as QUANTIZE
from octavo.graphs.ops.quantized_linear import SCHEMA as QUANTIZED_LINEAR

if TYPE_CHECKING:
    import onnx_ir as ir

    from octavo.backends.base import BuildOptions
    from octavo.backends.manifest import KvLayout, Manifest
    from octavo.backends.onnxruntime.executable import OnnxRuntimeExecutable
    from octavo.graphs.program import CapturedProgram

# The kernels keep a block's keys in columns of 16.
_BLOCK_SIZE_MULTIPLE = 16
# The first release whose custom-op interface has what the native kernels call.
_MINIMUM_VERSION = (1, 31)

_OPERATORS = frozenset(
    schema.name
    for schema in (
        ACTIVATE,
        ACTIVATE_QUANTIZE,
        FUSED_ATTENTION,
        FUSED_ATTENTION_INT8,
        LINEAR_RESIDUAL,
        NORM,
        NORM_QUANTIZE,
        QUANTIZE,
        QUANTIZED_LINEAR,
    )
)


class CpuSupport:
    kv_layout: KvLayout = "k_transposed"

    def architecture(self) -> str:
        return host.architecture()

    def operators(self) -> frozenset[str]:
        return _OPERATORS

    def require(self, kind: EngineKind, block_size: int) -> None:
        if kind.dtype != "float32":
            raise BuildError(
                f"the onnxruntime backend computes in float32 on a CPU, not in {kind.dtype}: "
                "build with --dtype float32"
            )
        if block_size % _BLOCK_SIZE_MULTIPLE:
            raise BuildError(
                f"block_size {block_size} is not a multiple of "
                f"{_BLOCK_SIZE_MULTIPLE}, which the attention kernel needs: build with "
                f"--block-size {_BLOCK_SIZE_MULTIPLE}"
            )

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

"""ONNX Runtime on CUDA: its own paged attention, in 16-bit floats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.backends import cuda_devices, host
from octavo.backends.base import Compatibility, EngineKind, LoadOptions, Report
from octavo.backends.onnxruntime.device import check_release
from octavo.backends.onnxruntime.files import COPY_BLOCKS_FILE, MODEL_FILE
from octavo.backends.onnxruntime.split_layout import SMALLEST_BLOCK_SIZE
from octavo.graphs.errors import BuildError
from octavo.graphs.ops.paged_attention import SCHEMA as PAGED_ATTENTION

if TYPE_CHECKING:
    import onnx_ir as ir

    from octavo.backends.base import BuildOptions
    from octavo.backends.manifest import KvLayout, Manifest
    from octavo.backends.onnxruntime.executable import OnnxRuntimeExecutable
    from octavo.graphs.program import CapturedProgram

# The first release whose `com.microsoft::PagedAttention` is known to have every input that is used.
_MINIMUM_VERSION = (1, 32)


class CudaSupport:
    kv_layout: KvLayout = "split_nhd"

    def architecture(self) -> str:
        return "any"  # no file holds code of a processor

    def operators(self) -> frozenset[str]:
        return frozenset({PAGED_ATTENTION.name})

    def require(self, kind: EngineKind, block_size: int) -> None:
        if kind.quantization != "none":
            raise BuildError(
                f"--quantization {kind.quantization} has no kernels of the onnxruntime backend on "
                "CUDA: leave it out, or build with --device cpu"
            )
        host.refuse_fp8("onnxruntime", kind)
        if kind.kv_cache_dtype == "int8":
            raise BuildError(
                "--kv-cache-dtype int8 needs scales that ONNX Runtime's paged attention on CUDA "
                "cannot keep for each token: leave it out, or build with --device cpu"
            )
        if kind.dtype == "float32":
            raise BuildError(
                "the onnxruntime backend attends in 16-bit floats on CUDA, not in float32: build "
                "with --dtype float16 or --dtype bfloat16"
            )
        if kind.compute_capabilities:
            raise BuildError(
                f"--compute-capability {kind.compute_capabilities[0]} is not for the onnxruntime "
                "backend, whose kernels for all devices are in ONNX Runtime itself: leave it out"
            )
        if block_size < SMALLEST_BLOCK_SIZE or block_size & (block_size - 1):
            raise BuildError(
                f"block_size {block_size} is not a power of two from {SMALLEST_BLOCK_SIZE} on, "
                "which ONNX Runtime's paged attention needs: build with --block-size 16, 32, 64, "
                "128 or 256"
            )

    def supports(self, program: CapturedProgram) -> Report:
        from octavo.backends.onnxruntime.attention_support import unsupported_attention
        from octavo.backends.onnxruntime.bfloat16_support import unsupported_in_bfloat16

        return Report((*unsupported_attention(program), *unsupported_in_bfloat16(program)))

    def lower(self, program: CapturedProgram, options: BuildOptions) -> Mapping[str, ir.Model]:
        """The model, and the graph that copies cache blocks on the device."""
        from octavo.backends.onnx_lowering import Layouts, to_onnx
        from octavo.backends.onnxruntime.block_copies import block_copies
        from octavo.backends.onnxruntime.split_attention import split_attention

        model = to_onnx(program, Layouts())
        if not program.spec.layers:
            return {MODEL_FILE: model}
        split_attention(model, program.spec, options.limits.block_size)
        copies = block_copies(program.spec, options.limits.block_size, options.dtype)
        return {MODEL_FILE: model, COPY_BLOCKS_FILE: copies}

    def check(self) -> Compatibility:
        release = check_release(("onnxruntime-gpu",), _MINIMUM_VERSION, "cuda")
        return cuda_devices.check_device() if release.ok else release

    def load(self, model: Path, manifest: Manifest, options: LoadOptions) -> OnnxRuntimeExecutable:
        from octavo.backends.onnxruntime.executable_cuda import CudaExecutable

        return CudaExecutable(model, manifest, options)

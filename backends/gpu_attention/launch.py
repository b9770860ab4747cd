"""Compiled kernels launched through the CUDA driver alone (`cuda.bindings.driver` of cuda-python).

Neither Triton nor torch is needed where engines run. Nothing here reads device memory or waits for
the device, so a launch can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass
from typing import Any

from octavo.backends.gpu_attention import configuration
from octavo.backends.gpu_attention.configuration import ALIGNED_ARGUMENTS, ALIGNMENT, Grid
from octavo.backends.gpu_attention.image import CompiledKernel, KernelImage
from octavo.graphs.errors import BackendError, IncompatibleEngineError

_WARP_SIZE = 32
# What a thread block may have without being asked for first.
_PLAIN_SHARED_BYTES = 48 * 1024


@dataclass(frozen=True)
class AttentionPointers:
    """Device addresses of the operator's tensors, all contiguous; those of floats 16-byte aligned.

    Sinks and slopes may be 0 where the shape has none.
    """

    query: int  # T [T, H, Dk]
    key: int  # T [T, Hkv, Dk]
    value: int  # T [T, Hkv, Dv]
    kv_cache: int  # [N, 2, Hkv, block_size, max(Dk, Dv)], changed in place
    slot_mapping: int  # i32 [T]
    block_tables: int  # i32 [B, M]
    query_start_loc: int  # i32 [B+1]
    prefix_offsets: int  # i32 [B]
    sinks: int  # f32 [H]
    alibi_slopes: int  # f32 [H]
    output: int  # T [T, H, Dv]


class LoadedAttention:
    """The kernels of an image in the CUDA context that is current when this is made.

    Raises BackendError where the driver's bindings or a context are missing or a call fails, and
    IncompatibleEngineError for a device that the image was not compiled for. Not thread-safe.
    """

    def __init__(self, image: KernelImage) -> None:
        self._driver = _bindings()
        self._image = image
        _require_device(self._driver, image)
        self._modules: list[Any] = []
        try:
            self._write = self._function(image.write_kv_cache)
            self._attend = self._function(image.attend)
        except BackendError:
            self.close()
            raise

    def launch(
        self,
        pointers: AttentionPointers,
        num_tokens: int,
        num_seqs: int,
        max_blocks: int,
        stream: int,
    ) -> None:
        """Enqueues both kernels on a stream (its handle; 0 is the default one) and returns.

        The sizes T, B and M of the tensors; what lies in them is never looked at here.
        """
        _require_pointers(pointers, self._image)
        values = {**vars(pointers), "num_seqs": num_seqs, "max_blocks": max_blocks}
        image = self._image
        if num_tokens == 0:
            return
        grid = configuration.write_grid(image.shape, num_tokens)
        self._enqueue(self._write, image.write_kv_cache, grid, values, stream)
        if num_seqs == 0:
            return
        grid = configuration.attend_grid(image.shape, image.tile, num_tokens, num_seqs)
        self._enqueue(self._attend, image.attend, grid, values, stream)

    def close(self) -> None:
        """Unloads the code; harmless when called twice. No launch may be running."""
        while self._modules:
            _call(self._driver, "cuModuleUnload", self._modules.pop())

    def _function(self, kernel: CompiledKernel) -> Any:
        module = _call(self._driver, "cuModuleLoadData", kernel.cubin)
        self._modules.append(module)
        function = _call(self._driver, "cuModuleGetFunction", module, kernel.name.encode())
        if kernel.shared_bytes > _PLAIN_SHARED_BYTES:
            attributes = self._driver.CUfunction_attribute
            _call(
                self._driver,
                "cuFuncSetAttribute",
                function,
                attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                kernel.shared_bytes,
            )
        return function

    def _enqueue(
        self,
        function: Any,
        kernel: CompiledKernel,
        grid: Grid,
        values: dict[str, int],
        stream: int,
    ) -> None:
        block = (kernel.num_warps * _WARP_SIZE, 1, 1)
        _call(
            self._driver,
            "cuLaunchKernel",
            function,
            *grid,
            *block,
            kernel.shared_bytes,
            stream,
            packed_arguments(kernel, values),
            0,
        )


def packed_arguments(
    kernel: CompiledKernel, values: dict[str, int]
) -> tuple[tuple[int, ...], tuple[type[Any], ...]]:
    """Values and C types in the function's order, as cuda-python takes them.

    Triton's functions end in pointers to scratch memory, which these kernels do not use: null.
    """
    given = tuple(values[name] for name in kernel.arguments)
    types = tuple(
        ctypes.c_int32 if name in ("num_seqs", "max_blocks") else ctypes.c_void_p
        for name in kernel.arguments
    )
    scratch = kernel.scratch_pointers
    return given + (0,) * scratch, types + (ctypes.c_void_p,) * scratch


def _bindings() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise BackendError(
            f"launching attention kernels needs cuda-python, which cannot be imported ({error}): "
            "install cuda-python"
        ) from error


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    """A driver function's result; BackendError with the driver's name of what went wrong."""
    status, *results = getattr(driver, name)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise BackendError(
            f"the CUDA driver's {name} failed with {getattr(status, 'name', status)}: see the "
            "driver's documentation of this error, and that the engine fits the device's memory"
        )
    return results[0] if results else None


def _require_device(driver: Any, image: KernelImage) -> None:
    _call(driver, "cuInit", 0)
    if not int(_call(driver, "cuCtxGetCurrent")):
        raise BackendError(
            "no CUDA context is current in this thread: choose a device before kernels are loaded"
        )
    device = _call(driver, "cuCtxGetDevice")
    attributes = driver.CUdevice_attribute
    major, minor = (
        _call(driver, "cuDeviceGetAttribute", attribute, device)
        for attribute in (
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    capability = f"{major}.{minor}"
    if int(major) < 8 or not image.runs_on(capability):
        raise IncompatibleEngineError(
            f"the attention kernels were compiled for compute capability {image.capability} and "
            f"this device has {capability}: build the engine with --compute-capability {capability}"
        )


def _require_pointers(pointers: AttentionPointers, image: KernelImage) -> None:
    """BackendError for an address at which the kernels' wide accesses would fail."""
    for name in ALIGNED_ARGUMENTS:
        address: int = getattr(pointers, name)
        if address % ALIGNMENT:
            raise BackendError(
                f"{name} lies at address {address:#x}, which is not a multiple of {ALIGNMENT}: "
                "allocate it aligned"
            )
    for needed, name in ((image.shape.has_sinks, "sinks"), (image.shape.has_alibi, "alibi_slopes")):
        if needed and not getattr(pointers, name):
            raise BackendError(f"the kernels read {name} and its address is 0: pass the tensor")

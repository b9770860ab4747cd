"""Which CUDA devices this machine has, asked without starting CUDA.

NVML answers: a process that has started CUDA can no longer fork children that use it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

from octavo.backends.base import Compatibility

_LIBRARY = "libnvidia-ml.so.1"


def compute_capabilities() -> tuple[str, ...]:
    """Of each device, such as "8.9", in NVML's order; empty where there is no driver or device."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return ()
    with _nvml() as library:
        if library is None:
            return ()
        count = ctypes.c_uint(0)
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        found = (_capability(library, index) for index in range(count.value))
        return tuple(one for one in found if one is not None)


def check_device() -> Compatibility:
    """Refuses where no CUDA device can be used."""
    if compute_capabilities():
        return Compatibility()
    return Compatibility(
        "no CUDA device is visible here: use a machine with an NVIDIA GPU and its driver, or build "
        "an engine for the CPU"
    )


@contextlib.contextmanager
def _nvml() -> Iterator[ctypes.CDLL | None]:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        yield None
        return
    if library.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield library
    finally:
        library.nvmlShutdown()


def _capability(library: ctypes.CDLL, index: int) -> str | None:
    device = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != 0:
        return None
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    asked = library.nvmlDeviceGetCudaComputeCapability(
        device, ctypes.byref(major), ctypes.byref(minor)
    )
    return f"{major.value}.{minor.value}" if asked == 0 else None

"""Where the native library of Octavo's kernels is and what it uses of this CPU."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from octavo.graphs.errors import BackendError

_LIBRARY = "liboctavo_kernels.so"


def library_path() -> Path:
    """The library that ONNX Runtime's `register_custom_ops_library` takes.

    Raises BackendError where it has not been built.
    """
    path = Path(__file__).resolve().parent / _LIBRARY
    if not path.is_file():
        raise BackendError(
            f"the native kernels are missing at {path}: run `make setup`, or build them with "
            "`cmake -S backends/kernels -B build/kernels && cmake --build build/kernels`"
        )
    return path


def instruction_set() -> str:
    """The instruction set that sessions created now would use: avx512, avx2 or portable.

    Raises BackendError where OCTAVO_CPU_ISA names one that this CPU does not have.
    """
    library = ctypes.CDLL(str(library_path()))
    library.octavo_kernels_isa.restype = ctypes.c_char_p
    name: bytes | None = library.octavo_kernels_isa()
    if name is None:
        raise unknown_instruction_set()
    return name.decode()


def unknown_instruction_set() -> BackendError:
    return BackendError(
        f"OCTAVO_CPU_ISA is {os.environ.get('OCTAVO_CPU_ISA')!r} and this CPU or build does "
        "not have that instruction set: unset the variable to use the best set there is"
    )

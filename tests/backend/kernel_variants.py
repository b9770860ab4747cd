"""The native kernels for each instruction set, as far as this CPU runs them."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from octavo.backends import kernels
from octavo.graphs.errors import BackendError

VARIANTS = ("portable", "avx2", "avx512", "lanes16")
# Kernels of integers have a variant more for sets with dot products of bytes.
INTEGER_VARIANTS = ("portable", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "lanes16")
_ROOT = Path(__file__).resolve().parents[2]
_VARIABLE = "OCTAVO_CPU_ISA"


def library_of(variant: str) -> Path:
    """The library that has a variant; skips the test where this CPU does not run it."""
    if variant == "lanes16":
        return _build_lanes16()
    with selected(variant):
        try:
            assert kernels.instruction_set() == variant
        except BackendError:
            pytest.skip(f"this CPU has no {variant}")
    return kernels.library_path()


@contextmanager
def selected(variant: str) -> Iterator[None]:
    """Sessions created inside use the variant."""
    with pytest.MonkeyPatch.context() as patch:
        if variant != "lanes16":
            patch.setenv(_VARIABLE, variant)
        yield


@functools.cache
def _build_lanes16() -> Path:
    """The AVX-512 tile shapes in portable code; shipped nowhere, so the test builds it."""
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    cmake, ninja = shutil.which("cmake", path=search), shutil.which("ninja", path=search)
    if cmake is None:
        pytest.skip("cmake is needed to build the 16-lane test library")
    folder = _ROOT / "build" / "kernels-lanes16"
    generator = ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    source = Path(kernels.__file__).resolve().parent
    configure = [
        cmake, f"-S{source}", f"-B{folder}", "-DCMAKE_BUILD_TYPE=Release",
        "-DOCTAVO_KERNELS_LANES16=ON", f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={folder}", *generator,
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the tests run in several processes
        for command in (configure, [cmake, "--build", str(folder)]):
            subprocess.run(command, check=True, capture_output=True, text=True)
    return folder / "liboctavo_kernels_lanes16.so"

"""Maps the top folders into the `octavo` namespace package and builds the native kernels."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

from setuptools import Command, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.dist import Distribution

ROOT = Path(__file__).resolve().parent
FOLDERS = ("graphs", "compiler", "backends", "runtime", "tools")
KERNELS = Path("backends", "kernels")
SOURCE_SUFFIXES = {".cc", ".h", ".txt", ".cmake"}
LIBRARY = "liboctavo_kernels.so"


class BuildKernels(Command):
    """Runs CMake; the library goes beside the sources (editable install) or into the wheel."""

    description = "build the native kernels with CMake"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []
    build_lib: str | None
    build_temp: str | None
    editable_mode: bool

    def initialize_options(self) -> None:
        self.build_lib = None
        self.build_temp = None
        self.editable_mode = False

    def finalize_options(self) -> None:
        self.set_undefined_options(
            "build", ("build_lib", "build_lib"), ("build_temp", "build_temp")
        )

    def run(self) -> None:
        _require_compiler()
        build_folder, destination = self._folders()
        destination.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake",
            f"-S{ROOT / KERNELS}",
            f"-B{build_folder}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={destination}",
        ]
        if ninja := shutil.which("ninja"):
            configure += ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        # What another generator or checkout left in the folder is refused: then start afresh.
        if subprocess.call(configure):
            shutil.rmtree(build_folder, ignore_errors=True)
            _call(configure)
        _call(["cmake", "--build", str(build_folder), "--parallel"])
        if not (destination / LIBRARY).is_file():
            raise SystemExit(f"error: CMake left no {LIBRARY} in {destination}")

    def _folders(self) -> tuple[Path, Path]:
        """Where to build (an editable install keeps it) and where the library goes."""
        if self.editable_mode:
            return ROOT / "build" / "kernels", ROOT / KERNELS
        library_folder = ROOT / str(self.build_lib) / "octavo" / KERNELS
        return ROOT / str(self.build_temp) / "kernels", library_folder

    def get_source_files(self) -> list[str]:
        sources = (f for f in (ROOT / KERNELS).rglob("*") if f.suffix in SOURCE_SUFFIXES)
        return sorted(str(file.relative_to(ROOT)) for file in sources)

    def get_outputs(self) -> list[str]:
        return [str(Path(str(self.build_lib), "octavo", KERNELS, LIBRARY))]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Build(build):
    sub_commands: ClassVar[list[tuple[str, Any]]] = [*build.sub_commands, ("build_kernels", None)]


class PlatformWheel(bdist_wheel):
    """The library depends on the platform but on no Python ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class NativeDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


def _require_compiler() -> None:
    if platform.system() != "Linux":
        raise SystemExit("error: octavo's kernels build on Linux only")
    compiler = os.environ.get("CXX", "c++").split()[0]
    if not (shutil.which(compiler) or shutil.which("g++") or shutil.which("clang++")):
        raise SystemExit(
            f"error: octavo's kernels need a C++ compiler, {compiler!r} was not found: "
            "install g++ (Debian: apt-get install g++) or name one in CXX"
        )
    if not shutil.which("cmake"):
        raise SystemExit("error: octavo's kernels need CMake >= 3.25, `cmake` was not found")


def _call(command: list[str]) -> None:
    sys.stdout.flush()
    if code := subprocess.call(command):
        raise SystemExit(f"error: `{' '.join(command)}` failed with exit code {code}")


def _packages() -> list[str]:
    packages = []
    for folder in FOLDERS:
        packages.append(f"octavo.{folder}")
        packages += [f"octavo.{folder}.{name}" for name in find_packages(str(ROOT / folder))]
    return packages


setup(
    packages=_packages(),
    package_dir={f"octavo.{folder}": folder for folder in FOLDERS},
    distclass=NativeDistribution,
    cmdclass={"build": Build, "build_kernels": BuildKernels, "bdist_wheel": PlatformWheel},
)

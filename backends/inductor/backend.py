"""Building and checking AOTInductor engines."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
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
from octavo.graphs.errors import BuildError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from octavo.backends.inductor.executable import InductorExecutable
    from octavo.backends.manifest import Manifest
    from octavo.graphs.program import CapturedProgram
    from octavo.graphs.spec import Device

MODEL_FILE = "model.pt2"
WEIGHTS_FILE = "model.weights"
WEIGHTS_INDEX_FILE = "model.weights.json"
ACCEPT_FILE = "accept.pt2"


class InductorBackend:
    name = "inductor"
    devices: tuple[Device, ...] = ("cpu",)

    def operators(self, kind: EngineKind) -> frozenset[str]:
        return supported.OPERATORS

    def require(self, kind: EngineKind, block_size: int) -> None:
        supported.require(self.name, kind, block_size)
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            raise BuildError(
                f"the inductor backend compiles the graph with {compiler}, which is not here: "
                "install g++, or name another compiler in CXX"
            )

    def supports(self, program: CapturedProgram) -> Report:
        """The graph was captured from PyTorch, whose every operator AOTInductor can call."""
        return Report()

    def build(self, program: CapturedProgram, options: BuildOptions, staging: Path) -> BuiltFiles:
        """Writes the compiled code and the weights that it reads, to be mapped."""
        from octavo.backends.inductor.compiled import compile_package, machine_options
        from octavo.backends.inductor.native_graph import native_module
        from octavo.backends.inductor.weights import write_weights
        from octavo.backends.manifest import Target

        weights = compile_package(native_module(program.exported), staging / MODEL_FILE)
        write_weights(weights, staging / WEIGHTS_FILE, staging / WEIGHTS_INDEX_FILE)
        return BuiltFiles(
            files=(MODEL_FILE, WEIGHTS_FILE, WEIGHTS_INDEX_FILE),
            target=Target(architecture=host.architecture(), cpu_features=machine_options()[1]),
            kv_layout="k_transposed",
            versions={},
            backend_data={
                "model": MODEL_FILE,
                "weights": WEIGHTS_FILE,
                "weights_index": WEIGHTS_INDEX_FILE,
            },
        )

    def build_accept(self, exported: ExportedProgram, staging: Path) -> str:
        from octavo.backends.inductor.compiled import compile_package
        from octavo.backends.inductor.native_graph import native_module

        compile_package(native_module(exported), staging / ACCEPT_FILE)
        return ACCEPT_FILE

    def check(self, manifest: Manifest) -> Compatibility:
        try:
            version = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            return Compatibility("torch is not installed: install Octavo with its extra [build]")
        built = manifest.versions.get("torch", "unknown")
        if version.split("+")[0] != built.split("+")[0]:
            return Compatibility(
                f"the engine was compiled with torch {built} and this is torch {version}, whose "
                f"functions it may not call: install torch {built} or build the engine again"
            )
        return host.check_target(manifest.target)

    def import_library(self) -> None:
        importlib.import_module("octavo.backends.inductor.executable")

    def load(self, bundle: Path, manifest: Manifest, options: LoadOptions) -> InductorExecutable:
        from octavo.backends.inductor.executable import InductorExecutable

        return InductorExecutable(bundle, manifest, options)

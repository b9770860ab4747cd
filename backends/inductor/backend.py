"""Building and checking AOTInductor engines."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Mapping
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
    Tested,
)
from octavo.backends.kernels import supported
from octavo.backends.libraries import version_of

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
    libraries = ("torch",)
    tested: Mapping[Device, Tested] = {"cpu": "run"}

    def operators(self, kind: EngineKind) -> frozenset[str]:
        return supported.OPERATORS

    def require(self, kind: EngineKind, block_size: int) -> None:
        supported.require(self.name, kind, block_size)

    def can_build(self, kind: EngineKind) -> Compatibility:
        for tool in (os.environ.get("CXX", "g++"), "strip"):
            if shutil.which(tool) is None:
                return Compatibility(
                    f"{tool}, which the graph is compiled with, is not installed: install g++, or "
                    "name another compiler in CXX"
                )
        return Compatibility()

    def can_run(self, device: Device) -> Compatibility:
        if version_of("torch") is None:
            return Compatibility("torch is not installed: install Octavo with its extra [build]")
        return Compatibility()

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
        installed = self.can_run(manifest.target.device)
        if not installed.ok:
            return installed
        version, built = version_of("torch"), manifest.versions.get("torch", "unknown")
        if str(version).split("+")[0] != built.split("+")[0]:
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

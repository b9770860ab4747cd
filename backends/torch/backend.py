"""Eager PyTorch: slow, and right; every other backend is compared with it."""

from __future__ import annotations

import importlib
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
from octavo.backends.libraries import release, version_of

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from octavo.backends.manifest import Manifest
    from octavo.backends.torch.executable import TorchExecutable
    from octavo.graphs.program import CapturedProgram
    from octavo.graphs.spec import Device

MODEL_FILE = "model.pt2"
ACCEPT_FILE = "accept.pt2"


class TorchBackend:
    name = "torch"
    devices: tuple[Device, ...] = ("cpu",)
    libraries = ("torch",)
    tested: Mapping[Device, Tested] = {"cpu": "run"}

    def operators(self, kind: EngineKind) -> frozenset[str]:
        return frozenset()

    def require(self, kind: EngineKind, block_size: int) -> None:
        """Eager PyTorch has every dtype that the references have, and every block size."""
        host.refuse_fp8(self.name, kind)

    def can_build(self, kind: EngineKind) -> Compatibility:
        return Compatibility()

    def can_run(self, device: Device) -> Compatibility:
        if version_of("torch") is None:
            return Compatibility("torch is not installed: install Octavo with its extra [build]")
        return Compatibility()

    def supports(self, program: CapturedProgram) -> Report:
        """The graph was captured from PyTorch: it has every node."""
        return Report()

    def build(self, program: CapturedProgram, options: BuildOptions, staging: Path) -> BuiltFiles:
        from octavo.backends.manifest import Target
        from octavo.backends.torch.archive import save

        save(program.exported, staging / MODEL_FILE)
        return BuiltFiles(
            files=(MODEL_FILE,),
            target=Target(architecture="any"),
            kv_layout="reference",
            versions={},
        )

    def build_accept(self, exported: ExportedProgram, staging: Path) -> str:
        from octavo.backends.torch.archive import save

        save(exported, staging / ACCEPT_FILE)
        return ACCEPT_FILE

    def check(self, manifest: Manifest) -> Compatibility:
        installed = self.can_run(manifest.target.device)
        if not installed.ok:
            return installed
        version, built = version_of("torch"), manifest.versions.get("torch", "unknown")
        if release(version) != release(built):
            return Compatibility(
                f"the engine was built with torch {built} and this is torch {version}, whose "
                f"archives may differ: install torch {built} or build the engine again"
            )
        return host.check_target(manifest.target)

    def import_library(self) -> None:
        importlib.import_module("octavo.backends.torch.executable")

    def load(self, bundle: Path, manifest: Manifest, options: LoadOptions) -> TorchExecutable:
        from octavo.backends.torch.executable import TorchExecutable

        return TorchExecutable(bundle / MODEL_FILE, manifest, options)

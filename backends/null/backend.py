"""The null backend's part of the protocol."""

from __future__ import annotations

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
from octavo.backends.null.executable import NullExecutable
from octavo.backends.step_checks import no_acceptance_graph

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from octavo.backends.manifest import Manifest
    from octavo.graphs.program import CapturedProgram
    from octavo.graphs.spec import Device


class NullBackend:
    name = "null"
    devices: tuple[Device, ...] = ("cpu",)
    libraries = ()
    tested: Mapping[Device, Tested] = {"cpu": "run"}

    def operators(self, kind: EngineKind) -> frozenset[str]:
        return frozenset()

    def supports(self, program: CapturedProgram) -> Report:
        """Nothing of the graph is run, so every node is supported."""
        return Report()

    def require(self, kind: EngineKind, block_size: int) -> None:
        """Nothing is computed; what is of GPUs alone is refused all the same."""
        host.refuse_fp8(self.name, kind)

    def can_build(self, kind: EngineKind) -> Compatibility:
        return Compatibility()

    def can_run(self, device: Device) -> Compatibility:
        return Compatibility()

    def build(self, program: CapturedProgram, options: BuildOptions, staging: Path) -> BuiltFiles:
        from octavo.backends.manifest import Target
        from octavo.backends.null.bundle import MODEL_NAME

        (staging / MODEL_NAME).write_text(f"vocab_size {program.spec.vocab_size}\n")
        return BuiltFiles(
            files=(MODEL_NAME,),
            target=Target(architecture="any"),
            kv_layout="reference",
            versions={},
        )

    def build_accept(self, exported: ExportedProgram, staging: Path) -> str:
        raise no_acceptance_graph()

    def check(self, manifest: Manifest) -> Compatibility:
        return host.check_target(manifest.target)

    def import_library(self) -> None:
        """There is none."""

    def load(self, bundle: Path, manifest: Manifest, options: LoadOptions) -> NullExecutable:
        return NullExecutable(manifest)


BACKEND = NullBackend()

"""The null backend's part of the protocol."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from octavo.backends import host
from octavo.backends.base import BuildOptions, BuiltFiles, Compatibility, LoadOptions, Report
from octavo.backends.null.executable import NullExecutable

if TYPE_CHECKING:
    from octavo.backends.manifest import Manifest
    from octavo.graphs.program import CapturedProgram
    from octavo.graphs.spec import ModelSpec


class NullBackend:
    name = "null"

    def supports(self, program: CapturedProgram, options: BuildOptions) -> Report:  # noqa: ARG002
        """Nothing of the graph is run, so every node is supported."""
        return Report()

    def build(
        self,
        program: CapturedProgram,  # noqa: ARG002
        spec: ModelSpec,
        options: BuildOptions,  # noqa: ARG002
        staging: Path,
    ) -> BuiltFiles:
        from octavo.backends.manifest import Target
        from octavo.backends.null.bundle import MODEL_NAME

        (staging / MODEL_NAME).write_text(f"vocab_size {spec.vocab_size}\n")
        return BuiltFiles(
            files=(MODEL_NAME,),
            target=Target(architecture="any"),
            kv_layout="reference",
            versions={},
        )

    def check(self, manifest: Manifest) -> Compatibility:
        return host.check_target(manifest.target)

    def load(self, bundle: Path, manifest: Manifest, options: LoadOptions) -> NullExecutable:  # noqa: ARG002
        return NullExecutable(manifest.spec.vocab_size, manifest.limits, manifest.profiles)


BACKEND = NullBackend()

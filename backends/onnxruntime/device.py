"""What differs between the devices that ONNX Runtime engines are built for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from octavo.backends.base import Compatibility, EngineKind, LoadOptions, Report
from octavo.backends.libraries import version_of

if TYPE_CHECKING:
    import onnx_ir as ir

    from octavo.backends.base import BuildOptions
    from octavo.backends.manifest import KvLayout, Manifest
    from octavo.backends.onnxruntime.executable import OnnxRuntimeExecutable
    from octavo.graphs.program import CapturedProgram


class DeviceSupport(Protocol):
    """One device: what it runs, how its graph is lowered, and how its engines are loaded."""

    kv_layout: KvLayout

    def architecture(self) -> str:
        """Of the processors that can load the files; "any" where they do not matter."""

    def operators(self) -> frozenset[str]:
        """Octavo's operators with kernels on this device, by torch name."""

    def require(self, kind: EngineKind, block_size: int) -> None:
        """Raises BuildError for what cannot be built."""

    def supports(self, program: CapturedProgram) -> Report:
        """Names the nodes that have a lowering and no kernel on the device."""

    def lower(self, program: CapturedProgram, options: BuildOptions) -> Mapping[str, ir.Model]:
        """The engine's graphs by file name, the model first."""

    def check(self) -> Compatibility:
        """Whether this machine has the device and its ONNX Runtime."""

    def load(
        self, model: Path, manifest: Manifest, options: LoadOptions
    ) -> OnnxRuntimeExecutable: ...


def check_release(
    distributions: tuple[str, ...], minimum: tuple[int, int], extra: str
) -> Compatibility:
    """Whether one of `distributions` is installed and none of them is older than `minimum`."""
    needed = ".".join(map(str, minimum))
    found = {name: version_of(name) for name in distributions}
    installed = {name: version for name, version in found.items() if version is not None}
    if not installed:
        return Compatibility(
            f"{distributions[0]} is not installed: install Octavo with its extra [{extra}]"
        )
    for name, version in installed.items():
        if tuple(int(part) for part in version.split(".")[:2]) < minimum:
            return Compatibility(
                f"{name} {version} is older than {needed}, which the kernels need: upgrade it"
            )
    return Compatibility()

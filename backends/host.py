"""What this machine is, compared with what an engine needs."""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.backends.base import Compatibility, EngineKind
from octavo.graphs.errors import BuildError

if TYPE_CHECKING:
    from octavo.backends.manifest import Target


def architecture() -> str:
    """The processor architecture under one name on every system: x86_64, aarch64, ..."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


@functools.cache
def cpu_features() -> frozenset[str]:
    """CPU feature flags as Linux names them (`avx2`, `avx512_vnni`, ...); empty where unknown."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(flags.split())
    return frozenset()


def refuse_fp8(backend: str, kind: EngineKind) -> None:
    """BuildError for a cache of 8-bit floats, which few backends have kernels for."""
    if kind.kv_cache_dtype == "float8_e4m3fn":
        raise BuildError(
            f"the {backend} backend has no kernel for --kv-cache-dtype fp8 on {kind.device}: leave "
            "it out, or build with --backend tensorrt_rtx"
        )


def check_target(target: Target) -> Compatibility:
    """Refuses an engine built for another architecture or for CPU features missing here."""
    if target.architecture not in ("any", architecture()):
        return Compatibility(
            f"the engine was built for {target.architecture}, this machine is {architecture()}: "
            "build it again on or for this machine"
        )
    missing = [f for f in target.cpu_features if f not in cpu_features()]
    if missing:
        return Compatibility(
            f"the engine needs the CPU features {', '.join(missing)}, which this machine lacks: "
            "build it again without them"
        )
    return Compatibility()

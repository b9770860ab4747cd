"""`octavo backends`: what is installed here, what it builds and runs, and why something cannot."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, Any, get_args

import typer

from octavo.backends import registry
from octavo.backends.base import Backend, EngineKind, Tested
from octavo.backends.libraries import version_of
from octavo.graphs.errors import BackendError, BuildError
from octavo.graphs.spec import CacheDType, Device, FloatDType, Quantization
from octavo.tools import console

_CACHE_DTYPES: tuple[CacheDType, ...] = ("int8", "float8_e4m3fn")
_BLOCK_SIZE = 16  # which every backend has
_BLOCK_SIZES = range(1, 257)  # that `build-engine` takes
_PROBE_SECONDS = 120
_IMPORTED = "octavo: imported"
_TESTED: dict[Tested, str] = {
    "run": "run",
    "built": "built, not yet run on hardware",
    "simulated": "simulated, not yet run on hardware",
}


@dataclass(frozen=True)
class Summary:
    """A backend on one device; a reason is one sentence, None where nothing is in the way."""

    backend: str
    device: Device
    libraries: dict[str, str]  # versions of those that are installed
    kinds: tuple[EngineKind, ...]  # that it builds, on some machine
    block_sizes: tuple[int, ...]  # of those kinds' caches
    operators: tuple[str, ...]  # of Octavo's, with kernels
    tested: Tested
    cannot_build: str | None
    cannot_run: str | None


@dataclass(frozen=True)
class Broken:
    backend: str
    reason: str


@console.reports_errors
def backends(
    probe: Annotated[
        bool, typer.Option("--probe", help="Import each library, in a process of its own.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What is installed here, what it supports, and why something is not available."""
    found = [one for name in registry.names() for one in _summaries(name, probe)]
    if as_json:
        console.print_json({"backends": [_as_json(one) for one in found]})
    else:
        _print(found)


def _summaries(name: str, probe: bool) -> list[Summary | Broken]:
    """A broken backend is one entry, and no reason not to tell of the others."""
    try:
        backend = registry.get(name)
        return [_summary(backend, device, probe) for device in backend.devices]
    except BackendError as error:
        return [Broken(name, str(error))]
    except Exception as error:  # what asks a broken library may fail in any way
        lines = str(error).strip().splitlines() or ["no message"]
        reason = f"it failed to describe itself ({type(error).__name__}: {lines[0]})"
        return [Broken(name, reason)]


def _summary(backend: Backend, device: Device, probe: bool) -> Summary:
    kinds = tuple(_kinds(backend, device))
    can_run = backend.can_run(device)
    cannot_run = can_run.reason
    if probe and can_run.ok:
        cannot_run = _failure_of_import(backend.name)
    versions = {name: version_of(name) for name in backend.libraries}
    operators = {name for kind in kinds for name in backend.operators(kind)}
    return Summary(
        backend=backend.name,
        device=device,
        libraries={name: version for name, version in versions.items() if version is not None},
        kinds=kinds,
        block_sizes=tuple(
            size for size in _BLOCK_SIZES if all(_accepts(backend, kind, size) for kind in kinds)
        ),
        operators=tuple(sorted(operators)),
        tested=backend.tested[device],
        cannot_build=backend.can_build(kinds[0]).reason if kinds else "it builds nothing",
        cannot_run=cannot_run,
    )


def _kinds(backend: Backend, device: Device) -> list[EngineKind]:
    """All that `require` accepts: nothing is declared a second time."""
    accepted = []
    dtypes: tuple[FloatDType, ...] = get_args(FloatDType)
    quantizations: tuple[Quantization, ...] = get_args(Quantization)
    for dtype, cache, quantization in itertools.product(
        dtypes, (None, *_CACHE_DTYPES), quantizations
    ):
        if dtype != "float32" and (cache == "int8" or quantization != "none"):
            continue  # integers stand in for float32 alone
        kind = EngineKind(
            dtype=dtype, kv_cache_dtype=cache or dtype, quantization=quantization, device=device
        )
        if _accepts(backend, kind, _BLOCK_SIZE):
            accepted.append(kind)
    return accepted


def _accepts(backend: Backend, kind: EngineKind, block_size: int) -> bool:
    try:
        backend.require(kind, block_size)
    except BuildError:
        return False
    return True


def _failure_of_import(name: str) -> str | None:
    """Why the library cannot be imported; a crash is one of the reasons, an early exit another."""
    code = (
        f"from octavo.backends import registry; registry.get({name!r}).import_library(); "
        f"print({_IMPORTED!r})"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            errors="replace",  # what a library prints may be of any encoding
            check=False,
            timeout=_PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"importing its library did not end within {_PROBE_SECONDS} s"
    if done.returncode == 0:
        # The last line: a library may print while it is imported.
        imported = done.stdout.splitlines()[-1:] == [_IMPORTED]
        return None if imported else "importing its library ended the process"
    if done.returncode < 0:
        return f"importing its library ended the process with signal {-done.returncode}"
    lines = done.stderr.strip().splitlines() or ["no message"]
    return f"importing its library failed: {lines[-1]}"


def _as_json(one: Summary | Broken) -> dict[str, Any]:
    entry = dataclasses.asdict(one)
    if isinstance(one, Summary):
        names = ("dtype", "kv_cache_dtype", "quantization")
        entry["kinds"] = [{name: getattr(kind, name) for name in names} for kind in one.kinds]
    return entry


def _print(found: list[Summary | Broken]) -> None:
    table = console.table(
        "backends", "backend", "device", "library", "dtypes", "weights", "cache", "block sizes",
        "kernels>", "builds here", "runs here", "Octavo's tests have",
    )  # fmt: skip
    table.columns[0].no_wrap = True  # a name is typed as it is shown
    for one in found:
        if isinstance(one, Broken):
            table.add_row(one.backend, "", "", "", "", "", "", "", "no", "no", "")
            continue
        table.add_row(
            one.backend,
            one.device,
            ", ".join(f"{name} {version}" for name, version in one.libraries.items()) or "none",
            _joined(kind.dtype for kind in one.kinds),
            _joined(_weights(kind) for kind in one.kinds),
            _joined(_cache(kind) for kind in one.kinds),
            _described(one.block_sizes),
            str(len(one.operators)),
            "no" if one.cannot_build else "yes",
            "no" if one.cannot_run else "yes",
            _TESTED[one.tested],
        )
    console.print_tables(table)
    for one in found:
        for line in _reasons(one):
            typer.echo(line)


def _reasons(one: Summary | Broken) -> list[str]:
    if isinstance(one, Broken):
        return [f"{one.backend}: {one.reason}"]
    name = f"{one.backend} ({one.device})"
    build, run = one.cannot_build, one.cannot_run
    if build is not None and build == run:
        return [f"{name} neither builds nor runs here: {build}"]
    lines = [] if build is None else [f"{name} does not build here: {build}"]
    return lines if run is None else [*lines, f"{name} does not run here: {run}"]


def _weights(kind: EngineKind) -> str:
    return "floats" if kind.quantization == "none" else kind.quantization


def _cache(kind: EngineKind) -> str:
    return "as dtype" if kind.kv_cache_dtype == kind.dtype else kind.kv_cache_dtype


def _described(block_sizes: tuple[int, ...]) -> str:
    """any; multiples of 16; or every size."""
    step = min(block_sizes, default=0)
    if step == 0 or block_sizes != tuple(range(step, _BLOCK_SIZES.stop, step)):
        return ", ".join(map(str, block_sizes))
    return "any" if step == 1 else f"multiples of {step}"


def _joined(names: Any) -> str:
    return ", ".join(dict.fromkeys(names))

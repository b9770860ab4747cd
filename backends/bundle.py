"""Opening an engine bundle: format, target and hashes are checked before anything is run."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.graphs.errors import BundleError, IncompatibleEngineError

if TYPE_CHECKING:
    from octavo.backends.manifest import FileRecord, Manifest

MANIFEST_NAME = "manifest.json"
_READ_SIZE = 1 << 20


def read_manifest(bundle: Path) -> Manifest:
    """Reads and validates `manifest.json`.

    Raises BundleError if `bundle` is no engine or its manifest is damaged, and
    IncompatibleEngineError if its format is newer than this version of Octavo reads.
    """
    # pydantic takes 0.2 s to import: not at the import of `octavo.runtime`.
    from pydantic import ValidationError

    from octavo.backends.manifest import FORMAT_VERSION, Manifest

    path = bundle / MANIFEST_NAME
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BundleError(
            f"{bundle} is no engine, it has no {MANIFEST_NAME}: build one with `build-engine`"
        ) from None
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read ({error}): build the engine again") from None
    version = content.get("format_version") if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise BundleError(f"{path} names no format_version: build the engine again")
    if version != FORMAT_VERSION:
        raise IncompatibleEngineError(
            f"{bundle} has engine format {version}, this Octavo reads format {FORMAT_VERSION}: "
            + ("upgrade Octavo" if version > FORMAT_VERSION else "build the engine again")
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BundleError(
            f"{path} is damaged at {where} ({first['msg']}): build the engine again"
        ) from None


def sha256_of(path: Path, start: int = 0, size: int | None = None) -> str:
    """Hex SHA-256 of a file, or of `size` bytes from `start`; several run side by side."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = os.fstat(file.fileno()).st_size - start if size is None else size
        buffer = memoryview(bytearray(min(_READ_SIZE, max(left, 1))))
        while left > 0 and (count := file.readinto(buffer[: min(left, len(buffer))])):
            digest.update(buffer[:count])
            left -= count
    return digest.hexdigest()


def chunk_digests(path: Path) -> tuple[str, ...]:
    """Hex SHA-256 of each chunk of a file that has more than one."""
    from octavo.backends.manifest import CHUNK_BYTES

    starts = range(0, path.stat().st_size, CHUNK_BYTES)
    if len(starts) < 2:
        return ()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return tuple(pool.map(lambda start: sha256_of(path, start, CHUNK_BYTES), starts))


def verify_files(bundle: Path, records: Iterable[FileRecord]) -> None:
    """Compares files with their records; raises BundleError naming the first that differs."""
    for record in records:
        problem = _problem(bundle, record)
        if problem is not None:
            raise BundleError(f"{problem}: copy or build the engine again")


def _problem(bundle: Path, record: FileRecord) -> str | None:
    path = bundle / record.path
    try:
        size = path.stat().st_size
        if size != record.size:
            return f"{path} has {size} bytes, the manifest says {record.size}"
        same = (
            chunk_digests(path) == record.chunks
            if record.chunks
            else sha256_of(path) == record.sha256
        )
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if not same:
        return f"{path} was changed after the build, its SHA-256 differs from the manifest's"
    return None

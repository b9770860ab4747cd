"""Opens an engine bundle: checked, hashed and loaded side by side."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.backends import registry
from octavo.backends.base import Executable, LoadOptions
from octavo.backends.bundle import verify_files
from octavo.graphs.errors import IncompatibleEngineError
from octavo.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.backends.manifest import FileRecord, Manifest
    from octavo.graphs.spec import ModelSpec

_LARGE = 32 << 20  # bytes that take longer to hash than to wait for


@dataclass(frozen=True)
class LoadedEngine:
    manifest: Manifest
    executable: Executable
    tokenizer: Tokenizer | None


def load_engine(bundle: Path, manifest: Manifest, num_threads: int | None) -> LoadedEngine:
    """Loads a bundle whose manifest was read; raises BundleError or BackendError."""
    # What gets parsed is hashed before. Hashing weights takes as long as loading them, so neither
    # waits. The tokenizer comes last: parsing it holds the interpreter's lock.
    weights = [record for record in manifest.files if record.size > _LARGE]
    verify_files(bundle, [record for record in manifest.files if record.size <= _LARGE])
    with ThreadPoolExecutor(1, thread_name_prefix="octavo-load") as thread:
        checked = thread.submit(_verified_tokenizer, bundle, manifest.spec, weights)
        backend = registry.get(manifest.backend)
        compatibility = backend.check(manifest)
        if not compatibility.ok:
            raise IncompatibleEngineError(f"{bundle} cannot run here: {compatibility.reason}")
        try:
            executable = backend.load(bundle, manifest, LoadOptions(num_threads=num_threads))
        except BaseException:
            checked.result()  # a changed file explains more than the failure it caused
            raise
        try:
            return LoadedEngine(manifest, executable, checked.result())
        except BaseException:
            executable.close()
            raise


def _verified_tokenizer(
    bundle: Path, spec: ModelSpec, weights: list[FileRecord]
) -> Tokenizer | None:
    verify_files(bundle, weights)
    return Tokenizer.from_bundle(bundle, spec)

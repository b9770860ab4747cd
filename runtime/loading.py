"""Opens an engine bundle: checked, hashed and loaded side by side."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.backends import registry
from octavo.backends.base import Executable, LoadOptions
from octavo.backends.bundle import MANIFEST_NAME, verify_files
from octavo.graphs.errors import BundleError, IncompatibleEngineError
from octavo.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.backends.manifest import Manifest

_LARGE = 32 << 20  # bytes that take longer to hash than to wait for


@dataclass(frozen=True)
class LoadedEngine:
    manifest: Manifest
    executable: Executable
    tokenizer: Tokenizer | None


def find_engine(model: str | Path) -> Path:
    """The bundle itself, or the engine of a checkpoint from the cache of builds."""
    path = Path(model)
    if (path / MANIFEST_NAME).exists():
        return path
    try:
        # The one place where the runtime meets the compiler, only when there is something to build.
        from octavo.compiler import cached_engine
    except ImportError as error:
        raise BundleError(
            f"{model} is no engine, it has no {MANIFEST_NAME}, and building one from a checkpoint "
            f"is not possible here ({error}): install `octavo[build]`"
        ) from error
    engine: Path = cached_engine(str(model))
    return engine


def load_engine(bundle: Path, manifest: Manifest, num_threads: int | None) -> LoadedEngine:
    """Loads a bundle whose manifest was read; raises BundleError or BackendError."""
    # What gets parsed is hashed before. Hashing weights takes longer than mapping them, so nobody
    # waits for it until the end. Parsing the tokenizer holds the interpreter's lock, which the
    # backend no longer needs once it is imported.
    weights = [record for record in manifest.files if record.size > _LARGE]
    verify_files(bundle, [record for record in manifest.files if record.size <= _LARGE])
    with ThreadPoolExecutor(2, thread_name_prefix="octavo-load") as threads:
        verified = threads.submit(verify_files, bundle, weights)
        backend = registry.get(manifest.backend)
        compatibility = backend.check(manifest)
        if not compatibility.ok:
            raise IncompatibleEngineError(f"{bundle} cannot run here: {compatibility.reason}")
        backend.import_library()
        tokenizer = threads.submit(Tokenizer.from_bundle, bundle, manifest.spec)
        try:
            executable = backend.load(bundle, manifest, LoadOptions(num_threads=num_threads))
        except BaseException:
            verified.result()  # a changed file explains more than the failure it caused
            raise
        try:
            verified.result()
            return LoadedEngine(manifest, executable, tokenizer.result())
        except BaseException:
            executable.close()
            raise

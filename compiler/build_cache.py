"""Engines kept by what they were built from: same checkpoint, options and versions, same key.

An entry is a whole bundle named by its key, published atomically. Entries are copied out, never
hard-linked: a file edited in an output must not change the cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.backends.bundle import read_manifest, sha256_of, verify_files
from octavo.compiler.publish import (
    OutputBusyError,
    check_free_space,
    discard,
    publish_recorded,
    remove_leftovers,
    staging_folder,
)
from octavo.graphs.errors import BuildError, BundleError

if TYPE_CHECKING:
    from octavo.backends.manifest import Manifest

DIRECTORY_VARIABLE = "OCTAVO_CACHE_DIR"
MAX_BYTES_VARIABLE = "OCTAVO_CACHE_MAX_BYTES"
DEFAULT_MAX_BYTES = 20 << 30

# Any of them may change what a build makes.
_LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "numpy",
    "onnx",
    "onnx-ir",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt-cu12",
    "tensorrt-cu13",
    "tensorrt-rtx-cu12",
    "tensorrt-rtx-cu13",
    "triton",
)
_SOURCES = ("graphs", "compiler", "backends")
_SOURCE_SUFFIXES = (".py", ".so", ".cc", ".cpp", ".h", ".hpp")
_KEY = re.compile("[0-9a-f]{64}")
_FICLONE = 0x40049409  # linux/fs.h: share the blocks of a file until one side writes


def cache_root() -> Path:
    configured = os.environ.get(DIRECTORY_VARIABLE)
    return Path(configured or "~/.cache/octavo/engines").expanduser()


def cache_key(parts: Mapping[str, object]) -> str:
    """Hex SHA-256 over `parts` and, always, over Octavo's own source and its libraries' versions.

    Raises TypeError for a value that has no canonical JSON form.
    """
    everything = {"source": source_digest(), "libraries": _library_versions(), "parts": parts}
    text = json.dumps(
        everything, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain
    )
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def source_digest() -> str:
    """Hex SHA-256 over the files of the compiler: a changed compiler builds anew."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        spec = importlib.util.find_spec(f"octavo.{name}")
        roots = (spec.submodule_search_locations if spec else None) or ()
        for root in map(Path, roots):
            for path in sorted(root.rglob("*")):
                if path.suffix in _SOURCE_SUFFIXES and path.is_file():
                    line = f"{name}/{path.relative_to(root).as_posix()} {sha256_of(path)}\n"
                    digest.update(line.encode())
    return digest.hexdigest()


def lookup(key: str) -> Path | None:
    """The entry of `key` if it is whole; a damaged one is removed."""
    entry = cache_root() / key
    if not entry.is_dir():
        return None
    try:
        manifest = read_manifest(entry)
        whole = all((entry / f.path).stat().st_size == f.size for f in manifest.files)
    except (BundleError, OSError):
        whole = False
    if not whole:
        _remove(entry)
        return None
    with contextlib.suppress(OSError):  # a read-only cache works, it just forgets what was used
        os.utime(entry)
    return entry


def store(key: str, bundle: Path) -> None:
    """Copies a published engine into the cache and evicts what was used longest ago.

    An engine larger than the whole cache is not kept. BuildError if the disk is full.
    """
    manifest = read_manifest(bundle)
    limit = max_bytes()
    if _size(bundle) > limit:
        return
    entry = cache_root() / key
    # Another process storing the same key stores the same engine.
    with contextlib.suppress(OutputBusyError):
        _copy_bundle(bundle, entry, manifest)
    evict(limit, keep=entry)


def materialise(key: str, output: Path) -> Manifest | None:
    """Publishes the entry of `key` at `output`; None if there is none or it turns out damaged."""
    entry = lookup(key)
    if entry is None:
        return None
    try:
        with _in_use(entry):
            manifest = read_manifest(entry)
            _copy_bundle(entry, output, manifest)
            return manifest
    except (BundleError, FileNotFoundError):
        _remove(entry)
        return None


def max_bytes() -> int:
    text = os.environ.get(MAX_BYTES_VARIABLE)
    if text is None:
        return DEFAULT_MAX_BYTES
    if not text.isdecimal():
        raise BuildError(
            f"{MAX_BYTES_VARIABLE} is {text!r}: give a number of bytes, 0 for no cache"
        )
    return int(text)


def evict(limit: int, keep: Path | None = None) -> None:
    """Removes the entries used longest ago until the cache takes at most `limit` bytes."""
    root = cache_root()
    if not root.is_dir():
        return
    remove_leftovers(root)
    entries = [path for path in root.iterdir() if _KEY.fullmatch(path.name)]
    sizes = {entry: _size(entry) for entry in entries}
    total = sum(sizes.values())
    for entry in sorted(entries, key=_last_used):
        if total <= limit:
            return
        if entry != keep and _remove(entry):
            total -= sizes[entry]


def _copy_bundle(source: Path, target: Path, manifest: Manifest) -> None:
    check_free_space(target, sum(record.size for record in manifest.files))
    with staging_folder(target) as staging:
        for record in manifest.files:
            copy = staging / record.path
            copy.parent.mkdir(parents=True, exist_ok=True)
            _copy(source / record.path, copy)
        verify_files(staging, manifest.files)
        publish_recorded(staging, target, manifest)


def _copy(source: Path, target: Path) -> None:
    """Shares blocks copy-on-write where the file system can, else copies them."""
    try:
        with source.open("rb") as read, target.open("wb") as write:
            fcntl.ioctl(write.fileno(), _FICLONE, read.fileno())
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)


@contextlib.contextmanager
def _in_use(entry: Path) -> Iterator[None]:
    """Keeps `_remove` in other processes away; FileNotFoundError if the entry is gone already."""
    descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def _remove(entry: Path) -> bool:
    """Removes an entry unless it is being copied out; it disappears whole."""
    try:
        descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        discard(entry)
    except (BlockingIOError, BuildError):  # in use, being stored, or already removed
        return False
    finally:
        os.close(descriptor)
    return True


def _last_used(entry: Path) -> float:
    try:
        return entry.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _size(folder: Path) -> int:
    """Bytes of the files in `folder`; what another process evicts meanwhile does not count."""
    sizes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                sizes += os.stat(os.path.join(parent, name)).st_size
    return sizes


def _library_versions() -> dict[str, str]:
    versions = {}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _plain(value: object) -> Any:
    """The JSON form of what options are made of; never `str`, which may hold an address."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    dump = getattr(value, "model_dump", None)
    if dump is not None:
        return dump(mode="json")
    raise TypeError(f"{type(value).__name__} cannot be part of a cache key")

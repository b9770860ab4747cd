"""Engines appear whole or not at all: staged beside their place, renamed into it under a lock."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.backends.bundle import MANIFEST_NAME, chunk_digests, sha256_of
from octavo.graphs.errors import BuildError, OctavoError

if TYPE_CHECKING:
    from octavo.backends.manifest import FileRecord, Manifest

_STAGING = ".staging-"
_FULL_BELOW = 1 << 16
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class OutputBusyError(BuildError):
    """Another build of the same output is running."""


@contextlib.contextmanager
def staging_folder(output: Path, require: Callable[[Path], None] | None = None) -> Iterator[Path]:
    """An empty folder beside `output`, on its disk, for the only build of it; removed at the end.

    Raises BuildError if `output` holds something that is no engine, OutputBusyError if another
    build of it runs. What a killed build of the same output left behind is removed first.

    require  raises BuildError unless `output` may be written; by default `require_replaceable`
    """
    output = _absolute(output)
    with _exclusive(output):
        with _explained(output):
            (require or require_replaceable)(output)
            _remove_leftovers(output)
            staging = _new_folder(output)
        try:
            with _full_disk_explained(output, staging):
                yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def publish(staging: Path, output: Path, manifest: Manifest) -> Manifest:
    """Records every file of `staging` in the manifest and publishes it as `publish_recorded` does.

    Returns the manifest as written.
    """
    with _explained(_absolute(output)):
        recorded = manifest.model_copy(update={"files": _records(staging)})
    publish_recorded(staging, output, recorded)
    return recorded


def publish_recorded(staging: Path, output: Path, manifest: Manifest) -> None:
    """Writes the manifest, syncs all and renames `staging`, made by `staging_folder`, to `output`.

    An engine already there is replaced in one step: whoever opens `output` finds the old one or the
    new one, and who has files of the old one open keeps them.
    """
    output = _absolute(output)
    with _explained(output):
        text = json.dumps(manifest.model_dump(mode="json"), indent=2, allow_nan=False) + "\n"
        (staging / MANIFEST_NAME).write_text(text, encoding="utf-8")
        sync_tree(staging)
        require_replaceable(output)
        move_into_place(staging, output)
        _sync(output.parent)


def remove_leftovers(folder: Path) -> None:
    """Removes what killed builds of any output left in `folder`; running ones are spared."""
    for output in {_output_of(leftover) for leftover in folder.glob(f".*{_STAGING}*")}:
        with contextlib.suppress(OutputBusyError), _exclusive(output):
            _remove_leftovers(output)


def discard(folder: Path) -> None:
    """Removes a folder of ours in a way that it disappears whole, under its lock."""
    with _exclusive(folder), _explained(folder):
        doomed = _new_folder(folder)
        folder.rename(doomed / "old")
        shutil.rmtree(doomed)


def require_replaceable(output: Path) -> None:
    """Raises BuildError unless `output` is free, an empty folder or an engine and nothing else."""
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise BuildError(f"{output} is a file or a link, not a folder: choose another output")
    if not output.is_dir() or not any(output.iterdir()):
        return
    own = _files_of_engine(output)
    if own is None:
        raise BuildError(f"{output} has files but is no engine: choose another output")
    foreign = sorted(path.name for path in output.iterdir() if path.name not in own)
    if foreign:
        raise BuildError(
            f"{output} is an engine that also holds {foreign[0]}, which the build would delete: "
            "move it away or choose another output"
        )


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Raises BuildError if the disk that will hold `folder` has less free space than needed."""
    free = _free_bytes(_absolute(folder))
    if free < needed_bytes:
        raise BuildError(
            f"the disk of {folder} is too full, {free:,} bytes are free and about {needed_bytes:,} "
            "needed: free some space or choose another output"
        )


@contextlib.contextmanager
def _full_disk_explained(output: Path, staging: Path) -> Iterator[None]:
    """Turns a full disk during the build, from whatever depth, into a BuildError with numbers."""
    try:
        yield
    except Exception as error:
        free = _free_bytes(output)
        # Native libraries report a failed write without its cause: then the disk itself tells.
        suspect = free < _FULL_BELOW and not isinstance(error, OctavoError)
        if not suspect and not _says_full(error):
            raise
        written = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
        raise BuildError(
            f"the disk of {output} is full, {free:,} bytes are free and more than {written:,} "
            "needed: free some space or choose another output"
        ) from error


@contextlib.contextmanager
def _explained(output: Path) -> Iterator[None]:
    """Turns what the system refuses of our own file operations into a BuildError."""
    try:
        yield
    except OSError as error:
        if _says_full(error):
            raise BuildError(
                f"the disk of {output} is full, {_free_bytes(output):,} bytes are free: "
                "free some space"
            ) from error
        raise BuildError(
            f"{output} cannot be written ({error.strerror}: {error.filename or output}): "
            "choose another output"
        ) from error


def _says_full(error: BaseException | None) -> bool:
    """Libraries wrap the system's error in their own: its chain still has it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _free_bytes(path: Path) -> int:
    """Of the disk that holds `path`, or will; another process may remove it at any time."""
    for place in (path, *path.parents):
        with contextlib.suppress(FileNotFoundError):
            return shutil.disk_usage(place).free
    raise AssertionError("the root of the file system is always there")


@contextlib.contextmanager
def _exclusive(output: Path) -> Iterator[None]:
    lock_path = output.parent / f".{output.name}.lock"
    with _explained(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(lock_path)
    if descriptor is None:
        raise OutputBusyError(
            f"another build of {output} is running: wait for it or choose another output"
        )
    try:
        yield
    finally:
        lock_path.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(path: Path) -> int | None:
    """Locks the file at `path`, None if another process has it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had the lock until now has removed the file: a lock on it excludes nobody.
            if os.fstat(descriptor).st_nlink > 0:
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _records(staging: Path) -> tuple[FileRecord, ...]:
    from octavo.backends.manifest import FileRecord

    files = sorted(path for path in staging.rglob("*") if path.is_file())
    files = [path for path in files if path != staging / MANIFEST_NAME]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        digests = list(pool.map(sha256_of, files))
    return tuple(
        FileRecord(
            path=path.relative_to(staging).as_posix(),
            size=path.stat().st_size,
            sha256=digest,
            chunks=chunk_digests(path),
        )
        for path, digest in zip(files, digests, strict=True)
    )


def move_into_place(staging: Path, output: Path) -> None:
    """Renames a folder; one that was there is left in `staging`, which its owner removes."""
    if not output.exists():
        staging.rename(output)
        return
    if _exchange(staging, output):
        return
    aside = _new_folder(output)
    output.rename(aside / "old")
    try:
        staging.rename(output)
    except BaseException:
        (aside / "old").rename(output)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step; False where the kernel, libc or file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    names = (os.fsencode(one), os.fsencode(other))
    status = renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_RENAME_EXCHANGE))
    if status == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _files_of_engine(folder: Path) -> set[str] | None:
    """Top-level names that an engine's manifest records, of whatever format; None if it is none."""
    try:
        content = json.loads((folder / MANIFEST_NAME).read_bytes())
        recorded = {Path(record["path"]).parts[0] for record in content["files"]}
        return {MANIFEST_NAME, *recorded} if isinstance(content["format_version"], int) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def sync_tree(folder: Path) -> None:
    """Waits until the disk has all of it."""
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _new_folder(output: Path) -> Path:
    # Not tempfile.mkdtemp: its folders are private, an engine gets the permissions of the umask.
    folder = output.parent / f".{output.name}{_STAGING}{secrets.token_hex(6)}"
    folder.mkdir()
    return folder


def _remove_leftovers(output: Path) -> None:
    for leftover in output.parent.glob(f".*{_STAGING}*"):
        if _output_of(leftover) == output:
            shutil.rmtree(leftover)


def _output_of(leftover: Path) -> Path:
    return leftover.with_name(leftover.name[1:].rpartition(_STAGING)[0])


def _absolute(path: Path) -> Path:
    """Absolute without following a link at the end: a link as output is refused, not followed."""
    path = path.expanduser()
    return path.parent.resolve() / path.name if path.name not in ("", "..") else path.resolve()

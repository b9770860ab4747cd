"""Files against their records: whole, or chunk by chunk."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from octavo.backends import manifest
from octavo.backends.bundle import chunk_digests, sha256_of, verify_files
from octavo.backends.manifest import FileRecord
from octavo.graphs.errors import BundleError

CONTENT = bytes(range(256)) * 10  # 2,560 bytes: three chunks of 1,000


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "CHUNK_BYTES", 1000)


def record(folder: Path, content: bytes = CONTENT) -> FileRecord:
    path = folder / "weights"
    path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    chunks = chunk_digests(path)
    return FileRecord(path="weights", size=len(content), sha256=digest, chunks=chunks)


def test_chunks_are_hashed_as_they_lie_in_the_file(tmp_path: Path) -> None:
    parts = [CONTENT[:1000], CONTENT[1000:2000], CONTENT[2000:]]
    expected = tuple(hashlib.sha256(part).hexdigest() for part in parts)
    assert record(tmp_path).chunks == expected
    assert sha256_of(tmp_path / "weights") == hashlib.sha256(CONTENT).hexdigest()


def test_a_file_of_one_chunk_has_only_its_own_hash(tmp_path: Path) -> None:
    assert record(tmp_path, CONTENT[:1000]).chunks == ()


@pytest.mark.parametrize("place", [0, 999, 1000, 1500, 2559])
def test_a_byte_changed_in_any_chunk_is_found(tmp_path: Path, place: int) -> None:
    written = record(tmp_path)
    verify_files(tmp_path, [written])
    changed = bytearray(CONTENT)
    changed[place] ^= 1
    (tmp_path / "weights").write_bytes(changed)
    with pytest.raises(BundleError, match="was changed after the build"):
        verify_files(tmp_path, [written])


def test_exchanged_chunks_are_found(tmp_path: Path) -> None:
    content = bytes(1000) + bytes([1]) * 1000
    written = record(tmp_path, content)
    (tmp_path / "weights").write_bytes(content[1000:] + content[:1000])
    with pytest.raises(BundleError, match="was changed after the build"):
        verify_files(tmp_path, [written])

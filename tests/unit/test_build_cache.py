"""The build cache returns what was stored, whole, and nothing else."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo.backends.bundle import read_manifest, verify_files
from octavo.backends.manifest import Limits, Manifest, Profile, Range
from octavo.backends.null.bundle import make_manifest
from octavo.compiler import build_cache
from octavo.compiler.publish import publish, staging_folder
from octavo.graphs.errors import BuildError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(build_cache.DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(build_cache.MAX_BYTES_VARIABLE, raising=False)
    return tmp_path / "cache"


def make_bundle(folder: Path, content: str = "weights") -> Manifest:
    limits = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, block_size=16)
    manifest = make_manifest(vocab_size=32, limits=limits)
    with staging_folder(folder) as staging:
        (staging / "drafter").mkdir()
        (staging / "drafter" / "head.bin").write_text(content)
        (staging / "model.onnx").write_text(content)
        return publish(staging, folder, manifest)


def key(number: int = 0) -> str:
    return build_cache.cache_key({"number": number})


def test_the_default_place_and_its_override(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert build_cache.cache_root() == cache
    monkeypatch.delenv(build_cache.DIRECTORY_VARIABLE)
    assert build_cache.cache_root() == Path.home() / ".cache" / "octavo" / "engines"


def test_a_key_covers_every_part_and_no_order() -> None:
    profile = Profile(name="decode", dims={"T": Range(min=1, opt=8, max=32)})
    parts = {"checkpoint": "ab", "dtype": "float32", "profiles": (profile,), "passes": {"b", "a"}}
    reference = build_cache.cache_key(parts)
    assert build_cache.cache_key(dict(reversed(parts.items()))) == reference
    wider = Profile(name="decode", dims={"T": Range(min=1, opt=8, max=64)})
    for change in ({"checkpoint": "ac"}, {"dtype": "bfloat16"}, {"profiles": (wider,)}):
        assert build_cache.cache_key({**parts, **change}) != reference


def test_a_key_changes_with_octavo_and_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = key()
    with monkeypatch.context() as patch:
        patch.setattr(build_cache, "source_digest", lambda: "another compiler")
        assert key() != reference
    with monkeypatch.context() as patch:
        patch.setattr(build_cache, "_library_versions", lambda: {"torch": "0"})
        assert key() != reference
    assert key() == reference


def test_a_part_without_a_canonical_form_is_refused() -> None:
    with pytest.raises(TypeError, match="object cannot be part of a cache key"):
        build_cache.cache_key({"part": object()})


def test_a_stored_engine_comes_back_whole(tmp_path: Path) -> None:
    assert build_cache.lookup(key()) is None
    assert build_cache.materialise(key(), tmp_path / "copy") is None
    assert not (tmp_path / "copy").exists()
    manifest = make_bundle(tmp_path / "engine")
    build_cache.store(key(), tmp_path / "engine")
    assert build_cache.lookup(key()) == build_cache.cache_root() / key()
    assert build_cache.lookup(key(1)) is None
    assert build_cache.materialise(key(), tmp_path / "copy") == manifest
    assert read_manifest(tmp_path / "copy") == manifest
    verify_files(tmp_path / "copy", manifest.files)


def test_an_edited_output_does_not_change_the_cache(tmp_path: Path) -> None:
    make_bundle(tmp_path / "engine")
    build_cache.store(key(), tmp_path / "engine")
    build_cache.materialise(key(), tmp_path / "copy")
    for folder in ("engine", "copy"):
        with (tmp_path / folder / "model.onnx").open("r+") as file:
            file.write("edited!")
    manifest = build_cache.materialise(key(), tmp_path / "second")
    assert manifest is not None
    assert (tmp_path / "second" / "model.onnx").read_text() == "weights"


@pytest.mark.parametrize("damage", ["no manifest", "broken manifest", "missing", "truncated"])
def test_a_damaged_entry_is_dropped(tmp_path: Path, damage: str) -> None:
    make_bundle(tmp_path / "engine")
    build_cache.store(key(), tmp_path / "engine")
    entry = build_cache.cache_root() / key()
    match damage:
        case "no manifest":
            (entry / "manifest.json").unlink()
        case "broken manifest":
            (entry / "manifest.json").write_text("{")
        case "missing":
            (entry / "model.onnx").unlink()
        case "truncated":
            (entry / "model.onnx").write_text("wei")
    assert build_cache.lookup(key()) is None
    assert list(build_cache.cache_root().iterdir()) == []


def test_an_entry_with_flipped_bytes_is_dropped_when_copied_out(tmp_path: Path) -> None:
    make_bundle(tmp_path / "engine")
    build_cache.store(key(), tmp_path / "engine")
    (build_cache.cache_root() / key() / "model.onnx").write_text("weighty")
    assert build_cache.materialise(key(), tmp_path / "copy") is None
    assert not (tmp_path / "copy").exists()
    assert list(build_cache.cache_root().iterdir()) == []


def test_what_was_used_longest_ago_is_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_bundle(tmp_path / "engine")
    size = sum(p.stat().st_size for p in (tmp_path / "engine").rglob("*") if p.is_file())
    monkeypatch.setenv(build_cache.MAX_BYTES_VARIABLE, str(2 * size))
    for number in range(2):
        build_cache.store(key(number), tmp_path / "engine")
        os.utime(build_cache.cache_root() / key(number), (1000 + number, 1000 + number))
    assert build_cache.lookup(key(0)) is not None
    build_cache.store(key(2), tmp_path / "engine")
    kept = [number for number in range(3) if build_cache.lookup(key(number)) is not None]
    assert kept == [0, 2]


def test_eviction_touches_only_entries(tmp_path: Path, cache: Path) -> None:
    (cache / "precious").mkdir(parents=True)
    (cache / "precious" / "thesis.txt").write_text("years of work")
    make_bundle(tmp_path / "engine")
    build_cache.store(key(), tmp_path / "engine")
    build_cache.evict(0)
    assert [path.name for path in cache.iterdir()] == ["precious"]


def test_an_engine_larger_than_the_cache_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_bundle(tmp_path / "engine")
    monkeypatch.setenv(build_cache.MAX_BYTES_VARIABLE, "0")
    build_cache.store(key(), tmp_path / "engine")
    assert build_cache.lookup(key()) is None


def test_a_bad_size_limit_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build_cache.MAX_BYTES_VARIABLE, "20GiB")
    with pytest.raises(BuildError, match="OCTAVO_CACHE_MAX_BYTES is '20GiB': give a number"):
        build_cache.max_bytes()


def test_leftovers_of_killed_builds_are_cleared(tmp_path: Path, cache: Path) -> None:
    leftover = cache / f".{key(7)}.staging-0123456789ab"
    leftover.mkdir(parents=True)
    (leftover / "model.onnx").write_text("half")
    make_bundle(tmp_path / "engine")
    build_cache.store(key(), tmp_path / "engine")
    assert [path.name for path in cache.iterdir()] == [key()]


def test_many_at_once_always_get_a_whole_engine_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_bundle(tmp_path / "engine", "w" * 100_000)
    monkeypatch.setenv(build_cache.MAX_BYTES_VARIABLE, "250000")  # room for one of three

    def work(number: int) -> bool:
        build_cache.store(key(number % 3), tmp_path / "engine")
        output = tmp_path / f"copy{number}"
        manifest = build_cache.materialise(key(number % 3), output)
        if manifest is not None:
            verify_files(output, manifest.files)
        return output.exists() == (manifest is not None)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(48)))
    whole = [k for k in map(key, range(3)) if build_cache.lookup(k) is not None]
    assert sorted(path.name for path in build_cache.cache_root().iterdir()) == sorted(whole)

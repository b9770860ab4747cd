"""An engine appears whole or not at all, whatever happens to the build."""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.backends.bundle import read_manifest, verify_files
from octavo.backends.manifest import Limits, Manifest
from octavo.backends.null.bundle import make_manifest
from octavo.compiler import publish as publishing
from octavo.compiler.publish import (
    OutputBusyError,
    check_free_space,
    publish,
    remove_leftovers,
    staging_folder,
)
from octavo.graphs.errors import BuildError


@pytest.fixture
def manifest() -> Manifest:
    limits = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, block_size=16)
    return make_manifest(vocab_size=32, limits=limits)


def build(output: Path, manifest: Manifest, content: str) -> Manifest:
    with staging_folder(output) as staging:
        (staging / "drafter").mkdir()
        (staging / "drafter" / "head.bin").write_text(content)
        (staging / "model.onnx").write_text(content)
        return publish(staging, output, manifest)


def only_engine_is_left(output: Path) -> bool:
    return [path.name for path in output.parent.iterdir()] == [output.name]


def test_published_engine_is_complete_and_recorded(tmp_path: Path, manifest: Manifest) -> None:
    output = tmp_path / "missing" / "parents" / "engine"
    written = build(output, manifest, "weights")
    assert read_manifest(output) == written
    verify_files(output, written.files)
    digest = hashlib.sha256(b"weights").hexdigest()
    assert [(f.path, f.size, f.sha256) for f in written.files] == [
        ("drafter/head.bin", 7, digest),
        ("model.onnx", 7, digest),
    ]
    assert only_engine_is_left(output)


def test_published_engine_has_the_permissions_of_the_umask(
    tmp_path: Path, manifest: Manifest
) -> None:
    build(tmp_path / "engine", manifest, "weights")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "engine").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("exchange", [True, False])
def test_replaced_engine_stays_readable_for_who_has_it_open(
    tmp_path: Path, manifest: Manifest, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(publishing, "_exchange", lambda *_: False)
    output = tmp_path / "engine"
    build(output, manifest, "old")
    with (output / "model.onnx").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        build(output, manifest, "new!")
        assert mapped[:] == b"old"
        mapped.close()
    assert (output / "model.onnx").read_text() == "new!"
    assert only_engine_is_left(output)


def test_a_failed_rename_puts_the_old_engine_back(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "engine"
    build(output, manifest, "old")
    monkeypatch.setattr(publishing, "_exchange", lambda *_: False)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if target == output and self.name != "old":
            raise OSError(errno.EIO, "Input/output error", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(BuildError, match="cannot be written"):
        build(output, manifest, "new")
    assert (output / "model.onnx").read_text() == "old"
    assert only_engine_is_left(output)


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    output = tmp_path / "engine"

    def fail() -> None:
        with staging_folder(output) as staging:
            (staging / "model.onnx").write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_a_valid_output(tmp_path: Path, manifest: Manifest) -> None:
    output = tmp_path / "engine"
    output.mkdir()
    build(output, manifest, "weights")
    assert (output / "manifest.json").is_file()


@pytest.mark.parametrize("manifest_text", [None, "{}", '{"format_version": 1}', "[1]", "no json"])
def test_a_folder_that_is_no_engine_is_never_replaced(
    tmp_path: Path, manifest: Manifest, manifest_text: str | None
) -> None:
    output = tmp_path / "thesis"
    output.mkdir()
    (output / "chapter.txt").write_text("years of work")
    if manifest_text is not None:
        (output / "manifest.json").write_text(manifest_text)
    with pytest.raises(BuildError, match="is no engine: choose another output"):
        build(output, manifest, "weights")
    assert (output / "chapter.txt").read_text() == "years of work"


def test_foreign_files_in_an_engine_are_not_deleted(tmp_path: Path, manifest: Manifest) -> None:
    output = tmp_path / "engine"
    build(output, manifest, "weights")
    (output / "notes.txt").write_text("mine")
    with pytest.raises(BuildError, match=r"also holds notes\.txt"):
        build(output, manifest, "weights")
    assert (output / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_or_link_as_output_is_refused(tmp_path: Path, manifest: Manifest, kind: str) -> None:
    output = tmp_path / "engine"
    if kind == "file":
        output.write_text("mine")
    else:
        (tmp_path / "elsewhere").mkdir()
        output.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BuildError, match="is a file or a link"):
        build(output, manifest, "weights")


def test_a_parent_that_is_a_file_is_explained(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cannot be written"):
        build(tmp_path / "file" / "engine", manifest, "weights")


HOLD_STAGING = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from octavo.compiler.publish import staging_folder

    with staging_folder(Path(sys.argv[1])) as staging:
        (staging / "model.onnx").write_text("half")
        print("staged", flush=True)
        time.sleep(60)
""")


@pytest.fixture
def running_build(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Another process in the middle of building `tmp_path/engine`."""
    output = tmp_path / "engine"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_STAGING, str(output)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "staged\n"
        yield output, process
        process.kill()


def test_a_second_build_of_one_output_fails_at_once(
    running_build: tuple[Path, subprocess.Popen[str]], manifest: Manifest
) -> None:
    output, process = running_build
    with pytest.raises(OutputBusyError, match=r"another build of .*engine is running: wait"):
        build(output, manifest, "weights")
    assert process.poll() is None
    remove_leftovers(output.parent)
    assert any(output.parent.glob(".engine.staging-*/model.onnx"))
    build(output.with_name("other"), manifest, "weights")


def test_a_killed_build_leaves_nothing_after_the_next(
    running_build: tuple[Path, subprocess.Popen[str]], manifest: Manifest
) -> None:
    output, process = running_build
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not output.exists()
    assert any(output.parent.glob(".engine.staging-*/model.onnx"))
    build(output, manifest, "weights")
    assert read_manifest(output).files
    assert only_engine_is_left(output)


def test_leftovers_of_other_outputs_are_kept(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / ".engine.staging-x.staging-y").mkdir()
    build(tmp_path / "engine", manifest, "weights")
    assert (tmp_path / ".engine.staging-x.staging-y").is_dir()
    remove_leftovers(tmp_path)
    assert only_engine_is_left(tmp_path / "engine")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_named_and_nothing_is_left(small_disk: Path, manifest: Manifest) -> None:
    output = small_disk / "engine"
    with (
        pytest.raises(BuildError, match=r"disk of .* is full, \d+ bytes are free and more than"),
        staging_folder(output) as staging,
    ):
        (staging / "model.onnx").write_bytes(bytes(2 << 20))
    assert list(small_disk.iterdir()) == []
    build(output, manifest, "small enough")


def test_a_disk_that_fills_while_replacing_keeps_the_old_engine(
    small_disk: Path, manifest: Manifest
) -> None:
    output = small_disk / "engine"
    build(output, manifest, "old")

    def fill_and_publish() -> None:
        with staging_folder(output) as staging:
            with (staging / "model.onnx").open("wb", buffering=0) as file:
                while file.write(bytes(4096)) == 4096:
                    pass
            publish(staging, output, manifest)

    with pytest.raises(BuildError, match="is full"):
        fill_and_publish()
    assert (output / "model.onnx").read_text() == "old"
    assert only_engine_is_left(output)


def test_a_full_disk_inside_a_library_is_recognised(tmp_path: Path) -> None:
    def save() -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise RuntimeError("saving failed") from error

    with pytest.raises(BuildError, match="is full"), staging_folder(tmp_path / "engine"):
        save()


def test_other_errors_of_the_build_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), staging_folder(tmp_path / "engine"):
        (tmp_path / "nothing").read_text()


def test_too_little_space_is_refused_early(tmp_path: Path) -> None:
    check_free_space(tmp_path / "not" / "there", 1)
    with pytest.raises(BuildError, match=r"too full, [\d,]+ bytes are free and about 1,152,921,"):
        check_free_space(tmp_path / "not" / "there", 1 << 60)


def test_a_folder_that_is_removed_meanwhile_has_its_parents_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process evicts a cache entry between a look at it and the question for its disk."""
    folder = tmp_path / "entry"
    folder.mkdir()
    usage = shutil.disk_usage

    def removed_first(path: Path) -> object:
        if folder.exists():
            folder.rmdir()
        return usage(path)

    monkeypatch.setattr(shutil, "disk_usage", removed_first)
    check_free_space(folder, 1)
    assert not folder.exists()


def test_the_manifest_is_plain_json(tmp_path: Path, manifest: Manifest) -> None:
    build(tmp_path / "engine", manifest, "weights")
    text = (tmp_path / "engine" / "manifest.json").read_text()
    assert json.loads(text)["format_version"] == 1
    assert str(tmp_path) not in text

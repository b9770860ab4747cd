"""`octavo export-triton`: what it writes, and what it refuses."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.graphs.errors import BuildError
from octavo.tools.main import app
from octavo.tools.triton import repository as writer
from octavo.tools.triton.repository import STUB, write_model
from octavo.tools.triton.stub.settings import Settings, read_settings
from octavo.tools.triton.stub.tensors import INPUTS, OUTPUTS


def export(engine: Path, output: Path, *arguments: str) -> Any:
    command = ["export-triton", str(engine), "--output", str(output), *arguments]
    return CliRunner().invoke(app, command)


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_repository_holds_all_that_a_server_needs(null_engine: Path, tmp_path: Path) -> None:
    done = export(null_engine, tmp_path / "repo")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == (
        f"{tmp_path / 'repo' / 'null'} is ready: {tmp_path / 'repo' / 'README.md'} says how to "
        "serve it\n"
    )
    stub = {f"null/1/{file.name}" for file in STUB.glob("*.py")}
    engine = {f"null/1/engine/{name}" for name in files(null_engine)}
    rest = {"README.md", "null/config.pbtxt", "null/1/model.json"}
    assert files(tmp_path / "repo") == stub | engine | rest
    assert "null/1/model.py" in stub
    assert (tmp_path / "repo/null/1/model.py").read_bytes() == (STUB / "model.py").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["repo"]


def test_options_are_those_of_the_engine(null_engine: Path, tmp_path: Path) -> None:
    done = export(
        null_engine,
        tmp_path,
        *("--name", "chat", "--link", "--kv-cache-memory", "1MiB", "--num-threads", "2"),
        *("--max-open-requests", "7", "--scheduling-policy", "priority", "--speculative", "ngram"),
    )
    assert done.exit_code == 0, done.stderr
    settings = read_settings(tmp_path / "chat" / "1")
    assert settings == Settings(
        engine=str(null_engine),
        python=sys.executable,
        engine_options={
            "kv_cache_memory": "1MiB",
            "scheduling_policy": "priority",
            "num_threads": 2,
            "speculative": {"method": "ngram"},
        },
        max_open_requests=7,
    )
    assert not (tmp_path / "chat" / "1" / "engine").exists()


def test_a_copied_engine_moves_with_its_repository(null_engine: Path, tmp_path: Path) -> None:
    export(null_engine, tmp_path / "repo")
    content = json.loads((tmp_path / "repo/null/1/model.json").read_text())
    assert content["engine"] == "engine"
    moved = (tmp_path / "repo").rename(tmp_path / "moved")
    assert read_settings(moved / "null/1").engine == str(moved / "null/1/engine")


def test_the_configuration_declares_every_tensor(null_engine: Path, tmp_path: Path) -> None:
    export(null_engine, tmp_path, "--name", "m", "--instances", "3")
    text = (tmp_path / "m" / "config.pbtxt").read_text()
    head, inputs, outputs = re.split(r"^(?:input|output) \[$", text, flags=re.MULTILINE)
    assert 'name: "m"' in head
    assert 'backend: "python"' in head
    assert "max_batch_size: 0" in head
    assert "decoupled: true" in head
    assert "count: 3 kind: KIND_CPU" in outputs
    tensor = re.compile(r'name: "(\w+)" data_type: (\w+) dims: \[ (-?1) \] (optional: true )?}')
    declared = {
        (one.name, one.data_type, str(one.size), "optional: true ") for one in INPUTS.values()
    }
    assert set(tensor.findall(inputs)) == declared
    declared = {(one.name, one.data_type, str(one.size), "") for one in OUTPUTS.values()}
    assert set(tensor.findall(outputs)) == declared


def test_a_second_model_is_added_and_a_first_one_replaced(
    null_engine: Path, tmp_path: Path
) -> None:
    repo = tmp_path / "repo"
    export(null_engine, repo, "--name", "one")
    export(null_engine, repo, "--name", "two", "--link")
    assert sorted(path.name for path in repo.iterdir()) == ["README.md", "one", "two"]
    assert "- `one`\n- `two`\n" in (repo / "README.md").read_text()
    (repo / "one" / "stale").touch()
    assert export(null_engine, repo, "--name", "one", "--instances", "2").exit_code == 0
    assert "count: 2" in (repo / "one" / "config.pbtxt").read_text()
    assert not (repo / "one" / "stale").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["repo"]


@pytest.mark.parametrize("there", [False, True])
def test_an_export_that_fails_leaves_everything_as_it_was(
    null_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    if there:
        export(null_engine, tmp_path / "repo", "--name", "one")
    before = files(tmp_path)

    def fail(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "readme", fail)
    assert export(null_engine, tmp_path / "repo", "--name", "two").exit_code == 1
    assert files(tmp_path) == before
    assert (tmp_path / "repo").exists() is there


def test_what_is_not_ours_is_not_touched(null_engine: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    done = export(null_engine, tmp_path / "full")
    assert done.exit_code == 1
    assert done.stderr == (
        f"error: {tmp_path / 'full'} has files but no model of `octavo export-triton`: "
        "choose another output\n"
    )
    export(null_engine, tmp_path / "repo", "--name", "one")
    (tmp_path / "repo" / "two").mkdir()
    done = export(null_engine, tmp_path / "repo", "--name", "two")
    assert "two is there and no model of `octavo export-triton`" in done.stderr
    (tmp_path / "file").touch()
    assert "is a file or a link" in export(null_engine, tmp_path / "file").stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--name", "a/b"), "'a/b' cannot name a model"),
        (("--name", ".hidden"), "'.hidden' cannot name a model"),
        (("--kv-cache-memory", "much"), "kv_cache_memory is 'much'"),
        (("--kv-cache-memory", "1"), "kv_cache_memory"),
        (("--scheduling-policy", "lifo"), "policy is 'lifo'"),
        (("--speculative", "eagle3"), "eagle3"),
    ],
)
def test_what_the_server_would_refuse_is_refused_at_once(
    null_engine: Path, tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    done = export(null_engine, tmp_path / "repo", *arguments)
    assert done.exit_code == 1
    assert sentence in done.stderr
    assert not (tmp_path / "repo").exists()


def test_a_folder_that_is_no_engine_is_refused(tmp_path: Path) -> None:
    done = export(tmp_path, tmp_path / "repo")
    assert done.exit_code == 1
    assert "is no engine, it has no manifest.json" in done.stderr


def test_an_interpreter_of_another_machine_is_noted(null_engine: Path, tmp_path: Path) -> None:
    done = export(null_engine, tmp_path / "repo", "--python", "/opt/octavo/bin/python")
    assert done.exit_code == 0
    assert done.stderr == (
        "note: /opt/octavo/bin/python is not on this machine: it must have Octavo where the "
        "server runs\n"
    )
    assert "--python /opt/octavo/bin/python" in (tmp_path / "repo" / "README.md").read_text()


def test_an_interpreter_without_octavo_is_refused(null_engine: Path, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    done = export(null_engine, tmp_path / "repo", "--python", str(bare))
    assert done.exit_code == 1
    assert f"{bare} cannot run Octavo's engines (ModuleNotFoundError: No module" in done.stderr
    assert not (tmp_path / "repo").exists()


def test_a_link_is_not_written_through(null_engine: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    settings = Settings(str(null_engine), sys.executable)
    with pytest.raises(BuildError, match="is a file or a link, not a folder"):
        write_model(tmp_path / "link", "m", settings, instances=1, copy_engine=False)

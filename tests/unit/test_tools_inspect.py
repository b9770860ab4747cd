"""`octavo inspect`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.tools.main import app


def test_json_holds_the_manifest_and_what_follows_from_it(null_engine: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(null_engine), "--json"])
    assert result.exit_code == 0
    shown = json.loads(result.stdout)
    assert shown["manifest"] == json.loads((null_engine / "manifest.json").read_text())
    assert shown["num_layers"] == 1
    # One layer: keys and values, 1 KV head, 16 tokens, rows of 2 floats.
    assert shown["cache_block_bytes"] == 2 * 1 * 16 * 2 * 4
    assert shown["total_size"] == (null_engine / "model.null").stat().st_size
    assert (shown["runs_here"], shown["reason"], shown["hashes_checked"]) == (True, None, False)


def test_tables_name_limits_bindings_profiles_and_files(null_engine: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(null_engine)])
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["max_model_len", "256"] in lines
    assert ["in", "query_start_loc", "int32", "[B+1]"] in lines
    assert any(line[:1] == ["mixed"] for line in lines)
    assert any(line[:1] == ["model.null"] for line in lines)


def test_check_refuses_a_tampered_file(null_engine: Path, tmp_path: Path) -> None:
    engine = shutil.copytree(null_engine, tmp_path / "engine")
    model = engine / "model.null"
    model.write_bytes(model.read_bytes()[:-1] + b"!")
    assert CliRunner().invoke(app, ["inspect", str(engine)]).exit_code == 0
    result = CliRunner().invoke(app, ["inspect", str(engine), "--check"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"error: {model} was changed after the build, its SHA-256 differs from the manifest's: "
        "copy or build the engine again\n"
    )


def test_an_engine_for_another_architecture_is_shown_and_said_to_be_so(
    null_engine: Path, tmp_path: Path
) -> None:
    engine = shutil.copytree(null_engine, tmp_path / "engine")
    manifest = json.loads((engine / "manifest.json").read_text())
    manifest["target"]["architecture"] = "sparc64"
    (engine / "manifest.json").write_text(json.dumps(manifest))
    result = CliRunner().invoke(app, ["inspect", str(engine), "--json"])
    shown = json.loads(result.stdout)
    assert result.exit_code == 0
    assert shown["runs_here"] is False
    assert "built for sparc64" in shown["reason"]


@pytest.mark.parametrize("content", [None, "{", '{"format_version": 1}', '{"format_version": 99}'])
def test_no_engine_or_a_damaged_manifest_is_one_sentence(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {tmp_path}")
    assert result.stderr.count("\n") == 1


def test_drafters_are_shown_with_what_they_take(null_engine: Path, tmp_path: Path) -> None:
    engine = shutil.copytree(null_engine, tmp_path / "engine")
    manifest = json.loads((engine / "manifest.json").read_text())
    manifest["drafters"] = [
        {"method": "ngram", "num_speculative_tokens": 8},
        {"method": "eagle", "num_speculative_tokens": 4, "path": "drafter/eagle"},
    ]
    sha256 = "0" * 64
    manifest["files"] += [
        {"path": "drafter/eagle/manifest.json", "size": 1024, "sha256": sha256},
        {"path": "drafter/eagle/model.onnx", "size": 3 << 20, "sha256": sha256},
        {"path": "drafter/eagle3/model.onnx", "size": 9 << 20, "sha256": sha256},
    ]
    (engine / "manifest.json").write_text(json.dumps(manifest))
    result = CliRunner().invoke(app, ["inspect", str(engine)])
    assert result.exit_code == 0
    lines = {" ".join(line.split()) for line in result.stdout.splitlines()}
    assert lines >= {
        "drafter ngram up to 8 tokens",
        "drafter eagle up to 4 tokens, 3.0 MiB",
    }


def test_passes_say_what_they_did_and_why_not(null_engine: Path, tmp_path: Path) -> None:
    engine = shutil.copytree(null_engine, tmp_path / "engine")
    manifest = json.loads((engine / "manifest.json").read_text())
    manifest["quantization"], manifest["kv_cache_dtype"] = "int8", "int8"
    manifest["passes"] = [
        {"name": "fuse_norms", "matches": 61},
        {"name": "quantize_int8", "matches": 2, "notes": ["2 x 8 bits"], "skipped": ["1 x small"]},
        {"name": "conv1d", "matches": 0},
    ]
    (engine / "manifest.json").write_text(json.dumps(manifest))
    result = CliRunner().invoke(app, ["inspect", str(engine)])
    assert result.exit_code == 0
    lines = {" ".join(line.split()) for line in result.stdout.splitlines()}
    assert lines >= {
        "fuse norms 61",
        "quantize int8 2 2 x 8 bits 1 x small",
        "conv1d 0 nothing of the kind in this model",
        "quantization weights int8, activations int8 in groups of 32",
        "cache int8, reference layout, 192 B a block",
    }

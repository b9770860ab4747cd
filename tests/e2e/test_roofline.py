"""The figures of `octavo.tools.bench.roofline` from a checkpoint on, on what every machine has."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from octavo.tools.bench import roofline
from tests.parity import tiny_models


def test_a_tiny_model_on_the_cpu(tmp_path: Path) -> None:
    longest = roofline.PREFILL
    path, _ = tiny_models.checkpoint(tmp_path / "tiny", "llama", max_position_embeddings=longest)
    command = ["--device", "cpu", "--dtype", "float32", "--backend", "onnxruntime"]
    command += ["--model", str(path), "--root", str(tmp_path), "--runs", "1"]
    output = tmp_path / "reports" / "roofline.md"
    result = CliRunner().invoke(roofline.app, [*command, "--output", str(output)])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert [row["step"] for row in report["results"]] == [step.name for step in roofline.STEPS]
    for row in report["results"]:
        assert min(row["bandwidth_share"], row["product_share"], row["milliseconds"]) > 0
        assert f"| onnxruntime | {row['step']} |" in output.read_text()

"""`octavo bench served` and `octavo bench serve` against real servers; no figure is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.tools.main import app
from tests.server_process import serving
from tests.unit.word_bundles import LIMITS, write_word_engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = "{{ messages[0].content }}"
    limits = LIMITS.model_copy(update={"max_num_seqs": 32})
    folder = tmp_path_factory.mktemp("engines") / "words"
    return write_word_engine(folder, chat_template=template, limits=limits)


def test_the_server_is_measured_beside_the_engine_and_overloaded(
    engine: Path, tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    arguments = ["--rounds=1", "--overload-seconds=0.3", f"--output={file}"]
    result = CliRunner().invoke(app, ["bench", "served", str(engine), *arguments])
    assert result.exit_code == 0, result.stderr
    report = json.loads(file.read_text())
    assert report == json.loads(result.stdout)
    rates = report["streams"]["tokens_per_s"]
    (served,), (bare,) = rates["served"], rates["bare"]
    assert report["streams"]["served_to_bare"]["median"] == served / bare
    assert report["overload"]["full"]["requests"]["finished"] == 128
    twice = report["overload"]["twice"]["requests"]
    assert (twice["left"], twice["failed"]) == (0, 0)
    assert twice["finished"] > 0


def test_an_engine_that_runs_fewer_streams_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = write_word_engine(tmp_path / "words")
    arguments = ["--rounds=1", "--overload-seconds=0.1"]
    result = CliRunner().invoke(app, ["bench", "served", str(engine), *arguments])
    assert result.exit_code == 1
    assert result.stderr.endswith("error: the server did not start: what it says is above\n")
    assert "max_num_seqs is 32" in capfd.readouterr().err


def test_load_is_put_on_a_server(engine: Path, tmp_path: Path) -> None:
    plot, output = tmp_path / "plot.svg", tmp_path / "report.json"
    with serving(engine) as server:
        options = [
            f"--url={server.url}", "--num-requests=20", "--input-len=8", "--output-len=10",
            "--sweep=50,100", "--slo=e2e=60s", f"--plot={plot}", f"--output={output}", "--chat",
        ]  # fmt: skip
        result = CliRunner().invoke(app, ["bench", "serve", *options])
        assert result.exit_code == 0, result.stderr
    runs = json.loads(output.read_text())
    assert [run["plan"]["request_rate"] for run in runs] == [50, 100]
    for run in runs:
        assert run["requests"] == {"finished": 20, "refused": 0, "left": 0, "failed": 0}
        assert run["goodput"]["share"] == 1
        assert run["output_throughput"] * run["duration_s"] == pytest.approx(200)
    assert plot.read_text().startswith("<svg")
    assert "Latency, ms" in result.stderr

"""`python -m octavo.tools.bench`, on an engine of the null backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.graphs.errors import OctavoError
from octavo.tools.bench import scenario
from octavo.tools.bench.__main__ import app
from octavo.tools.bench.measure import Result

SIZES = {"num_seqs": 2, "prompt_tokens": 40, "output_tokens": 5}
SCENARIOS: list[dict[str, Any]] = [
    {"kind": "import_time", "name": "import", "module": "octavo.graphs.errors", "runs": 3},
    {"kind": "first_token", "name": "first-token", "prompt_tokens": 8, "runs": 1, "at_most": 60},
    {"kind": "throughput", "name": "throughput", **SIZES, "runs": 3, "at_least": 1e12},
    {"kind": "time_to_first_token", "name": "ttft", "prompt_tokens": 200, "runs": 3},
    {"kind": "peak_memory", "name": "memory", **SIZES, "kv_cache_memory": "1MiB", "runs": 1},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for entry in SCENARIOS:
        text = json.dumps({"description": "a test", **entry})
        (tmp_path / f"{entry['name']}.json").write_text(text)
    return tmp_path


def test_every_kind_is_measured(null_engine: Path, folder: Path) -> None:
    output = folder / "reports" / "bench.json"
    command = ["--engine", str(null_engine), "--scenarios", str(folder), "--output", str(output)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert json.loads(output.read_text()) == report
    results = {entry["name"]: entry for entry in report["results"]}
    assert {name: len(entry["values"]) for name, entry in results.items()} == {
        entry["name"]: entry["runs"] for entry in SCENARIOS
    }
    assert all(value > 0 for entry in results.values() for value in entry["values"])
    assert {name: entry["meets_target"] for name, entry in results.items()} == {
        "import": None,
        "first-token": True,
        "throughput": False,
        "ttft": None,
        "memory": None,
    }
    assert results["ttft"]["unit"] == "ms"
    assert report["machine"]["cores"] >= 1
    assert "octavo" in report["versions"]
    assert "throughput" in result.stderr


def test_only_chooses_scenarios(null_engine: Path, folder: Path) -> None:
    command = ["--engine", str(null_engine), "--scenarios", str(folder)]
    result = CliRunner().invoke(app, [*command, "--only", "import"])
    assert [entry["name"] for entry in json.loads(result.stdout)["results"]] == ["import"]
    result = CliRunner().invoke(app, [*command, "--only", "export"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: there is no scenario 'export': choose from ")


def test_a_failing_process_is_one_sentence(null_engine: Path, tmp_path: Path) -> None:
    entry = {"kind": "import_time", "name": "x", "description": "", "module": "octavo.nothing"}
    (tmp_path / "x.json").write_text(json.dumps(entry))
    command = ["--engine", str(null_engine), "--scenarios", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].endswith("No module named 'octavo.nothing'")


def test_the_medians_target_decides() -> None:
    result = Result("n", "", "s", (1.0, 2.0, 9.0), 2.0, at_most=2.0, at_least=None)
    assert result.meets_target is True
    assert Result("n", "", "s", (1.0,), 1.0, at_most=None, at_least=1.5).meets_target is False


def test_the_shipped_scenarios_are_those_promised() -> None:
    shipped = {one.name: one for one in scenario.load()}
    assert set(shipped) == {
        "import",
        "first-token",
        "build",
        "throughput-1",
        "throughput-8",
        "throughput-32",
        "ttft-512",
        "memory",
    }
    targets = {name: one.at_most for name, one in shipped.items() if one.at_most is not None}
    assert targets == {"import": 0.3, "first-token": 1.5, "build": 60.0}


@pytest.mark.parametrize(
    "content",
    [
        "{",
        '{"kind": "flight"}',
        '{"kind": "build_time", "name": "b", "description": "", "runs": 0}',
        '{"kind": "build_time", "name": "b", "description": "", "speed": 1}',
    ],
)
def test_a_wrong_scenario_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "wrong.json").write_text(content)
    with pytest.raises(OctavoError, match=r"^wrong\.json is no scenario"):
        scenario.load(tmp_path)


def test_a_folder_without_scenarios_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OctavoError, match="holds no scenarios"):
        scenario.load(tmp_path)

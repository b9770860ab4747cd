"""`octavo bench`, on an engine of the null backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.graphs.errors import OctavoError
from octavo.tools.bench import scenario
from octavo.tools.bench.command import app
from octavo.tools.bench.measure import Result

SIZES = {"num_seqs": 2, "prompt_tokens": 40, "output_tokens": 5}
SCENARIOS: list[dict[str, Any]] = [
    {"kind": "import_time", "name": "import", "module": "octavo.graphs.errors", "runs": 3},
    {"kind": "first_token", "name": "first-token", "prompt_tokens": 8, "runs": 1, "at_most": 60},
    {"kind": "throughput", "name": "throughput", **SIZES, "runs": 3, "at_least": 1e12},
    {"kind": "time_to_first_token", "name": "ttft", "prompt_tokens": 200, "runs": 3},
    {"kind": "latency", "name": "latency", **SIZES, "runs": 2},
    {
        "kind": "prefix",
        "name": "prefix",
        "shared_tokens": 64,
        "own_tokens": 10,
        "num_warm": 2,
        "runs": 3,
    },
    {"kind": "host_time", "name": "host-time", **SIZES, "runs": 1},
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
    command = ["all", "--engine", str(null_engine), "--scenarios", str(folder)]
    result = CliRunner().invoke(app, [*command, "--output", str(output)])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert json.loads(output.read_text()) == report
    results = {(entry["name"], entry["metric"]): entry for entry in report["results"]}
    assert {key: len(entry["values"]) for key, entry in results.items()} == {
        ("import", "import"): 3,
        ("first-token", "first token"): 1,
        ("throughput", "throughput"): 3,
        ("ttft", "TTFT"): 3,
        ("latency", "TTFT"): 2 * 2,  # runs x requests
        ("latency", "between tokens"): 2 * 2,
        ("latency", "end to end"): 2 * 2,
        ("prefix", "reduction"): 3,
        ("prefix", "cold TTFT"): 3,
        ("prefix", "warm TTFT"): 3 * 2,
        ("prefix", "cached tokens"): 3 * 2,
        # Steps of 40 + 24, 1 + 16, 1 + 1 three times, and 1 token.
        ("host-time", "host time"): 3,
        ("host-time", "step"): 3,
        ("memory", "resident"): 1,
    }
    assert set(results["prefix", "cached tokens"]["values"]) == {64.0}
    positive = [entry for (_, metric), entry in results.items() if metric != "reduction"]
    assert all(value > 0 for entry in positive for value in entry["values"])
    assert {key: entry["meets_target"] for key, entry in results.items()} == {
        key: {"first-token": True, "throughput": False}.get(key[0]) for key in results
    }
    assert results["ttft", "TTFT"]["unit"] == "ms"
    assert report["machine"]["cores"] >= 1
    assert "octavo" in report["versions"]
    assert "throughput" in result.stderr


def test_only_chooses_scenarios(null_engine: Path, folder: Path) -> None:
    command = ["all", "--engine", str(null_engine), "--scenarios", str(folder)]
    result = CliRunner().invoke(app, [*command, "--only", "import"])
    assert [entry["name"] for entry in json.loads(result.stdout)["results"]] == ["import"]
    result = CliRunner().invoke(app, [*command, "--only", "export"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: there is no scenario 'export': choose from ")


def test_a_failing_process_is_one_sentence(null_engine: Path, tmp_path: Path) -> None:
    entry = {"kind": "import_time", "name": "x", "description": "", "module": "octavo.nothing"}
    (tmp_path / "x.json").write_text(json.dumps(entry))
    command = ["all", "--engine", str(null_engine), "--scenarios", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].endswith("No module named 'octavo.nothing'")


@pytest.mark.parametrize("kind", ["latency", "throughput", "prefix"])
def test_a_command_for_each_kind(null_engine: Path, folder: Path, kind: str) -> None:
    result = CliRunner().invoke(app, [kind, str(null_engine), "--scenarios", str(folder)])
    assert result.exit_code == 0, result.stderr
    assert {entry["name"] for entry in json.loads(result.stdout)["results"]} == {kind}


def test_a_folder_without_the_kind_is_refused(null_engine: Path, folder: Path) -> None:
    (folder / "prefix.json").unlink()
    result = CliRunner().invoke(app, ["prefix", str(null_engine), "--scenarios", str(folder)])
    assert result.exit_code == 1
    assert "holds no scenarios of the kind 'prefix'" in result.stderr


def test_the_medians_target_decides() -> None:
    result = Result("n", "m", "s", (1.0, 2.0, 9.0), 2.0, at_most=2.0)
    assert result.meets_target is True
    assert Result("n", "m", "s", (1.0,), 1.0, at_least=1.5).meets_target is False


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
        "latency-1",
        "latency-8",
        "prefix-448",
        "prefix-922",
        "host-time-1",
        "host-time-32",
        "memory",
        "copy",
        "copy-8",
        "free",
        "free-6",
        "inductor-1",
    }
    targets = {name: one.at_most for name, one in shipped.items() if one.at_most is not None}
    assert targets == {
        "import": 0.3,
        "first-token": 1.5,
        "build": 60.0,
        "host-time-1": 0.15,
        "host-time-32": 1.0,
        "inductor-1": 1.5,
    }


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

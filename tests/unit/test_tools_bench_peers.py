"""`python -m octavo.tools.bench.peers`: scenarios, protocol, ratios and tables, without a peer."""

from __future__ import annotations

import fcntl
import io
import json
import math
import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from octavo.graphs.errors import OctavoError
from octavo.tools.bench.peers import environments, process, quality, report
from octavo.tools.bench.peers import scenario as scenarios
from octavo.tools.bench.peers.__main__ import app
from octavo.tools.bench.peers.catalog import ENGINES, LLAMA, MODELS, PEERS, SMOLLM2, Peer
from octavo.tools.bench.peers.measure import Workspace, prompts
from octavo.tools.bench.peers.process import DriverProcess, PeerError
from octavo.tools.bench.peers.results import Measurement, Quality, Results

EIGHT = {
    "kind": "throughput",
    "name": "eight",
    "description": "8 x (4 + 6)",
    "num_seqs": 8,
    "prompt_tokens": 4,
    "output_tokens": 6,
    "runs": 3,
    "targets": {SMOLLM2: {"int8": 1.5}},
}
FIRST = {
    "kind": "time_to_first_token",
    "name": "first",
    "description": "first token of 5",
    "prompt_tokens": 5,
    "targets": {SMOLLM2: {"int8": 0.5}},
}
DRIVER = """
import os
import sys


class Driver:
    @staticmethod
    def versions():
        return {"fake": "1.0"}

    @staticmethod
    def prepare(model, output, options):
        raise ValueError(f"cannot convert {model}")

    def __init__(self, artefact, num_threads, options):
        print("a library talks to standard output")
        self.first = options["first"]

    def generate(self, prompts, max_tokens):
        if max_tokens == 13:
            sys.stderr.write("out of luck\\n")
            sys.stderr.flush()
            os._exit(3)
        return 0.5, [[self.first + i for i in range(max_tokens)] for _ in prompts]

    def score(self, token_ids):
        return [-1.0] * (len(token_ids) - 1), token_ids[1:]
"""


def scenario(entry: dict[str, Any]) -> scenarios.Scenario:
    return scenarios.parser.validate_python(entry)


def measurement(engine: str, *values: float, name: str = "eight", run: str = "1") -> Measurement:
    return Measurement(
        model=SMOLLM2, engine=engine, scenario=name, run=run, threads=2, values=values
    )


def results(*measurements: Measurement) -> Results:
    return Results(measurements=list(measurements))


# Scenarios


def test_shipped_scenarios_have_the_sizes_and_targets_that_were_agreed() -> None:
    found = {one.name: one for one in scenarios.load()}
    assert {name: scenarios.sizes(one) for name, one in found.items()} == {
        "throughput-1": (1, 128, 128),
        "throughput-8": (8, 128, 64),
        "throughput-32": (32, 128, 32),
        "ttft-512": (1, 512, 1),
    }
    names = ("throughput-1", "throughput-8", "throughput-32", "ttft-512")
    targets = {
        (model, precision): [found[name].targets[model][precision] for name in names]
        for model in MODELS
        for precision in found["ttft-512"].targets[model]
    }
    assert targets == {
        (SMOLLM2, "fp32"): [1.15, 1.05, 1.0, 1.05],
        (SMOLLM2, "int8"): [1.65, 1.5, 1.5, 0.65],
        (SMOLLM2, "int4"): [1.4, 1.15, 1.15, 0.8],
        (LLAMA, "int8"): [1.05, 1.2, 1.3, 0.8],
    }
    assert all(one.runs >= 3 for one in found.values())


def test_value_counts_generated_tokens_or_milliseconds() -> None:
    assert scenarios.value(scenario(EIGHT), 0.5) == 8 * 6 / 0.5 == 96
    assert scenarios.value(scenario(FIRST), 0.25) == 250
    assert scenarios.unit(scenario(EIGHT)) == "tokens/s"
    assert scenarios.unit(scenario(FIRST)) == "ms"


def test_wrong_scenario_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(json.dumps({**EIGHT, "num_seqs": 0}))
    with pytest.raises(OctavoError, match=r"bad\.json is no scenario: throughput\.num_seqs"):
        scenarios.load(tmp_path)


def test_folder_without_scenarios_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OctavoError, match="holds no scenarios"):
        scenarios.load(tmp_path)


def test_prompts_are_the_same_for_every_engine_and_differ_between_runs() -> None:
    model = MODELS[SMOLLM2]
    first = prompts("run 1", model, 3, 20)
    assert first == prompts("run 1", model, 3, 20)
    assert first != prompts("run 2", model, 3, 20)
    assert [len(row) for row in first] == [20, 20, 20]
    assert all(100 <= token < model.vocab_size for row in first for token in row)


# Catalogue


def test_catalogue_is_consistent() -> None:
    names = [engine.name for engine in ENGINES]
    assert len(set(names)) == len(names)
    for engine in ENGINES:
        assert set(engine.models) <= set(MODELS)
        assert engine.name.startswith(engine.peer + "-")
        assert (process.DRIVERS / f"{engine.peer}.py").exists()
        if PEERS[engine.peer].in_own_environment:
            assert (environments.REQUIREMENTS / f"{engine.peer}.txt").exists()


@pytest.mark.parametrize(
    "path", sorted(environments.REQUIREMENTS.glob("*.txt")), ids=lambda p: p.name
)
def test_requirements_are_pinned_and_without_cuda(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines
    assert all(line.count("==") == 1 and "://" not in line for line in lines)
    assert not [line for line in lines if line.lower().startswith(("nvidia", "cuda"))]


# Ratios, worked out by hand


def test_ratio_takes_the_best_peer_of_the_same_precision() -> None:
    found = results(
        measurement("octavo-int8", 300, 330, 310),
        measurement("openvino-int8", 200, 100, 210),
        measurement("llamacpp-q8_0", 155, 150, 160),
        measurement("openvino-int4", 900),
    )
    compared = report.compare(found, SMOLLM2, scenario(EIGHT), "int8")
    assert compared is not None
    assert compared.peer.engine == "openvino-int8"
    assert compared.ratio == 310 / 200
    assert compared.target == 1.5
    assert compared.meets_target is True


def test_less_time_to_the_first_token_is_better() -> None:
    found = results(
        measurement("octavo-int8", 60, name="first"),
        measurement("openvino-int8", 100, name="first"),
        measurement("llamacpp-q8_0", 80, name="first"),
    )
    compared = report.compare(found, SMOLLM2, scenario(FIRST), "int8")
    assert compared is not None
    assert compared.peer.engine == "llamacpp-q8_0"
    assert compared.ratio == 0.75
    assert compared.meets_target is False


def test_no_ratio_without_both_sides() -> None:
    ours, theirs = measurement("octavo-fp32", 1), measurement("openvino-fp32", 1)
    assert report.compare(results(ours), SMOLLM2, scenario(EIGHT), "fp32") is None
    assert report.compare(results(theirs), SMOLLM2, scenario(EIGHT), "fp32") is None
    compared = report.compare(results(ours, theirs), SMOLLM2, scenario(EIGHT), "fp32")
    assert compared is not None
    assert compared.target is None
    assert compared.meets_target is None


# Tables


def test_table() -> None:
    assert report.table(["a", "b>"], [["x", "1"], ["y", "2"]]) == (
        "| a | b |\n| --- | ---: |\n| x | 1 |\n| y | 2 |\n"
    )


def test_report_shows_medians_ratios_quality_and_reasons() -> None:
    found = results(
        measurement("octavo-int8", 300, 330, 310, run="2"),
        measurement("openvino-int8", 200, 99.96, 210),
    )
    found.machine = {"cores": "2"}
    found.versions = {"openvino": {"openvino": "1.2"}}
    found.unavailable = {f"{SMOLLM2}/vllm-fp32": "no wheel"}
    for engine, perplexity, agreement in (("reference", 6.5, 1), ("openvino-int8", 6.55, 0.954)):
        found.add_quality(
            Quality(
                model=SMOLLM2,
                engine=engine,
                run="1",
                num_predictions=9,
                perplexity=perplexity,
                agreement=agreement,
            )
        )
    text = report.markdown(found, [scenario(EIGHT), scenario(FIRST)], plotted=True)
    lines = text.splitlines()
    assert "| **Octavo** | int8 | 310 (300-330) | - | - | - |" in lines
    assert "| OpenVINO GenAI | int8 | 200 (100.0-210) | - | 6.550 | 95.4 % |" in lines
    assert "| transformers | fp32 | - | - | 6.500 | 100 % |" in lines
    assert (
        "| int8 | 8 x (4 + 6), tokens/s | 310 | openvino-int8 | 200 | 1.55 \\* | >= 1.5 | yes |"
        in lines
    )
    assert "\\* measured in different runs: the machine may have changed between them." in lines
    assert "- vllm-fp32: no wheel" in lines
    assert "| OpenVINO GenAI | openvino 1.2 |" in lines
    assert "![medians of every engine](benchmarks.svg)" in lines
    assert any(line.startswith("Machine: cores 2. Threads of every engine: 2.") for line in lines)


def test_render_writes_the_report_of_a_partial_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise PeerError("no network")

    monkeypatch.setattr(environments, "install", refuse)
    results(measurement("octavo-int8", 5.25)).write(tmp_path / "results.json")
    output = tmp_path / "docs" / "report.md"
    command = ["--render", "--root", str(tmp_path), "--output", str(output)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "no picture: no network" in done.stderr
    assert "# Octavo beside other engines" in output.read_text()


def test_unknown_engine_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["--only", "abacus-int2", "--root", str(tmp_path)])
    assert done.exit_code == 1
    assert "there is no engine 'abacus-int2': choose from octavo-fp32, " in done.stderr


# Results


def test_results_keep_the_last_of_each_engine_and_scenario(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    assert Results.read(path) == Results()
    found = Results()
    found.add(measurement("octavo-int8", 1, 9, 2))
    found.add(measurement("octavo-int8", 7, name="first"))
    found.add(measurement("octavo-int8", 3, 5, run="2"))
    found.write(path)
    again = Results.read(path)
    assert again == found
    assert len(again.measurements) == 2
    kept = again.measurement(SMOLLM2, "octavo-int8", "eight")
    assert kept is not None
    assert (kept.run, kept.median) == ("2", 4)


def test_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"other": 1}')
    with pytest.raises(OctavoError, match="holds no results"):
        Results.read(path)


# Quality, worked out by hand


def test_perplexity_and_agreement() -> None:
    assert quality.perplexity([math.log(0.5), math.log(0.125)]) == pytest.approx(4)
    assert quality.agreement([1, 2, 3, 4], [1, 5, 3, 4]) == 0.75


def test_text_is_about_as_long_as_it_should_be() -> None:
    assert 1000 < len(quality.TEXT.read_text().split()) < 1300


def test_score_of_logits() -> None:
    """Rows of logits log(p) give back p; the last row predicts nothing that is known."""
    serve = runpy.run_path(str(process.DRIVERS / "serve.py"))
    rows = np.log(np.array([[0.5, 0.25, 0.25], [0.125, 0.125, 0.75], [1, 1, 1]], np.float32)) + 3
    log_probabilities, best = serve["score"](rows, [0, 1, 2])
    assert log_probabilities == pytest.approx([math.log(0.25), math.log(0.75)], rel=1e-6)
    assert best == [0, 2]
    long = np.zeros((300, 2), np.float32)
    log_probabilities, best = serve["score"](long, [0] * 300)
    assert log_probabilities == pytest.approx([math.log(0.5)] * 299)
    assert len(best) == 299


# Protocol


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DriverProcess]:
    """A driver of a peer that runs where the tests run."""
    (tmp_path / "reference.py").write_text(DRIVER)
    (tmp_path / "serve.py").write_bytes((process.DRIVERS / "serve.py").read_bytes())
    monkeypatch.setattr(process, "DRIVERS", tmp_path)
    peer = Peer("reference", "Fake", (), environment={"FAKE_ROOT": "{root}/x"})
    with DriverProcess(peer, tmp_path, 1, tmp_path / "logs" / "fake.log") as started:
        yield started


def test_driver_answers(driver: DriverProcess, tmp_path: Path) -> None:
    assert driver.request("versions") == {"fake": "1.0"}
    driver.request("load", artefact="a", num_threads=1, options={"first": 7})
    driver.pause()
    driver.resume()
    answer = driver.request("generate", prompts=[[1, 2], [3, 4]], max_tokens=3)
    assert answer == {"seconds": 0.5, "token_ids": [[7, 8, 9], [7, 8, 9]]}
    answer = driver.request("score", token_ids=[5, 6, 7])
    assert answer == {"log_probabilities": [-1.0, -1.0], "best": [6, 7]}
    assert "a library talks" in (tmp_path / "logs" / "fake.log").read_text()


def test_driver_that_fails_says_why(driver: DriverProcess) -> None:
    with pytest.raises(PeerError, match="failed to prepare: ValueError: cannot convert m"):
        driver.request("prepare", model="m", output="o", options={})
    with pytest.raises(PeerError, match="there is no operation 'dance'"):
        driver.request("dance")


def test_driver_that_dies_or_hangs_is_an_error(driver: DriverProcess) -> None:
    driver.request("load", artefact="a", num_threads=1, options={"first": 7})
    driver.pause()
    with pytest.raises(PeerError, match=r"did not generate within 0\.1 seconds"):
        driver.request("generate", prompts=[[1]], max_tokens=13, timeout=0.1)
    driver.resume()
    with pytest.raises(PeerError, match=r"ended with 3 instead of `score`: out of luck"):
        driver.request("score", token_ids=[1, 2])


def test_serve_reads_lines_and_writes_answers() -> None:
    serve = runpy.run_path(str(process.DRIVERS / "serve.py"))
    answers = io.StringIO()
    serve["serve"](serve["Server"](object), ['{"op": "versions"}\n', "nonsense\n"], answers)
    first, second = (json.loads(line) for line in answers.getvalue().splitlines())
    assert first == {"ok": True, "result": {}}
    assert second["ok"] is False
    assert second["error"].startswith("JSONDecodeError")


def test_environment_has_the_peers_variables(tmp_path: Path) -> None:
    peer = Peer("vllm", "Fake", (), environment={"FAKE_CACHE": "{root}/cache"})
    variables = process.environment(peer, tmp_path, 3)
    assert variables["FAKE_CACHE"] == f"{tmp_path.resolve()}/cache"
    assert variables["OMP_NUM_THREADS"] == "3"
    assert variables["VIRTUAL_ENV"] == str(tmp_path.resolve())
    assert "PYTHONPATH" not in variables


def test_one_run_at_a_time(tmp_path: Path) -> None:
    """The lock lives as long as the process does: here until the file is closed."""
    descriptor = os.open(tmp_path / ".lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(OctavoError, match="another run measures in"):
        Workspace(tmp_path, 2, "1").claim()
    os.close(descriptor)


def test_paths_of_a_workspace(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, 2, "1")
    model, engines = MODELS[SMOLLM2], {engine.name: engine for engine in ENGINES}
    folder = tmp_path / "artefacts" / SMOLLM2
    assert workspace.artefact(model, engines["llamacpp-q4_1"]) == folder / "llamacpp-q4_1.gguf"
    assert workspace.artefact(model, engines["octavo-int8"]) == folder / "octavo-int8"

"""`octavo bench speculative` on an engine of the null backend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.graphs.errors import OctavoError
from octavo.runtime import LLM
from octavo.tools.bench import scenario as scenarios
from octavo.tools.bench.command import app
from octavo.tools.bench.speculative import Comparison
from tests.unit.drafters import ScriptedDrafter, speculate
from tests.unit.llm_engines import alone
from tests.unit.runtime_bundles import write_text_engine

SCENARIO = {
    "kind": "speculative",
    "name": "tiny",
    "description": "two prompts",
    "prompts": ["hello", "river"],
    "output_tokens": 11,
    "runs": 3,
    "speculative": {"method": "ngram", "num_speculative_tokens": 4},
}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_text_engine(tmp_path / "engine")


@pytest.fixture
def llm(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle, speculative="ngram") as made:
        yield made


def values(**changes: Any) -> dict[str, Any]:
    return scenarios.parser.validate_python({**SCENARIO, **changes}).model_dump()


def test_what_is_measured_of_drafts_that_all_hold(llm: LLM) -> None:
    """Eleven tokens: one of the prefill, then two verifications of five."""
    speculate(
        llm.engine,
        ScriptedDrafter(lambda r, most: alone([*r.prompt_token_ids, *r.output_token_ids], most)),
    )
    series = Comparison(llm, values()).run()
    assert {name: len(found) for name, found in series.items() if "accepted" not in name} == {
        "speed-up": 3,
        "with": 3,
        "without": 3,
        "tokens per verification": 1,
        "acceptance rate": 1,
        "distinct": 1,
    }
    assert series["tokens per verification"] == [5.0]
    assert series["acceptance rate"] == [100.0]
    assert [series[f"accepted at {place}"] for place in (1, 2, 3, 4)] == [[100.0]] * 4
    assert series["distinct"] == [100.0]
    for ratio, with_drafts, without in zip(
        series["speed-up"], series["with"], series["without"], strict=True
    ):
        assert ratio == pytest.approx(with_drafts / without)


def test_an_engine_without_drafter_is_refused(bundle: Path) -> None:
    with LLM(bundle) as llm, pytest.raises(OctavoError, match="the engine has no drafter: give"):
        Comparison(llm, values())


def test_the_command_measures_a_folder_of_scenarios(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "scenarios"
    folder.mkdir()
    (folder / "tiny.json").write_text(json.dumps(SCENARIO))
    result = CliRunner().invoke(app, ["speculative", str(bundle), "--scenarios", str(folder)])
    assert result.exit_code == 0, result.stderr
    results = json.loads(result.stdout)["results"]
    assert [one["metric"] for one in results[:3]] == ["speed-up", "with", "without"]
    assert results[0]["unit"] == "x"
    assert len(results[0]["values"]) == 3


def test_octavos_own_scenarios_have_their_targets() -> None:
    found = {one.name: one for one in scenarios.load() if one.kind == "speculative"}
    assert found.keys() == {"copy", "copy-8", "free", "free-6"}
    assert found["copy"].at_least == 2.5
    assert found["free"].at_least == found["free-6"].at_least == 0.95

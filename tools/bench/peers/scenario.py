"""The scenarios of the comparison: those of `octavo.tools.bench` with targets against the peers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from octavo.tools.bench.scenario import METRICS, Throughput, TimeToFirstToken, load_as

FOLDER = Path(__file__).parent / "scenarios"
Targets = dict[str, dict[str, float]]  # by model, then by precision: Octavo / best peer


class PeerThroughput(Throughput):
    targets: Targets = Field(default={}, description="the least ratio that is wanted")


class PeerTimeToFirstToken(TimeToFirstToken):
    targets: Targets = Field(default={}, description="the largest ratio that is wanted")


Scenario = Annotated[PeerThroughput | PeerTimeToFirstToken, Field(discriminator="kind")]
parser: TypeAdapter[Scenario] = TypeAdapter(Scenario)


def load(folder: Path = FOLDER) -> list[Scenario]:
    """The scenarios of a folder, by file name; raises OctavoError naming a file that is wrong."""
    return load_as(parser, folder)


def sizes(scenario: Scenario) -> tuple[int, int, int]:
    """(sequences, tokens of each prompt, tokens to generate for each)."""
    if isinstance(scenario, PeerThroughput):
        return scenario.num_seqs, scenario.prompt_tokens, scenario.output_tokens
    return 1, scenario.prompt_tokens, 1


def value(scenario: Scenario, seconds: float) -> float:
    """What a run of `seconds` counts for, in the scenario's unit."""
    num_seqs, _, output_tokens = sizes(scenario)
    if isinstance(scenario, PeerThroughput):
        return num_seqs * output_tokens / seconds
    return seconds * 1e3


def unit(scenario: Scenario) -> str:
    return next(iter(METRICS[scenario.kind].values()))


def more_is_better(scenario: Scenario) -> bool:
    return isinstance(scenario, PeerThroughput)

"""What a scenario file may say: one scenario a file, its `kind` decides the fields."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from octavo.graphs.errors import OctavoError

FOLDER = Path(__file__).parent / "scenarios"
T = TypeVar("T")


class ScenarioBase(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    description: str
    runs: int = Field(default=5, ge=1, description="measured runs, of which the median counts")
    at_most: float | None = Field(default=None, description="the target of a value to be small")
    at_least: float | None = Field(default=None, description="the target of a value to be large")


class ImportTime(ScenarioBase):
    """Seconds that `import module` takes in a fresh process."""

    kind: Literal["import_time"]
    module: str


class FirstToken(ScenarioBase):
    """Seconds from the start of a process to the first token of a built engine."""

    kind: Literal["first_token"]
    prompt_tokens: int = Field(ge=1)


class BuildTime(ScenarioBase):
    """Seconds of `build-engine` without the build cache, from process start to end."""

    kind: Literal["build_time"]


class Throughput(ScenarioBase):
    """Generated tokens a second, prefill included, of `num_seqs` requests sent at once."""

    kind: Literal["throughput"]
    num_seqs: int = Field(ge=1)
    prompt_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=1)


class TimeToFirstToken(ScenarioBase):
    """Milliseconds from a request's arrival to its first token, nothing else running."""

    kind: Literal["time_to_first_token"]
    prompt_tokens: int = Field(ge=1)


class Latency(ScenarioBase):
    """Time to first token, between tokens and to the end, for `num_seqs` requests sent at once."""

    kind: Literal["latency"]
    num_seqs: int = Field(ge=1)
    prompt_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=2)


class Prefix(ScenarioBase):
    """Time to first token of prompts that begin alike, the first (cold) and those after it (warm).

    A run sends a prompt of new `shared_tokens` and `own_tokens`, then `num_warm` prompts that share
    the beginning, one after the other.
    """

    kind: Literal["prefix"]
    shared_tokens: int = Field(ge=1)
    own_tokens: int = Field(ge=1)
    num_warm: int = Field(default=3, ge=1)


class HostTime(ScenarioBase):
    """Milliseconds of a decode step of `num_seqs` sequences outside the compiled graph."""

    kind: Literal["host_time"]
    num_seqs: int = Field(ge=1)
    prompt_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=2)


class Speculative(ScenarioBase):
    """Decoding speed with drafts as a multiple of that without, on one engine, tokens being equal.

    speculative  drafter and options as `LLM` takes them; None for those the engine was built with
    chat         whether prompts go through the chat template
    num_seqs     prompts that are sent at once
    """

    kind: Literal["speculative"]
    prompts: tuple[str, ...] = Field(min_length=1)
    output_tokens: int = Field(ge=2)
    stop: tuple[str, ...] = ()
    chat: bool = False
    num_seqs: int = Field(default=1, ge=1)
    speculative: dict[str, str | int | bool] | None = None


class AnotherBackend(ScenarioBase):
    """Time between tokens of another backend's engine, as a multiple of the measured engine's.

    The other engine is built from the same checkpoint with the same quantisation; both serve by
    turns.
    """

    kind: Literal["another_backend"]
    backend: str
    num_seqs: int = Field(ge=1)
    prompt_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=2)


class PeakMemory(ScenarioBase):
    """MiB of peak resident memory of a fresh process that serves `num_seqs` requests."""

    kind: Literal["peak_memory"]
    num_seqs: int = Field(ge=1)
    prompt_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=1)
    kv_cache_memory: str


Serving = Throughput | TimeToFirstToken | PeakMemory | FirstToken | Latency | Prefix
Scenario = Annotated[
    ImportTime
    | FirstToken
    | BuildTime
    | Throughput
    | TimeToFirstToken
    | PeakMemory
    | Latency
    | Prefix
    | HostTime
    | Speculative
    | AnotherBackend,
    Field(discriminator="kind"),
]
# What a scenario of a kind measures, with units; `at_most` and `at_least` are the first one's.
METRICS: dict[str, dict[str, str]] = {
    "import_time": {"import": "s"},
    "first_token": {"first token": "s"},
    "build_time": {"build": "s"},
    "throughput": {"throughput": "tokens/s"},
    "time_to_first_token": {"TTFT": "ms"},
    "peak_memory": {"resident": "MiB"},
    "latency": {"TTFT": "ms", "between tokens": "ms", "end to end": "ms"},
    "prefix": {"reduction": "%", "cold TTFT": "ms", "warm TTFT": "ms", "cached tokens": "tokens"},
    "host_time": {"host time": "ms", "step": "ms"},
    "another_backend": {"ratio": "x", "other": "ms", "this": "ms", "build": "s"},
    # Then "accepted at 1", 2, ... in %, as far as drafts go.
    "speculative": {
        "speed-up": "x",
        "with": "tokens/s",
        "without": "tokens/s",
        "tokens per verification": "tokens",
        "acceptance rate": "%",
        "distinct": "%",
    },
}
parser: TypeAdapter[Scenario] = TypeAdapter(Scenario)


def load(folder: Path = FOLDER) -> list[Scenario]:
    """The scenarios of a folder, by file name; raises OctavoError naming a file that is wrong."""
    return load_as(parser, folder)


def load_as(wanted: TypeAdapter[T], folder: Path) -> list[T]:
    """The same for scenarios of another type."""
    scenarios = []
    for path in sorted(folder.glob("*.json")):
        try:
            scenarios.append(wanted.validate_json(path.read_bytes()))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise OctavoError(f"{path.name} is no scenario: {where}: {first['msg']}") from None
    if not scenarios:
        raise OctavoError(f"{folder} holds no scenarios (*.json)")
    return scenarios

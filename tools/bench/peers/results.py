"""What was measured so far, in a file: runs can be partial and tables be rendered again."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from octavo.graphs.errors import OctavoError


class Measurement(BaseModel):
    """Of one engine in one scenario; equal `run`s were measured in alternation."""

    model_config = ConfigDict(frozen=True)

    model: str
    engine: str
    scenario: str
    run: str  # when the run began, in UTC
    threads: int
    values: tuple[float, ...]

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.engine, self.scenario

    @property
    def median(self) -> float:
        return statistics.median(self.values)


class Quality(BaseModel):
    """Of one engine on the text, each token predicted from those before it."""

    model_config = ConfigDict(frozen=True)

    model: str
    engine: str
    run: str
    num_predictions: int
    perplexity: float
    agreement: float  # share of predictions whose best token is the reference's


class Results(BaseModel):
    model_config = ConfigDict(extra="forbid")

    machine: dict[str, str] = {}
    versions: dict[str, dict[str, str]] = {}  # by peer, then by package
    unavailable: dict[str, str] = {}  # reason by "model/engine" or by peer
    measurements: list[Measurement] = []
    qualities: list[Quality] = []

    @classmethod
    def read(cls, path: Path) -> Self:
        """Nothing where there is no file; OctavoError where it is not one of ours."""
        if not path.exists():
            return cls()
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise OctavoError(f"{path} holds no results: {reason}: move it away") from None

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    def add(self, measurement: Measurement) -> None:
        """Replaces what the engine had in that scenario."""
        kept = [one for one in self.measurements if one.key != measurement.key]
        self.measurements = [*kept, measurement]

    def add_quality(self, quality: Quality) -> None:
        key = (quality.model, quality.engine)
        kept = [one for one in self.qualities if (one.model, one.engine) != key]
        self.qualities = [*kept, quality]

    def measurement(self, model: str, engine: str, scenario: str) -> Measurement | None:
        key = (model, engine, scenario)
        return next((one for one in self.measurements if one.key == key), None)

    def quality(self, model: str, engine: str) -> Quality | None:
        key = (model, engine)
        return next((one for one in self.qualities if (one.model, one.engine) == key), None)

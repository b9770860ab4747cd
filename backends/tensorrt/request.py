"""What the compiler asks of the process that builds an engine, and what it hears back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octavo.backends.base import TensorRtOptions
from octavo.backends.tensorrt.step_shapes import ShapeProfile


@dataclass(frozen=True)
class EngineRequest:
    flavour: str
    model: Path  # ONNX
    engine: Path  # written
    report: Path  # written, JSON: of `EngineReport`, or {"error": sentence, "errno": number | null}
    profiles: tuple[ShapeProfile, ...]
    compute_capabilities: tuple[str, ...]
    aliases: dict[str, str]  # output: the input whose memory it shares
    num_attention_layers: int
    options: TensorRtOptions

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), default=str), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> EngineRequest:
        content = json.loads(path.read_bytes())
        content |= {name: Path(content[name]) for name in ("model", "engine", "report")}
        content["compute_capabilities"] = tuple(content["compute_capabilities"])
        content["profiles"] = tuple(map(_profile, content["profiles"]))
        content["options"] = TensorRtOptions(**content["options"])
        return cls(**content)


@dataclass(frozen=True)
class EngineReport:
    """What was built, for the manifest."""

    version: str  # of the library
    num_layers: int
    layers: dict[str, int]  # how many of each type
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    warnings: tuple[str, ...]

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> EngineReport:
        lists = {name: tuple(content[name]) for name in ("inputs", "outputs", "warnings")}
        return cls(**{**content, **lists})


def _profile(content: dict[str, Any]) -> ShapeProfile:
    shapes = {
        name: (tuple(low), tuple(typical), tuple(high))
        for name, (low, typical, high) in content["shapes"].items()
    }
    return ShapeProfile(content["name"], shapes)

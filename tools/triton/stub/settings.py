"""`1/model.json`: which engine a model runs and how; made by `octavo export-triton`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

FILE_NAME = "model.json"


class SettingsError(ValueError):
    """model.json is damaged or names what does not exist."""


@dataclass(frozen=True)
class Settings:
    """Times are in seconds.

    engine             folder of the engine, absolute or relative to that of model.json
    python             interpreter that has Octavo
    engine_options     keyword arguments of `AsyncLLM`
    max_open_requests  most requests that run or wait in one instance; one more is refused
    max_restarts       deaths of the engine within `restart_window` after which it is started
                       again; one more and the model has to be loaded again
    restart_delay      wait before the second start in a row; doubled for each one after it
    heartbeat_timeout  how long an engine with work may say nothing and be healthy
    drain_timeout      how long open requests may go on when the model is unloaded
    """

    engine: str
    python: str
    engine_options: dict[str, Any] = field(default_factory=dict)
    max_open_requests: int = 1024
    max_restarts: int = 5
    restart_window: float = 300.0
    restart_delay: float = 0.5
    heartbeat_timeout: float = 120.0
    drain_timeout: float = 30.0

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def read_settings(folder: Path) -> Settings:
    """From `folder`; SettingsError names what is wrong. The engine's path is made absolute."""
    path = folder / FILE_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} cannot be read ({error}): export the model again") from None
    if not isinstance(content, dict):
        raise SettingsError(f"{path} holds no JSON object: export the model again")
    known = {one.name for one in fields(Settings)}
    for name in content:
        if name not in known:
            raise SettingsError(
                f"{path} has the unknown entry {name!r}: choose from {', '.join(sorted(known))}"
            )
    for name in ("engine", "python"):
        if not isinstance(content.get(name), str):
            raise SettingsError(f"{path} names no {name}: export the model again")
    for name, default in _defaults().items():
        _check(path, name, content.get(name, default), default)
    content["engine"] = str(folder / content["engine"])
    return Settings(**content)


def _defaults() -> dict[str, Any]:
    return {
        name: value
        for name, value in asdict(Settings("", "")).items()
        if name not in ("engine", "python")
    }


def _check(path: Path, name: str, value: Any, default: object) -> None:
    if isinstance(default, dict):
        wanted, good = "an object", isinstance(value, dict)
    elif isinstance(default, int):
        wanted, good = "an integer of at least 0", _is_count(value, int)
    else:
        wanted, good = "a number of at least 0", _is_count(value, (int, float))
    if not good:
        raise SettingsError(f"{path}: {name} is {value!r}, it must be {wanted}")


def _is_count(value: Any, kinds: Any) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and bool(value >= 0)

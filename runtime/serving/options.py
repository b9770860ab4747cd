"""How an engine is watched and replaced."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from octavo.graphs.errors import RequestError
from octavo.runtime.sampling import parameter_checks as checks


@dataclass(frozen=True, kw_only=True)
class SupervisionOptions:
    """RequestError for a value out of range. Times are in seconds.

    max_restarts       deaths of the engine's process within `restart_window` after which it is
                       started again; one more and the AsyncLLM is unhealthy for good
    restart_window     see there
    restart_delay      wait before the second start in a row; doubled for each one after it
    restart_timeout    how long a new request waits for the engine to be started again
    heartbeat_timeout  how long an engine with work may say nothing and be healthy; it speaks after
                       every step, so this is also the longest step that counts as healthy
    shutdown_timeout   how long `shutdown` waits for the engine to end; then its process is killed
    """

    max_restarts: int = 5
    restart_window: float = 300.0
    restart_delay: float = 0.5
    restart_timeout: float = 120.0
    heartbeat_timeout: float = 120.0
    shutdown_timeout: float = 5.0

    def __post_init__(self) -> None:
        if checks.integer("max_restarts", self.max_restarts) < 0:
            raise RequestError(f"max_restarts is {self.max_restarts}, it must be at least 0")
        for field in fields(self)[1:]:
            value = checks.number(field.name, getattr(self, field.name))
            if not 0.0 <= value < math.inf:
                raise RequestError(f"{field.name} is {value}, it must be at least 0 and finite")

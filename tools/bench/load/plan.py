"""What load is put on which server."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from octavo.graphs.errors import OctavoError

Protocol = Literal["openai", "triton"]
Arrivals = Literal["poisson", "constant"]

_TIME = re.compile(r"([0-9.]+)\s*(ms|s)")
_MEASURES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, kw_only=True)
class Objectives:
    """What a request must keep to count as good; seconds."""

    ttft: float = math.inf
    tpot: float = math.inf
    e2e: float = math.inf

    @classmethod
    def parse(cls, text: str) -> Objectives:
        """Of `ttft=500ms,tpot=50ms,e2e=10s`; OctavoError for anything else."""
        values = {}
        for part in text.split(","):
            name, _, time = part.partition("=")
            match = _TIME.fullmatch(time.strip())
            if name not in _MEASURES or match is None:
                raise OctavoError(
                    f"the objective is {part!r}, it must be one of ttft, tpot and e2e with a time, "
                    "such as ttft=500ms"
                )
            values[name] = float(match[1]) * (0.001 if match[2] == "ms" else 1.0)
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """One run. OctavoError for a value that cannot be.

    url               of the server, without a path
    model             its name there; "": the first that /v1/models names
    request_rate      arrivals a second, whatever the server does (open loop); inf: all at once
    concurrency       requests that run at once, a new one for each that ends (closed loop);
                      excludes a rate
    input_len         words of a prompt, about as many tokens; a list of texts replaces them
    prefix_len        of these, the first ones that all prompts share
    output_len        tokens of an answer, exactly
    chat              chat completions instead of completions
    count_chunks      each chunk of a stream is one token, for servers that cannot count for it
    disconnect_share  of the requests are left at a random moment
    """

    url: str
    protocol: Protocol = "openai"
    model: str = ""
    api_key: str | None = None
    num_requests: int = 100
    num_warmup: int = 2
    request_rate: float = math.inf
    arrivals: Arrivals = "poisson"
    concurrency: int | None = None
    prompts: tuple[str, ...] = ()
    input_len: int = 128
    prefix_len: int = 0
    output_len: int = 64
    chat: bool = False
    count_chunks: bool = False
    disconnect_share: float = 0.0
    seed: int = 0
    timeout: float = 600.0
    objectives: Objectives = field(default_factory=Objectives)

    def __post_init__(self) -> None:
        for name in ("num_requests", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise OctavoError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if not 0 <= self.prefix_len <= self.input_len:
            raise OctavoError(
                f"prefix_len is {self.prefix_len}, it must lie in [0, input_len] and input_len is "
                f"{self.input_len}"
            )
        if not self.request_rate > 0:
            raise OctavoError(f"request_rate is {self.request_rate}, it must be above 0")
        if self.concurrency is not None and self.concurrency < 1:
            raise OctavoError(f"concurrency is {self.concurrency}, it must be at least 1")
        if self.concurrency is not None and math.isfinite(self.request_rate):
            raise OctavoError(
                f"request_rate is {self.request_rate:g} and concurrency {self.concurrency}: a rate "
                "is kept whatever the server does, give one of them"
            )
        if not 0 <= self.disconnect_share <= 1:
            raise OctavoError(f"disconnect_share is {self.disconnect_share}, it must lie in [0, 1]")

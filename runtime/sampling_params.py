"""How one request samples and when it stops, with vLLM's names, defaults and meanings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.graphs.errors import RequestError

# vLLM's threshold: below it dividing by the temperature only adds rounding to a greedy choice.
GREEDY_TEMPERATURE = 1e-5
_SEED_LIMIT = 1 << 64


@dataclass(frozen=True)
class SamplingParams:
    """Immutable; every value is checked when it is made and RequestError names what is wrong.

    temperature     scales the logits; below 1e-5 the most likely token is taken (greedy)
    top_p           in (0, 1]: keeps the smallest set of most likely tokens with that probability
    top_k           keeps the k most likely tokens; 0 or -1 keeps all
    seed            the same seed gives the same tokens in any batch; None draws a seed per request
    max_tokens      most tokens to generate; None generates until the model's length
    ignore_eos      generate past the model's end-of-sequence tokens
    stop_token_ids  further tokens that end the request
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = 16
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _set(self, "temperature", _number("temperature", self.temperature))
        _set(self, "top_p", _number("top_p", self.top_p))
        if not 0.0 <= self.temperature < math.inf:
            raise RequestError(
                f"temperature is {self.temperature}, it must be a finite number of at least 0: "
                "use 0 for greedy sampling"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(
                f"top_p is {self.top_p}, it must lie in (0, 1]: use 1 to keep every token"
            )
        if _integer("top_k", self.top_k) < -1:
            raise RequestError(
                f"top_k is {self.top_k}, it must be at least 1, or 0 or -1 to keep every token"
            )
        if self.max_tokens is not None and _integer("max_tokens", self.max_tokens) < 1:
            raise RequestError(
                f"max_tokens is {self.max_tokens}, it must be at least 1: "
                "use None to generate until the model's length"
            )
        if self.seed is not None and not 0 <= _integer("seed", self.seed) < _SEED_LIMIT:
            raise RequestError(
                f"seed is {self.seed}, it must lie in [0, 2**64): use None for a random seed"
            )
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos is {self.ignore_eos!r}, it must be True or False")
        _set(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


def _set(params: SamplingParams, name: str, value: object) -> None:
    object.__setattr__(params, name, value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} is {value!r}, it must be a number")
    try:
        return float(value)
    except OverflowError:
        raise RequestError(f"{name} is too large, it must be a finite number") from None


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}, it must be an integer")
    return value


def _token_ids(name: str, values: object) -> tuple[int, ...]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise RequestError(f"{name} is {values!r}, it must be a sequence of token ids")
    ids = tuple(values)
    for value in ids:
        if _integer(f"a value of {name}", value) < 0:
            raise RequestError(f"a value of {name} is {value}, token ids start at 0")
    return ids

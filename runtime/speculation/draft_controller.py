"""How many tokens are worth drafting, by what drafts have come to and what steps have cost.

A further draft costs the same in every step, and is worth what it is likely to be accepted. The
draft j of a sequence is accepted with about a^j, a the share of its drafts that were; it is worth
its cost c while a^j is more than the tokens that the engine makes in the time c without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from octavo.runtime.request import Request
from octavo.runtime.speculation.verified import Verified

# How much of an average the newest value is: of a draft; of drafts that all hold, or none of them,
# since texts that are copied begin and end at once.
_DRAFT_WEIGHT = 0.15
_ALL_WEIGHT, _NONE_WEIGHT = 0.5, 0.3
_METHOD_WEIGHT = 0.02
_COST_WEIGHT, _CHEAPER_WEIGHT = 0.05, 0.3
# What is expected of drafts before anything is known.
_FIRST_ACCEPTANCE = 0.7
# What a token of a step is thought to cost, to the step's cost without any, before that is known.
_FIRST_SLOPE = 0.05
# A sequence whose drafts do not pay gets one now and then, since texts change: as often as costs
# this share of the time.
_PROBING = 0.03
_SHORTEST_PAUSE, _LONGEST_PAUSE = 4, 256  # steps


@dataclass
class _History:
    """Of one sequence's drafts."""

    acceptance: float
    num_skipped: int = 0  # steps without drafts, since they do not pay


class StepCost:
    """seconds = base + slope * tokens, fitted to recent steps of few tokens."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0
        self._fitted: tuple[float, float] | None = None

    def observe(self, num_tokens: int, seconds: float) -> None:
        keep = 1 - _COST_WEIGHT
        self._weight = self._weight * keep + 1
        self._tokens = self._tokens * keep + num_tokens
        self._seconds = self._seconds * keep + seconds
        self._squares = self._squares * keep + num_tokens * num_tokens
        self._products = self._products * keep + num_tokens * seconds

    def fit(self) -> tuple[float, float] | None:
        """(base, slope), both at least 0; None before two different sizes were seen.

        While all steps are of one size the last fit holds.
        """
        spread = self._weight * self._squares - self._tokens * self._tokens
        if spread <= 1e-9 * max(self._squares, 1.0):
            return self._fitted
        slope = (self._weight * self._products - self._tokens * self._seconds) / spread
        slope = max(slope, 0.0)
        base = max((self._seconds - slope * self._tokens) / self._weight, 0.0)
        self._fitted = base, slope
        return self._fitted


class DraftController:
    """max_tokens  most drafts of a sequence; all of them always, unless `adaptive`"""

    def __init__(self, max_tokens: dict[str, int], *, adaptive: bool = True) -> None:
        self._max_tokens = max_tokens  # by method
        self._adaptive = adaptive
        self._histories: WeakKeyDictionary[Request, dict[str, _History]] = WeakKeyDictionary()
        self._acceptance = dict.fromkeys(max_tokens, _FIRST_ACCEPTANCE)
        self._draft_seconds = dict.fromkeys(max_tokens, 0.0)  # of one token
        self._cost = StepCost()
        self._num_seqs = 1

    @property
    def max_tokens(self) -> int:
        return max(self._max_tokens.values(), default=0)

    def begin(self, num_seqs: int) -> None:
        """The next step has about `num_seqs` sequences."""
        self._num_seqs = max(num_seqs, 1)

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        if num_tokens <= self._num_seqs * (self.max_tokens + 1):  # without a prompt
            self._cost.observe(num_tokens, seconds)

    def observe_drafting(self, method: str, num_drafts: int, seconds: float) -> None:
        if num_drafts:
            old, new = self._draft_seconds[method], seconds / num_drafts
            # What is paid once, such as reading a new prompt, is forgotten soon.
            weight = _COST_WEIGHT if new > old else _CHEAPER_WEIGHT
            self._draft_seconds[method] = old + weight * (new - old) if old else new

    def observe_verified(self, verified: Verified) -> None:
        history = self._history(verified.request, verified.method)
        # Drafts behind a rejected one say nothing.
        num_tried = min(verified.num_accepted + 1, verified.num_drafts)
        share = verified.num_accepted / num_tried
        weight = 1 - (1 - _DRAFT_WEIGHT) ** num_tried
        if share in (0.0, 1.0):
            weight = max(weight, _ALL_WEIGHT if share else _NONE_WEIGHT)
        history.acceptance += weight * (share - history.acceptance)
        method = verified.method
        self._acceptance[method] += _METHOD_WEIGHT * (share - self._acceptance[method])

    def length(self, request: Request, method: str) -> int:
        """Most drafts for a sequence's next step; 0 where they would cost more than they gain."""
        most = self._max_tokens[method]
        if not self._adaptive:
            return most
        history = self._history(request, method)
        least = self._least_acceptance(method)
        acceptance = min(history.acceptance, 1 - 1e-6)
        if acceptance >= least:
            history.num_skipped = 0
            wanted = math.log(max(least, 1e-9)) / math.log(max(acceptance, 1e-9))
            return max(1, min(most, int(wanted)))
        history.num_skipped += 1
        pause = min(max(least / _PROBING, _SHORTEST_PAUSE), _LONGEST_PAUSE)
        if history.num_skipped < pause:
            return 0
        history.num_skipped = 0
        return 1

    def _least_acceptance(self, method: str) -> float:
        """At which a draft is worth its cost: the tokens that are made in that time without it."""
        fitted = self._cost.fit()
        draft_seconds = self._draft_seconds[method]
        if fitted is None or sum(fitted) <= 0:
            fitted, draft_seconds = (1.0, _FIRST_SLOPE), 0.0
        base, slope = fitted
        return (slope + draft_seconds) * self._num_seqs / (base + slope * self._num_seqs)

    def _history(self, request: Request, method: str) -> _History:
        histories = self._histories.setdefault(request, {})
        if method not in histories:
            histories[method] = _History(self._acceptance[method])
        return histories[method]

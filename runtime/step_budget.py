"""How the tokens of one step are divided: decodes first, then prompts, few of them in pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.graphs.errors import RequestError
from octavo.runtime.capacity import check_positive

POLICIES = ("fcfs", "priority")


@dataclass(frozen=True)
class SchedulingOptions:
    """How requests are ordered and how a step is shared; RequestError for a value out of range.

    policy                    "fcfs": in the order of arrival; "priority": lower priorities first,
                              and a request may push out one with a higher number
    max_num_waiting           most requests in the queue beyond those that find a free place in the
                              batch, None for no limit
    max_num_partial_prefills  most prompts computed in pieces at the same time; they share the
                              step's tokens, so short prompts get past a long one
    max_prefill_tokens_beside_decodes
                              most prompt tokens in a step that also decodes: bounds how long a
                              decoding request waits for its next token. None for the step's limit
    """

    policy: Literal["fcfs", "priority"] = "fcfs"
    max_num_waiting: int | None = None
    max_num_partial_prefills: int = 1
    max_prefill_tokens_beside_decodes: int | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise RequestError(f"policy is {self.policy!r}, it must be one of {POLICIES}")
        check_positive("max_num_partial_prefills", self.max_num_partial_prefills)
        for name in ("max_num_waiting", "max_prefill_tokens_beside_decodes"):
            value = getattr(self, name)
            if value is not None:
                check_positive(name, value)


class StepBudget:
    """The tokens one step has left. Decodes are to be asked about before prefills.

    So every decoding request advances in every step, however long the prompts beside it are.
    """

    def __init__(self, max_num_batched_tokens: int, options: SchedulingOptions) -> None:
        self._left = max_num_batched_tokens
        self._prefill_limit = options.max_prefill_tokens_beside_decodes
        self._partials_left = options.max_num_partial_prefills
        self._decodes = False

    @property
    def admits_prefills(self) -> bool:
        return self._prefill_left > 0 and self._partials_left > 0

    @property
    def _prefill_left(self) -> int:
        if self._decodes and self._prefill_limit is not None:
            return min(self._left, self._prefill_limit)
        return self._left

    def take_decode(self, num_missing: int) -> int:
        """Tokens for a sequence that misses only its last known token, or drafts after it."""
        count = min(num_missing, self._left)
        self._left -= count
        self._decodes = self._decodes or count > 0
        return count

    def take_prefill(self, num_missing: int, num_others: int, most: int | None = None) -> int:
        """Tokens for a prompt, one piece or all of it; `num_others` prompts come after it.

        What a prompt leaves of its share goes to those after it. `most`: the request's own limit.
        """
        if not self.admits_prefills:
            return 0
        share = -(-self._prefill_left // min(self._partials_left, num_others + 1))
        count = min(num_missing, share) if most is None else min(num_missing, share, most)
        self._left -= count
        if self._prefill_limit is not None:
            self._prefill_limit -= count
        if count < num_missing:
            self._partials_left -= 1
        return count

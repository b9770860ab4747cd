"""What became of drafts, and the counts of it that metrics show."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from octavo.runtime.request import Request


class Verified(NamedTuple):
    """The drafts of one sequence in one step."""

    request: Request
    method: str  # of the drafter
    num_drafts: int  # that the step verified, at least 1
    num_accepted: int


@dataclass
class SpeculationCounts:
    """Only grows. `accepted_per_position` [most drafts]: how often each draft was accepted.

    num_withheld  times a sequence got no drafts because they would have cost more than they gain
    num_failures  drafters that were turned off after an error
    """

    max_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_withheld: int = 0
    num_failures: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.accepted_per_position = [0] * self.max_tokens

    def observe(self, verified: Verified) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += verified.num_drafts
        self.num_accepted_tokens += verified.num_accepted
        for position in range(verified.num_accepted):
            self.accepted_per_position[position] += 1

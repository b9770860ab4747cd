"""What became of each request."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

Outcome = Literal["finished", "refused", "left", "failed"]


@dataclass
class Record:
    """Times are seconds from the start of the run.

    intended  when the request was to be sent: latencies count from there
    sent      when it was
    chunks    when tokens came, and how many there were then
    outcome   "refused": the server had no room (429, or Triton's UNAVAILABLE); "left": by this
              client, as planned
    error     of a failed one
    """

    intended: float
    sent: float = 0.0
    ended: float = 0.0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    outcome: Outcome = "failed"
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return self.chunks[-1][1] if self.chunks else 0

    @property
    def ttft(self) -> float:
        """Of a request that has tokens."""
        return self.chunks[0][0] - self.intended

    @property
    def e2e(self) -> float:
        return self.ended - self.intended

    @property
    def tpot(self) -> float:
        """Mean time for a token after the first chunk; 0 if there is none."""
        (first, num_first), (last, num_last) = self.chunks[0], self.chunks[-1]
        return (last - first) / (num_last - num_first) if num_last > num_first else 0.0

    @property
    def gaps(self) -> list[float]:
        """Time between two chunks, shared equally by the tokens of the later one."""
        gaps = []
        for (before, num_before), (after, num_after) in pairwise(self.chunks):
            num_new = num_after - num_before
            gaps += [(after - before) / num_new] * num_new
        return gaps

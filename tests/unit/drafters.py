"""Drafters that say what a test tells them, and engines of the null backend that use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.graphs.errors import BackendError
from octavo.runtime.capacity import EngineLimits
from octavo.runtime.engine import Engine
from octavo.runtime.request import Request
from octavo.runtime.speculation.draft_controller import DraftController
from octavo.runtime.speculation.drafter import ComputedStep, DraftContext, Drafter, Proposal
from octavo.runtime.speculation.speculator import Speculator

Says = Callable[[Request, int], Sequence[int]]


class ScriptedDrafter:
    """`says(request, most)` gives the drafts; `most` of them at the most are kept."""

    def __init__(self, says: Says, method: str = "scripted") -> None:
        self.method = method
        self._says = says
        self.num_steps = 0
        self.asked: list[int] = []  # how many drafts it might have made, each time
        self.is_closed = False

    def propose(self, step: ComputedStep, contexts: Sequence[DraftContext]) -> list[Proposal]:
        self.num_steps += 1
        self.asked += [context.num_tokens for context in contexts]
        return [
            Proposal(list(self._says(context.request, context.num_tokens))[: context.num_tokens])
            for context in contexts
        ]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """It has no cache."""

    def close(self) -> None:
        self.is_closed = True


class FailingDrafter(ScriptedDrafter):
    """Fails from its `after`-th step on."""

    def __init__(self, after: int) -> None:
        super().__init__(lambda request, most: ())
        self._after = after

    def propose(self, step: ComputedStep, contexts: Sequence[DraftContext]) -> list[Proposal]:
        if self.num_steps >= self._after:
            raise BackendError("the drafter's engine is broken")
        return super().propose(step, contexts)


def speculate(
    engine: Engine, *drafters: Drafter, num_tokens: int = 4, adaptive: bool = False
) -> Speculator:
    """Has an engine use these drafters from now on."""
    limits: EngineLimits = engine.limits
    lengths = {drafter.method: num_tokens for drafter in drafters}
    speculator = Speculator(drafters, DraftController(lengths, adaptive=adaptive), limits)
    engine.speculator = speculator
    return speculator

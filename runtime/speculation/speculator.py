"""After each step: learns from what was verified, and has the next tokens drafted."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from octavo.graphs.errors import OctavoError
from octavo.runtime.cache.block_pool import BlockPool
from octavo.runtime.capacity import EngineLimits
from octavo.runtime.request import Request
from octavo.runtime.scheduler import Scheduler
from octavo.runtime.speculation.draft_controller import DraftController
from octavo.runtime.speculation.drafter import ComputedStep, DraftContext, Drafter, Proposal
from octavo.runtime.speculation.verified import SpeculationCounts, Verified

_logger = logging.getLogger(__name__)


class Speculator:
    """Owns the drafters of an engine. The first one that proposes anything for a sequence wins.

    A drafter that fails is no reason to fail anybody: it is closed with a warning, and counted.

    drafters  in the order in which they are asked
    """

    def __init__(
        self, drafters: Sequence[Drafter], controller: DraftController, limits: EngineLimits
    ) -> None:
        self.counts = SpeculationCounts(controller.max_tokens)
        self._drafters = list(drafters)
        self._controller = controller
        self._limits = limits

    @property
    def methods(self) -> tuple[str, ...]:
        """Of the drafters that still work."""
        return tuple(drafter.method for drafter in self._drafters)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Before the step that the copies belong to."""
        for drafter in list(self._drafters):
            try:
                drafter.copy_blocks(copies)
            except (OctavoError, MemoryError) as error:
                self._give_up(drafter, error)

    def learn(self, verified: Sequence[Verified], num_tokens: int, seconds: float) -> None:
        """Takes note of a committed step of `num_tokens` tokens: what its drafts came to."""
        self._controller.observe_step(num_tokens, seconds)
        for one in verified:
            self._controller.observe_verified(one)
            self.counts.observe(one)

    def propose(self, step: ComputedStep, scheduler: Scheduler) -> None:
        """Sets the drafts of every sequence that may have some in the next step."""
        waiting = [request for request in scheduler.running if self._may_draft(request, scheduler)]
        self._controller.begin(len(scheduler.running))
        for drafter in list(self._drafters):
            contexts = self._contexts(drafter.method, waiting)
            started = time.monotonic()
            try:
                found = drafter.propose(step, contexts)
            except (OctavoError, MemoryError) as error:
                self._give_up(drafter, error)
                continue
            num_drafts = self._set_drafts(drafter.method, contexts, found)
            seconds = time.monotonic() - started
            self._controller.observe_drafting(drafter.method, num_drafts, seconds)
            waiting = [request for request in waiting if not request.num_drafts]

    def close(self) -> None:
        """Closes every drafter; harmless when called twice."""
        for drafter in self._drafters:
            drafter.close()
        self._drafters.clear()

    def _may_draft(self, request: Request, scheduler: Scheduler) -> bool:
        return (
            request.num_computed_tokens == request.num_tokens - 1
            and not request.num_drafts
            and not request.followers
            and request.group is None
            and request.params.speculate
            and self._room(request) > 0
            and not self._shares_last_block(request, scheduler.pool)
        )

    def _room(self, request: Request) -> int:
        """Drafts that could all be accepted, with the token after them, before the length ends."""
        return request.max_total_tokens - request.num_tokens - 1

    def _shares_last_block(self, request: Request, pool: BlockPool) -> bool:
        """Right after a fork: a drafter's entries behind the known tokens would meet there."""
        partial = request.num_computed_tokens % self._limits.block_size
        return partial > 0 and pool.ref_count(request.block_ids[-1]) > 1

    def _contexts(self, method: str, waiting: Sequence[Request]) -> list[DraftContext]:
        contexts: list[DraftContext] = []
        # A drafter's steps have a token of each, and the engine's limits.
        for request in waiting[: self._limits.max_num_batched_tokens]:
            most = min(self._controller.length(request, method), self._room(request))
            if most > 0:
                contexts.append(DraftContext(request, most))
            else:
                self.counts.num_withheld += 1
        return contexts

    def _set_drafts(
        self, method: str, contexts: Sequence[DraftContext], found: Sequence[Proposal]
    ) -> int:
        num_drafts = 0
        for context, proposal in zip(contexts, found, strict=True):
            if len(proposal.token_ids):
                context.request.set_drafts(proposal.token_ids, proposal.probs, method)
                num_drafts += len(proposal.token_ids)
        return num_drafts

    def _give_up(self, drafter: Drafter, error: Exception) -> None:
        self._drafters.remove(drafter)
        self.counts.num_failures += 1
        drafter.close()
        _logger.warning("the drafter %r failed and is off from now on: %s", drafter.method, error)

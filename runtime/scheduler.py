"""Which requests compute how many tokens in the next step, and in which blocks.

No phases: every request lets its computed tokens catch up with its known ones (and drafts). Running
requests come first, oldest first, then waiting ones in the order of their arrival; a long prompt is
cut where the token budget ends. When blocks run out, the youngest running request is preempted: it
gives up its blocks and is computed anew later. The oldest one is never preempted and always fits
the pool alone, so every step makes progress.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from octavo.graphs.errors import CapacityError
from octavo.runtime import positions
from octavo.runtime.block_pool import BlockPool
from octavo.runtime.block_tables import BlockTables
from octavo.runtime.capacity import EngineLimits
from octavo.runtime.prefix_cache import PrefixCache
from octavo.runtime.request import Request, RequestStatus


class ScheduledRequest(NamedTuple):
    """A request's part of a step, with what a rollback needs to know of the state before it."""

    request: Request
    num_new_tokens: int
    num_blocks_before: int
    status_before: RequestStatus


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The requests of one step, in batch order; their blocks are reserved."""

    scheduled: tuple[ScheduledRequest, ...]

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_new_tokens for entry in self.scheduled)


class Scheduler:
    """Owns the queues; a plan changes them at once and is then either committed or rolled back."""

    def __init__(self, limits: EngineLimits, pool: BlockPool, prefix_cache: PrefixCache | None):
        self.limits = limits
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.block_tables = BlockTables(limits.max_num_seqs, limits.max_blocks_per_seq)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first; all are older than the waiting ones

    def check_fits(self, request: Request) -> None:
        """Raises CapacityError if the request could not run even alone in the whole pool."""
        needed = self._most_blocks(request)
        if needed > self.pool.num_blocks:
            raise CapacityError(
                f"the request may reach {request.max_total_tokens} tokens and so need {needed} "
                f"cache blocks, the pool has {self.pool.num_blocks}: raise kv_cache_memory or "
                "lower max_tokens"
            )

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Takes a request out wherever it is and releases its blocks."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request)

    def plan(self) -> StepPlan:
        """Chooses the next step's requests and reserves their blocks, preempting where it must.

        Undone by `rollback`, save for preemptions and evictions: what they gave up may have been
        overwritten by the failed step, and it is only work that is done again.
        """
        scheduled: list[ScheduledRequest] = []
        num_running = len(self.running)
        budget = self._plan_running(scheduled, self.limits.max_num_batched_tokens)
        # After a preemption no blocks are left to admit anyone with.
        if self.waiting and len(self.running) == num_running:
            self._plan_waiting(scheduled, budget)
        return StepPlan(tuple(scheduled))

    def rollback(self, plan: StepPlan) -> None:
        """Restores the requests of a plan that was not committed."""
        for entry in reversed(plan.scheduled):
            request = entry.request
            if entry.status_before is RequestStatus.RUNNING:
                self._shrink(request, entry.num_blocks_before)
            else:
                self.running.remove(request)
                self._release(request)
                request.status = entry.status_before
                self.waiting.appendleft(request)

    def commit(self, request: Request) -> None:
        """Takes note of what a step computed: `num_computed_tokens` is final, drafts are gone."""
        if request.finished:
            if self.prefix_cache is not None:
                self.prefix_cache.register(request)
            self.running.remove(request)
            self._release(request)
            return
        block_size = self.limits.block_size
        self._shrink(request, positions.blocks_for(request.num_computed_tokens, block_size))
        if self.prefix_cache is not None:
            self.prefix_cache.register(request)

    def _plan_running(self, scheduled: list[ScheduledRequest], budget: int) -> int:
        """Returns the rest of the budget."""
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            blocks_before = len(request.block_ids)
            count = self._reserve_running(request, budget)
            if count == 0:
                break
            scheduled.append(ScheduledRequest(request, count, blocks_before, RequestStatus.RUNNING))
            budget -= count
            index += 1
        return budget

    def _reserve_running(self, request: Request, budget: int) -> int:
        """Reserves blocks for the request's next tokens and returns their number.

        Younger requests are preempted until the blocks are there; 0 if it was preempted itself.
        """
        while True:
            count = positions.tokens_to_compute(
                request.num_tokens_with_drafts, request.num_computed_tokens, budget
            )
            if self._grow(request, request.num_computed_tokens + count):
                return count
            if request.num_drafts:
                request.num_drafts = 0  # a guess is not worth another request's work
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return 0

    def _plan_waiting(self, scheduled: list[ScheduledRequest], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            chain = [] if self.prefix_cache is None else self.prefix_cache.match(request)
            if not self._has_room(
                request, sum(self._is_idle(e.block_id) for e in chain), len(chain)
            ):
                break
            self.waiting.popleft()
            status_before = request.status
            for entry in chain:
                self.pool.acquire(entry.block_id)
            request.prefix_chain = chain
            request.table_row = self.block_tables.take_row()
            self._append_blocks(request, [entry.block_id for entry in chain])
            request.num_computed_tokens = len(chain) * self.limits.block_size
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            count = positions.tokens_to_compute(
                request.num_tokens, request.num_computed_tokens, budget
            )
            grown = self._grow(request, request.num_computed_tokens + count)
            assert grown, "admission left too few blocks"
            scheduled.append(ScheduledRequest(request, count, 0, status_before))
            budget -= count

    def _has_room(self, request: Request, num_idle_hits: int, num_hits: int) -> bool:
        """Whether admitting the request leaves every running one what it is going to need soon.

        The blocks of all known tokens are promised to their requests. Beyond them there must be
        headroom to grow, or requests would be preempted as soon as they are admitted. It doubles
        with each preemption of the request, up to all that anyone may ever need: no request is
        preempted more than about log2(num_blocks) times.
        """
        block_size = self.limits.block_size
        known = positions.blocks_for(request.num_tokens, block_size)
        promised = known - num_hits + num_idle_hits
        growth = self._most_blocks(request) - known
        for other in self.running:
            known = positions.blocks_for(other.num_tokens, block_size)
            promised += max(0, known - len(other.block_ids))
            growth += max(0, self._most_blocks(other) - known)
        headroom = min(growth, (len(self.running) + 1) << request.num_preemptions)
        return promised + headroom <= self.pool.num_available

    def _is_idle(self, block_id: int) -> bool:
        return self.pool.ref_count(block_id) == 0

    def _most_blocks(self, request: Request) -> int:
        # The last token is emitted and never fed.
        return positions.blocks_for(request.max_total_tokens - 1, self.limits.block_size)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.num_drafts = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self.waiting.appendleft(request)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Extends the request's blocks to hold `num_tokens`; False if too few are available."""
        needed = positions.blocks_for(num_tokens, self.limits.block_size)
        count = needed - len(request.block_ids)
        if count <= 0:
            return True
        if count > self.pool.num_available:
            return False
        self._append_blocks(request, self.pool.allocate(count))
        return True

    def _append_blocks(self, request: Request, block_ids: list[int]) -> None:
        self.block_tables.write(request.table_row, len(request.block_ids), block_ids)
        request.block_ids += block_ids

    def _shrink(self, request: Request, num_blocks: int) -> None:
        if len(request.block_ids) > num_blocks:
            self.pool.release(request.block_ids[num_blocks:])
            del request.block_ids[num_blocks:]

    def _release(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.block_ids.clear()
        request.prefix_chain = []
        request.num_computed_tokens = 0
        self.block_tables.give_row(request.table_row)
        request.table_row = -1

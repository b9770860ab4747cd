"""Which requests compute how many tokens in the next step, and in which blocks.

No phases: every request lets its computed tokens catch up with its known ones (and drafts).
Requests are ranked by the policy, by arrival by default. Running requests come first, then waiting
ones, both in the order of their rank; `step_budget` divides the step's tokens. When blocks run out,
the running request of the lowest rank is preempted: it gives up its blocks and is computed anew
later. The one of the highest rank is never preempted and always fits the pool alone, so every step
makes progress.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from octavo.graphs.errors import QueueFullError
from octavo.runtime import positions
from octavo.runtime.admission import Admission
from octavo.runtime.cache.block_pool import BlockPool
from octavo.runtime.cache.block_tables import BlockTables
from octavo.runtime.cache.prefix_cache import PrefixCache, PrefixEntry
from octavo.runtime.capacity import EngineLimits
from octavo.runtime.request import Request, RequestStatus
from octavo.runtime.step_budget import SchedulingOptions, StepBudget

# Logits of a prompt are computed in pieces: each row is as long as the vocabulary.
MOST_PROMPT_LOGITS = 64

_by_rank = attrgetter("rank")


class ScheduledRequest(NamedTuple):
    """A request's part of a step, with what a rollback needs to know of the state before it."""

    request: Request
    num_new_tokens: int
    num_blocks_before: int
    status_before: RequestStatus


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The requests of one step, in batch order; their blocks are reserved.

    copies  (source, destination) blocks to be copied, in this order, before the step runs
    """

    scheduled: Sequence[ScheduledRequest] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_new_tokens for entry in self.scheduled)


class Scheduler:
    """Owns the queues; a plan changes them at once and is then either committed or rolled back."""

    def __init__(
        self,
        limits: EngineLimits,
        pool: BlockPool,
        prefix_cache: PrefixCache | None,
        options: SchedulingOptions | None = None,
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.options = options or SchedulingOptions()
        self.admission = Admission(limits, pool, prefix_cache)
        self.block_tables = BlockTables(limits.max_num_seqs, limits.max_blocks_per_seq)
        self.num_preemptions = 0
        # Both in the order of rank, the highest first.
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def check_queue(self) -> None:
        """Raises QueueFullError if no further request may wait, free places taken into account."""
        most = self.options.max_num_waiting
        num_waiting = len(self.waiting) + len(self.running) - self.limits.max_num_seqs
        if most is not None and num_waiting >= most:
            raise QueueFullError(
                f"{num_waiting} requests are waiting, max_num_waiting is {most}: try again later"
            )

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=_by_rank)

    def remove(self, request: Request) -> None:
        """Takes a request out wherever it is and releases its blocks."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request)

    def fork(self, parent: Request, child: Request) -> None:
        """Starts `child`, which begins with all of the parent's computed tokens.

        It shares the parent's blocks until it writes into one. Where the parent has lost them, or
        no sequence may join the batch, it waits like any other request.
        """
        if parent.table_row < 0 or len(self.running) >= self.limits.max_num_seqs:
            self.add(child)
            return
        for block_id in parent.block_ids:
            self.pool.acquire(block_id)
        child.table_row = self.block_tables.take_row()
        self._append_blocks(child, parent.block_ids)
        child.block_keys = parent.block_keys[: len(parent.prefix_chain)]
        child.prefix_chain = list(parent.prefix_chain)
        child.num_computed_tokens = parent.num_computed_tokens
        child.status = RequestStatus.RUNNING
        insort(self.running, child, key=_by_rank)

    def plan(self) -> StepPlan:
        """Chooses the next step's requests and reserves their blocks, preempting where it must.

        Undone by `rollback`, save for preemptions and evictions: what they gave up may have been
        overwritten by the failed step, and it is only work that is done again.
        """
        self._make_way()
        while True:
            scheduled: list[ScheduledRequest] = []
            plan = StepPlan(scheduled, [])
            budget = StepBudget(self.limits.max_num_batched_tokens, self.options)
            num_running = len(self.running)
            self._plan_running(plan, scheduled, budget)
            # After a preemption no blocks are left to admit anyone with.
            if self.waiting and len(self.running) == num_running:
                self._plan_waiting(plan, scheduled, budget)
            if scheduled or not self.waiting or not self.running:
                return plan
            # Every running sequence waits for others of its group, and those for its place.
            self._preempt(self.running[-1])

    def rollback(self, plan: StepPlan) -> None:
        """Restores the requests of a plan that was not committed."""
        destinations = {destination for _, destination in plan.copies}
        for entry in reversed(plan.scheduled):
            request = entry.request
            if entry.status_before is RequestStatus.RUNNING:
                self._shrink(request, entry.num_blocks_before)
                self._forget_copy(request, destinations)
            else:
                self.running.remove(request)
                self._release(request)
                request.status = entry.status_before
                self.add(request)

    def commit(self, request: Request) -> None:
        """Takes note of what a step computed: `num_computed_tokens` is final, drafts are gone."""
        if self.prefix_cache is not None and request.error is None:
            self.prefix_cache.register(request)
        if request.finished:
            self.running.remove(request)
            self._release(request)
        else:
            blocks = positions.blocks_for(request.num_computed_tokens, self.limits.block_size)
            self._shrink(request, blocks)

    def _make_way(self) -> None:
        """Preempts less important requests for the first waiting one, if that gives it a place."""
        if self.options.policy != "priority" or not self.waiting:
            return
        head = self.waiting[0]
        num_kept = sum(request.priority <= head.priority for request in self.running)
        kept, victims = self.running[:num_kept], self.running[num_kept:]
        num_prefills = sum(_misses_prompt(request) for request in kept)
        if (
            not victims
            or num_kept >= self.limits.max_num_seqs
            or num_prefills >= self.options.max_num_partial_prefills
        ):
            return
        chain = self._match(head)
        hits = {entry.block_id for entry in chain}
        held = Counter(block_id for request in victims for block_id in request.block_ids)
        num_freed = sum(
            self.pool.ref_count(block_id) == count
            for block_id, count in held.items()
            if block_id not in hits
        )
        if not self.admission.has_room(head, chain, kept, num_freed):
            return
        while len(self.running) > num_kept and (
            len(self.running) >= self.limits.max_num_seqs
            or not self.admission.has_room(head, self._match(head), self.running)
        ):
            self._preempt(self.running[-1])

    def _plan_running(
        self, plan: StepPlan, scheduled: list[ScheduledRequest], budget: StepBudget
    ) -> None:
        shares = self._share(budget)
        index = 0
        while index < len(self.running):  # preemptions shorten the list from its end
            request = self.running[index]
            if shares[index]:
                blocks_before = len(request.block_ids)
                count = self._reserve_running(request, shares[index], plan)
                if count == 0:
                    break
                scheduled.append(
                    ScheduledRequest(request, count, blocks_before, RequestStatus.RUNNING)
                )
            index += 1

    def _share(self, budget: StepBudget) -> list[int]:
        """The tokens of each running request in this step."""
        missing = [r.num_tokens_with_drafts - r.num_computed_tokens for r in self.running]
        shares = [0] * len(missing)
        prefills, drafting = [], []
        for index, request in enumerate(self.running):
            if _misses_prompt(request):
                prefills.append(index)
            elif missing[index]:
                shares[index] = budget.take_decode(1)
                if request.num_drafts:
                    drafting.append(index)
        for index in drafting:  # no guess takes another request's token
            shares[index] += budget.take_decode(missing[index] - shares[index])
        num_others = len(prefills) + len(self.waiting)
        for index in prefills:
            num_others -= 1
            most = _most_at_once(self.running[index])
            shares[index] = budget.take_prefill(missing[index], num_others, most)
        return shares

    def _reserve_running(self, request: Request, share: int, plan: StepPlan) -> int:
        """Reserves blocks for the request's next tokens and returns their number.

        Requests of lower rank are preempted until the blocks are there; 0 if it was preempted
        itself.
        """
        while True:
            count = positions.tokens_to_compute(
                request.num_tokens_with_drafts, request.num_computed_tokens, share
            )
            if self._grow(request, request.num_computed_tokens + count, plan):
                return count
            if request.num_drafts:
                request.num_drafts = 0  # a guess is not worth another request's work
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return 0

    def _plan_waiting(
        self, plan: StepPlan, scheduled: list[ScheduledRequest], budget: StepBudget
    ) -> None:
        while (
            self.waiting and budget.admits_prefills and len(self.running) < self.limits.max_num_seqs
        ):
            request = self.waiting[0]
            chain = self._match(request)
            if not self.admission.has_room(request, chain, self.running):
                break
            del self.waiting[0]
            status_before = request.status
            for entry in chain:
                self.pool.acquire(entry.block_id)
            request.prefix_chain = chain
            request.table_row = self.block_tables.take_row()
            self._append_blocks(request, [entry.block_id for entry in chain])
            request.num_computed_tokens = len(chain) * self.limits.block_size
            self._copy_part(request, plan)
            request.status = RequestStatus.RUNNING
            insort(self.running, request, key=_by_rank)
            count = budget.take_prefill(
                request.num_tokens - request.num_computed_tokens,
                len(self.waiting),
                _most_at_once(request),
            )
            grown = self._grow(request, request.num_computed_tokens + count, plan)
            assert grown, "admission left too few blocks"
            scheduled.append(ScheduledRequest(request, count, 0, status_before))

    def _match(self, request: Request) -> list[PrefixEntry]:
        return [] if self.prefix_cache is None else self.prefix_cache.match(request)

    def _copy_part(self, request: Request, plan: StepPlan) -> None:
        """Begins the block after the request's prefix hit with what another one computed of it."""
        if self.prefix_cache is None:
            return
        part = self.prefix_cache.match_part(request, request.prefix_chain)
        if part is not None:
            # It may be the very block that is copied, evicted for it: its content is still there.
            (block_id,) = self.pool.allocate(1)
            plan.copies.append((part.block_id, block_id))
            self._append_blocks(request, [block_id])
            request.num_computed_tokens += part.num_tokens

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.num_drafts = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self.add(request)

    def _grow(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Extends the request's blocks to hold `num_tokens`; False if too few are available.

        A block that it is about to write into and shares with others is replaced by a copy.
        """
        block_size = self.limits.block_size
        first = positions.full_blocks(request.num_computed_tokens, block_size)
        shared = (
            first < len(request.block_ids) and self.pool.ref_count(request.block_ids[first]) > 1
        )
        count = positions.blocks_for(num_tokens, block_size) - len(request.block_ids)
        if count <= 0 and not shared:
            return True
        if max(count, 0) + shared > self.pool.num_available:
            return False
        if shared:
            source, (destination,) = request.block_ids[first], self.pool.allocate(1)
            plan.copies.append((source, destination))
            request.block_ids[first] = destination
            self.block_tables.write(request.table_row, first, [destination])
            self.pool.release([source])
        if count > 0:
            self._append_blocks(request, self.pool.allocate(count))
        return True

    def _forget_copy(self, request: Request, destinations: set[int]) -> None:
        """Gives up a copy that may never have been made: its few tokens are computed anew."""
        if request.block_ids and request.block_ids[-1] in destinations:
            self._shrink(request, len(request.block_ids) - 1)
            request.num_computed_tokens = len(request.block_ids) * self.limits.block_size

    def _append_blocks(self, request: Request, block_ids: Sequence[int]) -> None:
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
        request.beam_candidates = None
        request.num_computed_tokens = 0
        self.block_tables.give_row(request.table_row)
        request.table_row = -1


def _misses_prompt(request: Request) -> bool:
    """Whether more than the last known token, and drafts, is to be computed."""
    return request.num_computed_tokens < request.num_tokens - 1


def _most_at_once(request: Request) -> int | None:
    """A request's own limit on the tokens of one step."""
    wants_all = request.first_logits_position < request.num_tokens - 1
    return MOST_PROMPT_LOGITS if wants_all else None

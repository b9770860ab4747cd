"""The step: plan and reserve, pack, execute, accept, commit. It happens as a whole or not."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from octavo.backends.base import Executable, StepOutputs
from octavo.runtime import invariants, stopping
from octavo.runtime.acceptance import Acceptance, Gain
from octavo.runtime.batch import BatchPacker, PackedStep
from octavo.runtime.beam_group import BeamGroup
from octavo.runtime.cache.block_pool import BlockPool
from octavo.runtime.cache.eviction import DEFAULT_POLICY, make_policy
from octavo.runtime.cache.prefix_cache import PrefixCache
from octavo.runtime.capacity import EngineLimits
from octavo.runtime.metrics.engine_metrics import EngineMetrics
from octavo.runtime.metrics.snapshots import Snapshot
from octavo.runtime.request import Request
from octavo.runtime.scheduler import ScheduledRequest, Scheduler, StepPlan
from octavo.runtime.speculation.drafter import ComputedStep
from octavo.runtime.speculation.speculator import Speculator
from octavo.runtime.speculation.verified import Verified
from octavo.runtime.step_budget import SchedulingOptions

CHECK_INVARIANTS = "OCTAVO_CHECK_INVARIANTS"


class Engine:
    """Runs requests on an executable. Not thread-safe."""

    def __init__(
        self,
        executable: Executable,
        limits: EngineLimits,
        *,
        sampled_vocab_size: int,
        enable_prefix_caching: bool = True,
        eviction_policy: str = DEFAULT_POLICY,
        scheduling: SchedulingOptions | None = None,
        speculator: Speculator | None = None,
        acceptance: Literal["exact", "rejection"] = "exact",
    ) -> None:
        self.limits = limits
        self.speculator = speculator
        self.pool = BlockPool(
            limits.num_kv_blocks, make_policy(eviction_policy, limits.num_kv_blocks)
        )
        self.prefix_cache = (
            PrefixCache(self.pool, limits.block_size) if enable_prefix_caching else None
        )
        self.scheduler = Scheduler(limits, self.pool, self.prefix_cache, scheduling)
        self._executable = executable
        self._packer = BatchPacker(limits)
        self._acceptance = Acceptance(
            sampled_vocab_size, executable if acceptance == "rejection" else None
        )
        self.metrics = EngineMetrics()
        self._requests: set[Request] = set()  # every sequence that waits or runs
        self._arrival_numbers = itertools.count()
        self._check_invariants = os.environ.get(CHECK_INVARIANTS) == "1"
        executable.allocate_kv_cache(limits.num_kv_blocks)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def check_fits(self, request: Request) -> None:
        """Raises CapacityError if the request could never run in this pool."""
        self.scheduler.admission.check_fits(request)

    def add_request(self, request: Request) -> None:
        """Queues a request; CapacityError if it can never run, QueueFullError if it cannot now."""
        self.check_fits(request)
        self.scheduler.check_queue()
        request.arrival_number = next(self._arrival_numbers)
        request.times.arrival = time.monotonic()
        self._requests.add(request)
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """Ends a sequence at once and frees its blocks; harmless when it has already ended."""
        for follower in request.followers:
            self.abort(follower)
        if request in self._requests:
            self._requests.remove(request)
            self.scheduler.remove(request)
        if not request.finished:
            request.finish("abort")
            request.times.finished = time.monotonic()
            if request.group is None or request is request.group.root:
                self.metrics.observe_finished(request)

    def step(self) -> list[Request]:
        """Computes one step and returns the requests that gained tokens or ended.

        If anything in it raises, every request is as it was before the step (a preempted one stays
        preempted), the error propagates, and the step may be tried again or requests aborted. An
        error of one request alone ends that request, with `finish_reason` "error".
        """
        started = time.monotonic()
        plan = self.scheduler.plan()
        if not plan.scheduled:
            if self._requests:
                raise invariants.InvariantError("requests wait and none can be scheduled")
            return []
        try:
            if plan.copies:
                self._copy_blocks(plan.copies)
            packed = self._packer.pack(plan, self.scheduler.block_tables)
            outputs = self._executable.run(packed.inputs)
            gains = self._acceptance.accept(plan, packed.logits_rows, outputs.logits)
        except BaseException:
            self.scheduler.rollback(plan)
            raise
        speculator = self.speculator
        verified = [] if speculator is None else _verified(plan.scheduled, gains)
        progressed = self._commit(plan, gains, started)
        seconds = time.monotonic() - started
        self.metrics.observe_step(plan.num_tokens, seconds)
        if speculator is not None:
            speculator.learn(verified, plan.num_tokens, seconds)
            speculator.propose(_computed(plan, packed, outputs), self.scheduler)
        if self._check_invariants:
            invariants.check(invariants.snapshot(self.scheduler))
        return progressed

    def snapshot(self) -> Snapshot:
        """Every metric by name: see docs/metrics.md."""
        counts = None if self.speculator is None else self.speculator.counts
        return self.metrics.snapshot(self.scheduler, counts)

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self._executable.copy_blocks(copies)
        if self.speculator is not None:
            self.speculator.copy_blocks(copies)

    def fork(self, parent: Request, child: Request) -> None:
        """Starts `child` with the parent's computed tokens, in the parent's blocks."""
        child.arrival_number = parent.arrival_number
        child.num_cached_tokens = parent.num_cached_tokens
        self._requests.add(child)
        self.scheduler.fork(parent, child)

    def end(self, request: Request) -> None:
        """Takes out a beam that was given up: its request goes on, or ends with its group."""
        if request in self._requests:  # else an error of its own has ended it
            self._requests.remove(request)
            self.scheduler.remove(request)

    def _commit(self, plan: StepPlan, gains: Sequence[Gain], started: float) -> list[Request]:
        now = time.monotonic()
        progressed: list[Request] = []
        groups: dict[BeamGroup, None] = {}
        for entry, gain in zip(plan.scheduled, gains, strict=True):
            request = entry.request
            if request.num_cached_tokens is None:
                self._note_admission(request, started)
            request.num_computed_tokens += entry.num_new_tokens
            if gain.followers:
                progressed += self._start_followers(request, gain.followers, now)
            gained = self._give(request, gain, now)
            if request.group is not None:
                groups[request.group] = None
            elif gained:
                progressed.append(request)
            if request.finished:
                self._requests.remove(request)
            self.scheduler.commit(request)
        progressed += [group.root for group in groups if self._advance(group, now)]
        return progressed

    def _advance(self, group: BeamGroup, now: float) -> bool:
        root = group.root
        num_running = len(group.beams)
        if not group.advance(self):
            return False
        root.times.mark_tokens(now)
        self.metrics.observe_tokens(root, num_running)
        if group.done:
            root.finish(group.finish_reason)
            root.times.finished = now
            self.metrics.observe_finished(root)
        return True

    def _give(self, request: Request, gain: Gain, now: float) -> bool:
        """Gives a sequence what it gained; True if it has more tokens than before, or has ended."""
        num_tokens = request.num_tokens
        request.prompt_logprobs += gain.prompt_logprobs
        request.beam_candidates = gain.candidates
        if gain.error is not None:
            request.error = gain.error
            request.finish("error")
        for index, token_id in enumerate(gain.token_ids):
            request.logprobs += gain.logprobs[index : index + 1]
            if stopping.append_token(request, token_id):
                break
        count = request.num_tokens - num_tokens
        if count:
            # The last token is known and not computed; rejected drafts are neither.
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
            request.num_drafts = 0
            request.times.mark_tokens(now)
            self.metrics.observe_tokens(request, count)
        if request.finished:
            request.times.finished = now
            if request.group is None:
                self.metrics.observe_finished(request)
        return count > 0 or request.finished

    def _note_admission(self, request: Request, started: float) -> None:
        """The first time only: what is computed again after a preemption is no prefix hit."""
        request.num_cached_tokens = request.num_computed_tokens
        request.times.first_scheduled = started
        self.metrics.observe_scheduled(request)
        if self.prefix_cache is not None:
            self.prefix_cache.record_query(request.num_prompt_tokens, request.num_cached_tokens)

    def _start_followers(self, leader: Request, gains: Sequence[Gain], now: float) -> list[Request]:
        followers, leader.followers = leader.followers, ()
        for follower, gain in zip(followers, gains, strict=True):
            follower.prompt_logprobs = leader.prompt_logprobs
            follower.num_cached_tokens = leader.num_cached_tokens
            follower.times = replace(leader.times)
            self._give(follower, gain, now)
            if not follower.finished:
                self.fork(leader, follower)
        return list(followers)


def _verified(scheduled: Sequence[ScheduledRequest], gains: Sequence[Gain]) -> list[Verified]:
    """What became of the step's drafts, as long as the requests still have them."""
    verified = []
    for entry, gain in zip(scheduled, gains, strict=True):
        request = entry.request
        if request.num_drafts and gain.token_ids:
            end = request.num_computed_tokens + entry.num_new_tokens
            num_drafts = end - request.num_tokens
            if num_drafts > 0:
                accepted = len(gain.token_ids) - 1
                verified.append(Verified(request, request.draft_method, num_drafts, accepted))
    return verified


def _computed(plan: StepPlan, packed: PackedStep, outputs: StepOutputs) -> ComputedStep:
    return ComputedStep(
        requests=[entry.request for entry in plan.scheduled],
        starts=packed.inputs.prefix_offsets.tolist(),
        inputs=packed.inputs,
        logits_rows=packed.logits_rows,
        hidden_states=outputs.hidden_states,
    )

"""The step: plan and reserve, pack, execute, accept, commit. It happens as a whole or not."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from octavo.backends.base import Executable, Float32Array
from octavo.runtime import invariants
from octavo.runtime.batch import BatchPacker
from octavo.runtime.block_pool import BlockPool
from octavo.runtime.capacity import EngineLimits
from octavo.runtime.prefix_cache import PrefixCache
from octavo.runtime.request import FinishReason, Request
from octavo.runtime.sampler import Sampler, SamplingRow
from octavo.runtime.scheduler import Scheduler, StepPlan

CHECK_INVARIANTS = "OCTAVO_CHECK_INVARIANTS"


class Accepted(NamedTuple):
    """The tokens a request gains in a step, and whether they end it."""

    token_ids: Sequence[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


_NOTHING = Accepted(())


class Engine:
    """Runs requests on an executable. Not thread-safe."""

    def __init__(
        self,
        executable: Executable,
        limits: EngineLimits,
        *,
        sampled_vocab_size: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_kv_blocks)
        self.prefix_cache = (
            PrefixCache(self.pool, limits.block_size) if enable_prefix_caching else None
        )
        self.scheduler = Scheduler(limits, self.pool, self.prefix_cache)
        self._executable = executable
        self._packer = BatchPacker(limits)
        self._sampler = Sampler(sampled_vocab_size)
        self._requests: dict[str, Request] = {}
        self._check_invariants = os.environ.get(CHECK_INVARIANTS) == "1"
        executable.allocate_kv_cache(limits.num_kv_blocks)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def check_fits(self, request: Request) -> None:
        """Raises CapacityError if the request could never run in this pool."""
        self.scheduler.check_fits(request)

    def add_request(self, request: Request) -> None:
        """Queues a request; CapacityError if it could never run in this pool."""
        if request.request_id in self._requests:
            raise AssertionError(f"request id {request.request_id!r} is already in use")
        self.check_fits(request)
        request.times.arrival = time.monotonic()
        self._requests[request.request_id] = request
        self.scheduler.add(request)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request at once and frees its blocks; None if it has already finished."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.remove(request)
            request.finish("abort")
            request.times.finished = time.monotonic()
        return request

    def step(self) -> list[Request]:
        """Computes one step and returns the requests that gained tokens.

        If anything in it raises, every request is as it was before the step (a preempted one stays
        preempted), the error propagates, and the step may be tried again or requests aborted.
        """
        started = time.monotonic()
        plan = self.scheduler.plan()
        if not plan.scheduled:
            if self._requests:
                raise invariants.InvariantError("requests wait and none can be scheduled")
            return []
        try:
            packed = self._packer.pack(plan, self.scheduler.block_tables)
            outputs = self._executable.run(packed.inputs)
            accepted = self._accept(plan, packed.logits_rows, outputs.logits)
        except BaseException:
            self.scheduler.rollback(plan)
            raise
        progressed = self._commit(plan, accepted, started)
        if self._check_invariants:
            invariants.check(invariants.snapshot(self.scheduler))
        return progressed

    def _accept(
        self, plan: StepPlan, logits_rows: Sequence[int], logits: Float32Array
    ) -> list[Accepted]:
        """Samples every row of `logits` [L, V] and decides what requests gain; changes nothing."""
        rows = [
            SamplingRow(entry.request.params, entry.request.seed, entry.request.num_tokens + index)
            for entry, count in zip(plan.scheduled, logits_rows, strict=True)
            for index in range(count)
        ]
        sampled = self._sampler.sample(logits, rows) if rows else []
        accepted = []
        start = 0
        for entry, count in zip(plan.scheduled, logits_rows, strict=True):
            tokens = sampled[start : start + count]
            accepted.append(_accept_tokens(entry.request, tokens) if count else _NOTHING)
            start += count
        return accepted

    def _commit(
        self, plan: StepPlan, accepted: Sequence[Accepted], started: float
    ) -> list[Request]:
        now = time.monotonic()
        progressed = []
        for entry, gain in zip(plan.scheduled, accepted, strict=True):
            request = entry.request
            if request.num_cached_tokens is None:
                request.num_cached_tokens = request.num_computed_tokens
                request.times.first_scheduled = started
            if gain.token_ids:
                # The last token is known but not computed; rejected drafts are neither.
                request.num_computed_tokens = request.num_tokens + len(gain.token_ids) - 1
                request.num_drafts = 0
                for token_id in gain.token_ids:
                    request.append_token(token_id)
                request.times.mark_tokens(now)
                progressed.append(request)
            else:
                request.num_computed_tokens += entry.num_new_tokens
            if gain.finish_reason is not None:
                request.finish(gain.finish_reason, gain.stop_reason)
                request.times.finished = now
                del self._requests[request.request_id]
            self.scheduler.commit(request)
        return progressed


def _accept_tokens(request: Request, sampled: Sequence[int]) -> Accepted:
    """Keeps the drafts that equal what was sampled at their place, and the token after them.

    Sampled row by row with the target's own distribution, the tokens are exactly those that would
    have come one at a time.
    """
    drafts = request.draft_token_ids if request.num_drafts else ()
    tokens: list[int] = []
    for index, token in enumerate(sampled):
        tokens.append(token)
        if token in request.eos_token_ids:
            return Accepted(tokens, "stop")
        if token in request.stop_token_ids:
            return Accepted(tokens, "stop", token)
        if request.num_tokens + len(tokens) >= request.max_total_tokens:
            return Accepted(tokens, "length")
        if index >= len(drafts) or drafts[index] != token:
            break
    return Accepted(tokens)

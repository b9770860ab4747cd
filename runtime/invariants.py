"""What must hold between two steps, as pure functions over snapshots of the pool and the requests.

Used by the property tests, and after every step when OCTAVO_CHECK_INVARIANTS=1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.graphs.errors import OctavoError
from octavo.runtime import positions
from octavo.runtime.request import Request, RequestStatus

if TYPE_CHECKING:
    from octavo.runtime.scheduler import Scheduler


class InvariantError(OctavoError):
    """Octavo's own bookkeeping is wrong: a bug, never the user's mistake."""


@dataclass(frozen=True)
class RequestSnapshot:
    request_id: str
    status: RequestStatus
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    num_drafts: int
    max_total_tokens: int
    block_ids: tuple[int, ...]
    rank: tuple[int, int, int]
    parked: bool  # a beam that waits for those beside it, all of its tokens computed
    cache_salt: bytes


@dataclass(frozen=True)
class CachedBlock:
    block_id: int
    tokens: tuple[int, ...]  # of the whole prefix up to the block's end
    cache_salt: bytes


@dataclass(frozen=True)
class Snapshot:
    block_size: int
    max_num_seqs: int
    ref_counts: tuple[int, ...]
    free: tuple[int, ...]
    evictable: tuple[int, ...]
    cached: tuple[CachedBlock, ...]
    pinned: tuple[int, ...]  # one entry for each pin of a block
    running: tuple[RequestSnapshot, ...]
    waiting: tuple[RequestSnapshot, ...]


def snapshot(scheduler: Scheduler) -> Snapshot:
    pool = scheduler.pool
    return Snapshot(
        block_size=scheduler.limits.block_size,
        max_num_seqs=scheduler.limits.max_num_seqs,
        ref_counts=tuple(pool.ref_count(block_id) for block_id in range(pool.num_blocks)),
        free=pool.free_block_ids(),
        evictable=pool.evictable_block_ids(),
        cached=_cached_blocks(scheduler),
        pinned=() if scheduler.prefix_cache is None else scheduler.prefix_cache.pinned_block_ids(),
        running=tuple(request_snapshot(request) for request in scheduler.running),
        waiting=tuple(request_snapshot(request) for request in scheduler.waiting),
    )


def request_snapshot(request: Request) -> RequestSnapshot:
    return RequestSnapshot(
        request_id=request.request_id,
        status=request.status,
        token_ids=tuple(request.tokens(0, request.num_tokens).tolist()),
        num_computed_tokens=request.num_computed_tokens,
        num_drafts=request.num_drafts,
        max_total_tokens=request.max_total_tokens,
        block_ids=tuple(request.block_ids),
        rank=request.rank,
        parked=request.beam_candidates is not None,
        cache_salt=request.cache_salt,
    )


def check(state: Snapshot) -> None:
    """Raises InvariantError naming every violation."""
    violations = list(find_violations(state))
    if violations:
        raise InvariantError("; ".join(violations))


def find_violations(state: Snapshot) -> Iterator[str]:
    yield from _reference_violations(state)
    yield from _partition_violations(state)
    yield from _request_violations(state)
    yield from _queue_violations(state)
    yield from _sharing_violations(state)


def _reference_violations(state: Snapshot) -> Iterator[str]:
    users = Counter(block for request in state.running for block in request.block_ids)
    users.update(state.pinned)
    for block_id, count in enumerate(state.ref_counts):
        if count != users[block_id]:
            yield f"block {block_id} counts {count} users and has {users[block_id]}"


def _partition_violations(state: Snapshot) -> Iterator[str]:
    unused = [block_id for block_id, count in enumerate(state.ref_counts) if count == 0]
    if sorted(state.free + state.evictable) != unused:
        yield f"free {state.free} and evictable {state.evictable} are not the unused {unused}"
    cached = {block.block_id for block in state.cached}
    for block_id in cached.intersection(state.free):
        yield f"free block {block_id} is in the prefix cache"
    for block_id in set(state.evictable) - cached:
        yield f"evictable block {block_id} is not in the prefix cache"


def _request_violations(state: Snapshot) -> Iterator[str]:
    for request in state.running:
        name = f"running request {request.request_id}"
        computed, known = request.num_computed_tokens, len(request.token_ids)
        if request.status is not RequestStatus.RUNNING:
            yield f"{name} is {request.status}"
        if not 0 <= computed < known + request.parked:
            yield f"{name} has computed {computed} of {known} tokens"
        if known >= request.max_total_tokens:
            yield f"{name} has reached its {request.max_total_tokens} tokens and goes on"
        needed = positions.blocks_for(computed, state.block_size)
        if len(request.block_ids) != needed:
            yield f"{name} holds {len(request.block_ids)} blocks for {computed} computed tokens"
        if len(set(request.block_ids)) != len(request.block_ids):
            yield f"{name} holds a block twice: {request.block_ids}"
    for request in state.waiting:
        name = f"waiting request {request.request_id}"
        if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            yield f"{name} is {request.status}"
        if request.block_ids or request.num_computed_tokens or request.num_drafts:
            yield f"{name} holds blocks {request.block_ids} or computed tokens"


def _queue_violations(state: Snapshot) -> Iterator[str]:
    if len(state.running) > state.max_num_seqs:
        yield f"{len(state.running)} requests run, the limit is {state.max_num_seqs}"
    for queue in (state.running, state.waiting):
        ranks = [request.rank for request in queue]
        if ranks != sorted(ranks):
            yield f"requests are not in the order of their rank: {ranks}"


def _sharing_violations(state: Snapshot) -> Iterator[str]:
    """A block's users and its prefix-cache entry agree on all computed tokens up to its end."""
    owners = {block.block_id: (block.tokens, block.cache_salt) for block in state.cached}
    for request in state.running:
        for index, block_id in enumerate(request.block_ids):
            end = min((index + 1) * state.block_size, request.num_computed_tokens)
            if end % state.block_size and block_id in owners and len(owners[block_id][0]) > end:
                yield f"unfinished block {block_id} of {request.request_id} is cached"
            content = (request.token_ids[:end], request.cache_salt)
            if owners.setdefault(block_id, content) != content:
                yield f"block {block_id} of {request.request_id} holds another prefix"


def _cached_blocks(scheduler: Scheduler) -> tuple[CachedBlock, ...]:
    if scheduler.prefix_cache is None:
        return ()
    return tuple(
        CachedBlock(entry.block_id, entry.prefix_token_ids(), entry.salt)
        for entry in scheduler.prefix_cache.entries()
    )

"""Prefix cache: what is found, counted, pinned and forgotten."""

from __future__ import annotations

import pytest

from octavo.runtime.cache.block_pool import BlockPool
from octavo.runtime.cache.eviction import POLICIES, make_policy
from octavo.runtime.cache.prefix_cache import PrefixCache, PrefixCacheStats
from octavo.runtime.request import Request
from octavo.runtime.sampling.sampling_params import SamplingParams
from tests.unit.runtime_harness import Harness, alone, random_tokens

BLOCK_SIZE = 4


class Cache:
    """A pool and its prefix cache, and the life of a request as the scheduler leads it."""

    def __init__(self, num_blocks: int = 16, policy: str = "lhd") -> None:
        self.pool = BlockPool(num_blocks, make_policy(policy, num_blocks))
        self.prefix_cache = PrefixCache(self.pool, BLOCK_SIZE)

    def admit(self, tokens: list[int], **params: int) -> Request:
        """A request with blocks for all of its tokens, of which only the found are computed."""
        request = self.waiting(tokens, **params)
        chain = self.prefix_cache.match(request)
        for entry in chain:
            self.pool.acquire(entry.block_id)
        request.prefix_chain = chain
        request.block_ids = [entry.block_id for entry in chain]
        request.block_ids += self.pool.allocate(-(-len(tokens) // BLOCK_SIZE) - len(chain))
        request.num_computed_tokens = len(chain) * BLOCK_SIZE
        return request

    def compute(self, request: Request, num_tokens: int | None = None) -> Request:
        request.num_computed_tokens = request.num_tokens if num_tokens is None else num_tokens
        self.prefix_cache.register(request)
        return request

    def end(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.prefix_chain = []

    def fill(self, tokens: list[int]) -> Request:
        """A request that has come, computed all of its tokens, and gone."""
        request = self.compute(self.admit(tokens))
        self.end(request)
        return request

    def found(self, tokens: list[int]) -> int:
        return len(self.prefix_cache.match(self.waiting(tokens)))

    def waiting(self, tokens: list[int], **params: int) -> Request:
        return Request(
            "r",
            tokens,
            SamplingParams(**params),  # type: ignore[arg-type]
            max_model_len=100,
            eos_token_ids=(),
            seed=0,
        )


def test_p08_a_block_is_found_only_after_it_was_computed() -> None:
    cache = Cache()
    request = cache.admit(list(range(12)))
    cache.prefix_cache.register(request)
    assert cache.found(list(range(13))) == 0
    cache.compute(request, 7)
    assert cache.found(list(range(13))) == 1
    cache.end(request)  # the other blocks hold nothing and are free
    assert cache.found(list(range(13))) == 1
    assert len(cache.pool.free_block_ids()) == 15


def test_tokens_whose_logits_are_wanted_are_not_taken_from_the_cache() -> None:
    cache = Cache()
    cache.fill(list(range(12)))
    assert len(cache.prefix_cache.match(cache.waiting(list(range(13))))) == 3
    assert len(cache.prefix_cache.match(cache.waiting(list(range(12))))) == 2
    request = cache.waiting(list(range(12)), prompt_logprobs=0)
    assert cache.prefix_cache.match(request) == []


def test_p02_a_hit_shares_the_very_blocks_and_computes_only_the_rest() -> None:
    cache = Cache()
    first = cache.compute(cache.admit(list(range(10))))
    second = cache.admit(list(range(10)))
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    assert second.num_computed_tokens == 8
    assert [cache.pool.ref_count(block) for block in first.block_ids] == [2, 2, 1]


def test_statistics() -> None:
    cache = Cache(num_blocks=4)
    assert cache.prefix_cache.stats == PrefixCacheStats(0, 0, 0, 0, 0, 0)
    assert cache.prefix_cache.stats.hit_rate == 0
    cache.fill(list(range(12)))
    cache.prefix_cache.record_query(13, 12)
    cache.prefix_cache.record_query(3, 0)
    cache.fill(list(range(20, 28)))  # one block is free, one of three is given up
    stats = cache.prefix_cache.stats
    assert stats == PrefixCacheStats(
        queries=16, hits=12, evictions=1, resets=0, cached_blocks=4, pinned_blocks=0
    )
    assert stats.hit_rate == 0.75


def test_p11_what_is_computed_again_after_a_preemption_is_neither_asked_for_nor_found() -> None:
    harness = Harness(num_kv_blocks=9, block_size=4, max_num_seqs=4)
    prompts = [random_tokens(6, seed=seed) for seed in range(4)]
    requests = [harness.add(prompt, max_tokens=18) for prompt in prompts]
    harness.run()
    assert sum(request.num_preemptions for request in requests) > 0
    assert harness.engine.prefix_cache is not None
    stats = harness.engine.prefix_cache.stats
    assert (stats.queries, stats.hits) == (4 * 6, 0)
    assert [r.output_token_ids for r in requests] == [alone(prompt, 18) for prompt in prompts]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pinned_prefix_stays_until_it_is_released(policy: str) -> None:
    cache = Cache(num_blocks=6, policy=policy)
    request = cache.fill(list(range(10)))  # two full blocks and a part of one
    pin = cache.prefix_cache.pin(request)
    assert pin.num_tokens == 8
    assert cache.prefix_cache.num_pinned_blocks == 2
    assert cache.pool.num_available == 4
    for start in range(100, 200, 20):
        cache.fill(list(range(start, start + 16)))
    assert cache.found(list(range(9))) == 2
    pin.release()
    pin.release()
    assert cache.prefix_cache.num_pinned_blocks == 0
    assert cache.pool.num_available == 6
    for start in range(200, 300, 20):
        cache.fill(list(range(start, start + 20)))
    assert cache.found(list(range(9))) == 0


def test_pins_of_one_prefix_count_one_by_one() -> None:
    cache = Cache()
    request = cache.compute(cache.admit(list(range(8))))
    long = cache.prefix_cache.pin(request)
    short = cache.prefix_cache.pin(cache.waiting(list(range(5))))
    first, second = request.block_ids
    assert sorted(cache.prefix_cache.pinned_block_ids()) == sorted([first, first, second])
    assert cache.prefix_cache.stats.pinned_blocks == 2
    assert [cache.pool.ref_count(block) for block in (first, second)] == [3, 2]
    long.release()
    assert cache.prefix_cache.pinned_block_ids() == (first,)
    short.release()
    assert cache.prefix_cache.pinned_block_ids() == ()
    cache.end(request)
    assert cache.pool.num_available == 16


def test_only_what_is_cached_can_be_pinned() -> None:
    cache = Cache()
    pin = cache.prefix_cache.pin(cache.waiting(list(range(9))))
    assert (pin.num_tokens, pin.block_ids) == (0, ())
    pin.release()


def test_reset_forgets_all_but_the_pinned() -> None:
    cache = Cache()
    pin = cache.prefix_cache.pin(cache.fill(list(range(8))))
    cache.fill(list(range(16)))
    cache.fill(list(range(20, 30)))
    cache.prefix_cache.reset()
    assert cache.found(list(range(17))) == 2
    assert cache.found(list(range(20, 30))) == 0
    assert len(cache.pool.free_block_ids()) == 14
    assert cache.pool.evictable_block_ids() == ()
    pin.release()
    cache.prefix_cache.reset()
    assert cache.found(list(range(17))) == 0
    assert cache.prefix_cache.stats.resets == 2
    assert cache.prefix_cache.stats.evictions == 0
    assert len(cache.pool.free_block_ids()) == 16


def test_reset_while_requests_run_leaves_them_their_blocks_and_nothing_of_them_is_found() -> None:
    cache = Cache()
    running = cache.admit(list(range(16)))
    cache.compute(running, 9)  # two blocks, and a part of the third
    cache.prefix_cache.reset()
    assert cache.found(list(range(17))) == 0
    cache.compute(running)
    assert cache.prefix_cache.entries() == ()
    fresh = cache.compute(cache.admit(list(range(16))))
    assert set(fresh.block_ids).isdisjoint(running.block_ids)
    cache.compute(running)
    cache.end(running)
    assert len(cache.pool.free_block_ids()) == 12  # uncached blocks, free at once
    assert [e.block_id for e in cache.prefix_cache.entries()] == fresh.block_ids


def test_reset_forgets_what_a_request_without_a_full_block_had_computed() -> None:
    cache = Cache()
    running = cache.compute(cache.admit(list(range(8))), 3)
    cache.prefix_cache.reset()
    cache.compute(running)
    assert cache.found(list(range(9))) == 0


def test_a_request_that_waits_through_a_reset_is_cached_like_any_other() -> None:
    cache = Cache()
    waiting = cache.waiting(list(range(9)))
    assert cache.prefix_cache.match(waiting) == []
    cache.prefix_cache.reset()
    assert cache.prefix_cache.match(waiting) == []
    waiting.block_ids = cache.pool.allocate(3)
    cache.compute(waiting)
    assert cache.found(list(range(9))) == 2


def test_after_a_reset_a_fork_is_cached_if_its_parent_was() -> None:
    cache = Cache()
    before = cache.compute(cache.admit(list(range(6))))
    cache.prefix_cache.reset()
    after = cache.compute(cache.admit(list(range(20, 26))))
    for parent, expected in ((before, 0), (after, 2)):
        fork = cache.waiting([*parent.prompt_token_ids, 90, 91])
        fork.prefix_chain = list(parent.prefix_chain)
        (own,) = cache.pool.allocate(1)
        fork.block_ids = [parent.block_ids[0], own]
        cache.pool.acquire(parent.block_ids[0])
        cache.compute(fork)
        assert cache.found([*parent.prompt_token_ids, 90, 91, 92]) == expected


def test_forks_share_a_block_that_is_not_full_until_the_last_of_them_ends() -> None:
    cache = Cache()
    parent = cache.compute(cache.admit(list(range(6))))
    full, partial = parent.block_ids
    for _ in range(2):
        for block_id in parent.block_ids:
            cache.pool.acquire(block_id)
    assert [cache.pool.ref_count(block_id) for block_id in (full, partial)] == [3, 3]
    for _ in range(2):
        cache.pool.release([full, partial])
    assert cache.pool.num_available == 14
    cache.end(parent)
    assert cache.pool.num_available == 16
    assert cache.pool.evictable_block_ids() == (full,)
    assert partial in cache.pool.free_block_ids()


def test_a_free_block_cannot_be_shared() -> None:
    with pytest.raises(AssertionError, match="block 3 is free"):
        BlockPool(4).acquire(3)


def test_hits_on_a_busy_prefix_do_not_depend_on_evictions_elsewhere() -> None:
    """The prefix stays while it is in use, however small the cache is."""
    cache = Cache(num_blocks=5)
    busy = cache.compute(cache.admit(list(range(9))))
    for start in range(100, 200, 10):
        cache.fill(list(range(start, start + 8)))
    assert cache.found(list(range(9))) == 2
    cache.end(busy)

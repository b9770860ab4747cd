"""Eviction policies: LRU, least hit density and what it learns."""

from __future__ import annotations

import random

import pytest

from octavo.graphs.errors import RequestError
from octavo.runtime.cache.eviction import DEFAULT_POLICY, POLICIES, EvictionPolicy, make_policy
from octavo.runtime.cache.eviction_lhd import LeastHitDensity
from octavo.runtime.cache.reuse_statistics import HORIZON, TICKS_PER_CACHE, ReuseStatistics
from octavo.tools.bench.prefix_traces import replay


def cache(policy: EvictionPolicy, chain: list[int], prefix: str = "") -> None:
    """Puts a prefix of these blocks into the cache and takes its only user away."""
    parent = None
    for index, block_id in enumerate(chain):
        policy.insert(block_id, f"{prefix}{chain[: index + 1]}".encode(), parent)
        parent = block_id
    for block_id in reversed(chain):
        policy.add(block_id)


def evict_all(policy: EvictionPolicy) -> list[int]:
    return [policy.evict() for _ in range(len(policy))]


def test_a_policy_is_chosen_by_name() -> None:
    assert POLICIES == ("lru", "lhd")
    assert DEFAULT_POLICY in POLICIES
    assert isinstance(make_policy("lhd", 8), LeastHitDensity)
    with pytest.raises(RequestError, match=r"eviction policy is 'fifo': choose from lru, lhd"):
        make_policy("fifo", 8)


@pytest.mark.parametrize("name", POLICIES)
def test_unknown_reuse_leaves_the_order_of_use_and_ends_go_before_beginnings(name: str) -> None:
    policy = make_policy(name, 8)
    cache(policy, [4, 2, 6])
    cache(policy, [1, 3])
    assert len(policy) == 5
    assert evict_all(policy) == [6, 2, 4, 3, 1]


@pytest.mark.parametrize("name", POLICIES)
def test_a_hit_makes_a_block_young_again(name: str) -> None:
    policy = make_policy(name, 8)
    for block_id in (0, 1, 2):
        cache(policy, [block_id])
    policy.remove(0)
    assert len(policy) == 2
    policy.add(0)
    assert evict_all(policy) == [1, 2, 0]


@pytest.mark.parametrize("name", POLICIES)
def test_a_discarded_block_is_never_evicted_whether_in_use_or_not(name: str) -> None:
    policy = make_policy(name, 8)
    cache(policy, [0, 1])
    cache(policy, [2])
    policy.remove(2)
    for block_id in (0, 2):
        policy.discard(block_id)
    assert policy.block_ids() == (1,)
    assert evict_all(policy) == [1]


def test_lhd_never_takes_the_beginning_of_a_cached_prefix_first() -> None:
    """Though the beginning was released long before, and the end has been used more often."""
    policy = LeastHitDensity(8)
    policy.insert(0, b"0", None)
    policy.add(0)
    policy.insert(1, b"01", 0)  # by a request that had computed the beginning itself
    for _ in range(5):
        policy.touch(1)
    policy.add(1)
    cache(policy, [2])
    order = evict_all(policy)
    assert order.index(1) < order.index(0)


def test_lhd_gives_up_a_beginning_when_only_its_longer_prefixes_are_in_use() -> None:
    policy = LeastHitDensity(8)
    policy.insert(0, b"0", None)
    policy.insert(1, b"01", 0)
    policy.add(0)
    assert (len(policy), policy.evict(), len(policy)) == (1, 0, 0)
    policy.add(1)
    assert policy.evict() == 1


def test_lhd_keeps_what_is_reused_through_a_scan_that_flushes_lru() -> None:
    """30 prefixes of 2 blocks are asked for in turn; between two of them pass 20 blocks of a scan.

    A prefix comes again after 30 * 22 = 660 other blocks, the cache holds 300: LRU finds none. Kept
    through the scan, the prefixes take 60 blocks.
    """
    trace = []
    for number in range(1000):
        prefix = number % 30
        trace.append([2 * prefix, 2 * prefix + 1])
        trace.append([1000 + 20 * number + index for index in range(20)])
    asked = 2 * 1000
    assert replay(trace, 300, "lru") == 0
    assert replay(trace, 300, "lhd") > 0.8 * asked


def test_lhd_follows_lru_when_popularity_moves() -> None:
    """Of 240 prefixes, one of 40 is asked for, which move on: what is old never comes again."""
    rng = random.Random(1)
    trace = [[number // 20 + rng.randrange(40)] for number in range(4000)]
    for size in (20, 30, 60):
        assert replay(trace, size, "lhd") >= 0.98 * replay(trace, size, "lru")


def test_lhd_remembers_a_bounded_number_of_evicted_blocks() -> None:
    num_blocks = 10
    policy = LeastHitDensity(num_blocks)
    for number in range(1000):
        policy.insert(number, f"{number}".encode(), None)
        policy.add(number)
        if len(policy) > num_blocks:
            policy.evict()
    assert len(policy._evicted) == num_blocks * HORIZON // TICKS_PER_CACHE == 160
    assert len(policy._blocks) == num_blocks


def observe(ticks: int, age: int | None) -> ReuseStatistics:
    """In each tick 100 blocks are released, and used again `age` ticks later or never."""
    statistics = ReuseStatistics(100 * TICKS_PER_CACHE)
    for tick in range(ticks):
        for _ in range(100):
            if age is not None and tick >= age:
                statistics.reuse(0, tick - age, is_hit=True)
            statistics.release(0, 1)
    return statistics


def test_without_observations_the_density_falls_with_the_age() -> None:
    (densities, *others) = ReuseStatistics(32).densities
    assert densities == sorted(densities, reverse=True)
    # Three in ten are used within the first tick and lie there for half of it.
    assert densities[0] == pytest.approx(0.3 / (1 - 0.3 / 2))
    assert others == [densities] * 3


def test_blocks_of_the_age_at_which_reuse_comes_are_worth_most() -> None:
    """All are used again after 20 ticks, in the age of 15 to 30 ticks, none before."""
    statistics = observe(800, age=20)
    densities = statistics.densities[0]
    assert max(densities) == densities[statistics.age(statistics.now - 20)]
    assert densities[0] < densities[1] < densities[2] < densities[3] < densities[4]
    # Kept from its release, a block lies 31 ticks, but the last 16 only half: one hit in 23.
    assert densities[0] == pytest.approx(1 / 23, rel=0.05)


def test_blocks_that_are_never_used_again_are_worth_nothing() -> None:
    assert max(observe(2000, age=None).densities[0]) < 0.01


def test_lru_is_better_when_what_it_would_hold_was_not_found() -> None:
    statistics = ReuseStatistics(32)
    for tick in range(100):
        if tick >= 5:
            statistics.reuse(0, tick - 5, is_hit=False)
        statistics.release(0, 10)  # LRU would hold the blocks of the last ten ticks
    assert statistics.lru_is_better
    for tick in range(100, 400):
        statistics.reuse(0, tick - 5, is_hit=True)
        statistics.release(0, 10)
    assert not statistics.lru_is_better

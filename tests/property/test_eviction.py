"""What holds for every eviction policy, on every trace of requests."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.runtime.cache.block_pool import BlockPool
from octavo.runtime.cache.eviction import POLICIES, EvictionPolicy, make_policy
from octavo.runtime.cache.prefix_cache import PrefixCache
from octavo.runtime.request import Request
from octavo.runtime.sampling.sampling_params import SamplingParams
from octavo.tools.bench.prefix_traces import belady_hits, replay


def as_trace(prompts: list[list[int]]) -> list[list[int]]:
    """Ids of blocks, equal where whole prefixes are equal, as in the traces' files."""
    ids: dict[tuple[int, ...], int] = {}
    return [
        [ids.setdefault(tuple(prompt[: end + 1]), len(ids)) for end in range(len(prompt))]
        for prompt in prompts
    ]


def prompts(max_size: int) -> st.SearchStrategy[list[list[int]]]:
    """Prompts over few tokens: most begin like another one."""
    prompt = st.lists(st.integers(0, 2), min_size=1, max_size=5)
    return st.lists(prompt, min_size=1, max_size=max_size)


SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.mark.parametrize("name", POLICIES)
@given(prompts=prompts(60), num_blocks=st.integers(1, 12))
@SETTINGS
def test_no_policy_finds_more_than_belady(
    name: str, prompts: list[list[int]], num_blocks: int
) -> None:
    trace = as_trace(prompts)
    assert replay(trace, num_blocks, name) <= belady_hits(trace, num_blocks)


@given(prompts=prompts(6), num_blocks=st.integers(1, 5))
@SETTINGS
def test_belady_is_the_best_of_all_choices(prompts: list[list[int]], num_blocks: int) -> None:
    trace = [ids for ids in as_trace(prompts) if len(ids) <= num_blocks]

    @cache
    def best(number: int, cached: frozenset[int]) -> int:
        if number == len(trace):
            return 0
        ids = frozenset(trace[number])
        others = cached - ids
        num_kept = min(len(others), num_blocks - len(ids))
        kept = combinations(sorted(others), num_kept)
        found = len(ids & cached)
        return found + max(best(number + 1, ids | frozenset(choice)) for choice in kept)

    assert belady_hits(trace, num_blocks) == best(0, frozenset())


@pytest.mark.parametrize("name", POLICIES)
@given(prompts=prompts(60), num_blocks=st.integers(5, 12))
@SETTINGS
def test_a_cached_block_is_never_without_its_prefix(
    name: str, prompts: list[list[int]], num_blocks: int
) -> None:
    pool = BlockPool(num_blocks, make_policy(name, num_blocks))
    prefix_cache = PrefixCache(pool, block_size=1)
    for prompt in prompts:
        request = Request(
            "r", [*prompt, 9], SamplingParams(), max_model_len=9, eos_token_ids=(), seed=0
        )
        chain = prefix_cache.match(request)
        for entry in chain:
            pool.acquire(entry.block_id)
        request.prefix_chain = chain
        request.block_ids = [entry.block_id for entry in chain]
        request.block_ids += pool.allocate(len(prompt) - len(chain))
        request.num_computed_tokens = len(prompt)
        prefix_cache.register(request)
        pool.release(request.block_ids)
        found = {entry.prefix_token_ids() for entry in prefix_cache.entries()}
        assert all(len(tokens) == 1 or tokens[:-1] in found for tokens in found)


@pytest.mark.parametrize("name", POLICIES)
@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(["insert", "add", "remove", "touch", "evict", "discard"]),
            st.integers(0, 9),
            st.integers(0, 9),
        ),
        max_size=200,
    )
)
@SETTINGS
def test_a_policy_holds_exactly_the_cached_blocks_without_a_user(
    name: str, actions: list[tuple[str, int, int]]
) -> None:
    """In any order of calls that keeps to the protocol, a parent gone before its child too."""
    policy: EvictionPolicy = make_policy(name, 10)
    in_use: set[int] = set()
    unused: set[int] = set()
    for action, block_id, other in actions:
        if action == "insert" and block_id not in in_use | unused:
            parent = other if other in in_use | unused else None
            policy.insert(block_id, bytes([block_id, other]), parent)
            in_use.add(block_id)
        elif action == "add" and block_id in in_use:
            policy.add(block_id)
            in_use.remove(block_id)
            unused.add(block_id)
        elif action == "remove" and block_id in unused:
            policy.remove(block_id)
            unused.remove(block_id)
            in_use.add(block_id)
        elif action == "touch" and block_id in in_use:
            policy.touch(block_id)
        elif action == "evict" and unused:
            unused.remove(policy.evict())
        elif action == "discard" and block_id in in_use | unused:
            policy.discard(block_id)
            in_use.discard(block_id)
            unused.discard(block_id)
        assert len(policy) == len(unused)
        assert sorted(policy.block_ids()) == sorted(unused)

"""Block pool, eviction and prefix cache."""

from __future__ import annotations

import pytest

from octavo.runtime.cache.block_pool import BlockPool
from octavo.runtime.cache.prefix_cache import PrefixCache
from octavo.runtime.request import Request
from octavo.runtime.sampling.sampling_params import SamplingParams
from tests.unit.runtime_harness import Harness, alone, random_tokens

BLOCK_SIZE = 4


def computed_request(
    pool: BlockPool, cache: PrefixCache, tokens: list[int], salt: bytes = b""
) -> Request:
    """A request whose tokens all lie in freshly computed blocks."""
    request = waiting_request(tokens, salt)
    request.block_ids = pool.allocate(-(-len(tokens) // BLOCK_SIZE))
    request.num_computed_tokens = len(tokens)
    cache.register(request)
    return request


def waiting_request(tokens: list[int], salt: bytes = b"") -> Request:
    return Request(
        "r",
        tokens,
        SamplingParams(),
        max_model_len=100,
        eos_token_ids=(),
        seed=0,
        cache_salt=salt,
    )


def hits(cache: PrefixCache, tokens: list[int], salt: bytes = b"") -> list[int]:
    return [entry.block_id for entry in cache.match(waiting_request(tokens, salt))]


def test_blocks_are_handed_out_and_come_back() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    assert sorted(blocks) == [0, 1, 2]
    assert pool.num_available == 0
    with pytest.raises(AssertionError, match="1 blocks asked for, 0 are available"):
        pool.allocate(1)
    pool.release(blocks[:2])
    assert pool.num_available == 2
    assert sorted(pool.allocate(2)) == sorted(blocks[:2])


def test_the_longest_chain_is_found_and_the_last_token_is_left() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, BLOCK_SIZE)
    request = computed_request(pool, cache, list(range(12)))
    blocks = request.block_ids
    assert hits(cache, list(range(13))) == blocks
    assert hits(cache, list(range(12))) == blocks[:2]
    assert hits(cache, [*range(8), 50, 51, 52, 53, 54]) == blocks[:2]
    assert hits(cache, [50, *range(1, 13)]) == []
    assert hits(cache, list(range(4, 13))) == []
    assert hits(cache, [0]) == []


def test_released_blocks_stay_until_they_are_needed_least_recent_and_last_first() -> None:
    pool = BlockPool(5)
    cache = PrefixCache(pool, BLOCK_SIZE)
    old = computed_request(pool, cache, list(range(8)))
    new = computed_request(pool, cache, list(range(20, 28)))
    pool.release(old.block_ids)
    pool.release(new.block_ids)
    assert pool.num_available == 5
    pool.allocate(1)  # the free one
    assert hits(cache, list(range(9))) == old.block_ids
    assert pool.allocate(1) == [old.block_ids[1]]
    assert hits(cache, list(range(9))) == old.block_ids[:1]
    assert hits(cache, list(range(20, 29))) == new.block_ids


def test_a_hit_takes_a_block_out_of_reach_of_eviction() -> None:
    pool = BlockPool(2)
    cache = PrefixCache(pool, BLOCK_SIZE)
    request = computed_request(pool, cache, list(range(4)))
    (block,) = request.block_ids
    pool.release([block])
    pool.acquire(block)
    pool.acquire(block)
    assert pool.ref_count(block) == 2
    assert pool.num_available == 1
    pool.release([block])
    assert pool.num_available == 1
    pool.release([block])
    assert pool.num_available == 2


def constant_hash(data: bytes) -> bytes:
    return b"the same for everyone"


@pytest.mark.parametrize(
    "other",
    [
        [9, 9, 9, 9, 4, 5, 6, 7, 8],  # the second block's tokens after another first block
        [0, 1, 2, 4, 4, 5, 6, 7, 8],
        [4, 5, 6, 7, 0, 1, 2, 3, 8],
    ],
)
def test_p04_p05_a_hash_collision_never_shares_a_block(other: list[int]) -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, BLOCK_SIZE, constant_hash)
    request = computed_request(pool, cache, list(range(8)))
    assert hits(cache, list(range(8)))[:1] == request.block_ids[:1]
    assert hits(cache, other) == []


def test_p05_colliding_keys_do_not_disturb_the_first_owner() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, BLOCK_SIZE, constant_hash)
    first = computed_request(pool, cache, list(range(4)))
    second = computed_request(pool, cache, list(range(10, 14)))
    assert hits(cache, list(range(5))) == first.block_ids
    assert hits(cache, list(range(10, 15))) == []
    pool.release(second.block_ids)
    pool.release(first.block_ids)
    assert (len(pool.free_block_ids()), len(pool.evictable_block_ids())) == (7, 1)


def test_p04_a_salt_keeps_requests_apart() -> None:
    pool = BlockPool(8)
    for hash_function in (None, constant_hash):
        cache = PrefixCache(pool, BLOCK_SIZE, *([hash_function] if hash_function else []))
        request = computed_request(pool, cache, list(range(4)), salt=b"a")
        assert hits(cache, list(range(5)), salt=b"b") == []
        assert hits(cache, list(range(5))) == []
        assert hits(cache, list(range(5)), salt=b"a") == request.block_ids


def test_equal_prompts_computed_at_once_are_registered_once() -> None:
    harness = Harness()
    prompt = random_tokens(40)
    requests = [harness.add(prompt, max_tokens=20) for _ in range(3)]
    harness.step()
    assert harness.engine.prefix_cache is not None
    assert len(harness.engine.prefix_cache.entries()) == 2
    harness.run()
    assert [r.output_token_ids for r in requests] == [alone(prompt, 20)] * 3


def test_an_evicted_parent_that_is_computed_again_links_to_its_child() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool, BLOCK_SIZE)
    request = computed_request(pool, cache, list(range(8)))
    pool.release([request.block_ids[0]])
    pool.allocate(3)  # evicts the parent, the child stays in use
    assert hits(cache, list(range(9))) == []
    again = waiting_request(list(range(4)))
    again.block_ids = [request.block_ids[0]]
    again.num_computed_tokens = 4
    cache.register(again)
    assert hits(cache, list(range(9))) == request.block_ids


def test_reuse_without_prefix_caching_is_off() -> None:
    harness = Harness(enable_prefix_caching=False)
    prompt = random_tokens(40)
    for _ in range(2):
        request = harness.add(prompt)
        harness.run()
        assert request.num_cached_tokens == 0
        assert request.output_token_ids == alone(prompt, 8)

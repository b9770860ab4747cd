"""The pool and the prefix cache against a model that keeps every block's content in full."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.runtime.cache.block_pool import BlockPool
from octavo.runtime.cache.eviction import make_policy
from octavo.runtime.cache.prefix_cache import PinnedPrefix, PrefixCache, sha256
from octavo.runtime.request import Request
from octavo.runtime.sampling.sampling_params import SamplingParams

BLOCK_SIZE = 2
NUM_BLOCKS = 7


def weak_hash(data: bytes) -> bytes:
    """Collides all the time: two bits of SHA-256."""
    return bytes([sha256(data)[0] & 3])


class PoolMachine(RuleBasedStateMachine):
    """Sequences over two token ids come and go; `contents` is what lies in each physical block."""

    hash_function = staticmethod(sha256)
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, make_policy(self.policy, NUM_BLOCKS))
        self.cache = PrefixCache(self.pool, BLOCK_SIZE, self.hash_function)
        self.live: list[Request] = []
        self.pins: list[PinnedPrefix] = []
        # Blocks computed, or in use, before the last reset and not computed since.
        self.outdated: set[int] = set()
        self.contents: dict[int, tuple[bytes, tuple[int, ...]]] = {}

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        salt=st.sampled_from([b"", b"s"]),
        most_uncomputed=st.integers(0, 3),
    )
    def start(self, tokens: list[int], salt: bytes, most_uncomputed: int) -> None:
        request = Request(
            "r",
            tokens,
            SamplingParams(),
            max_model_len=99,
            eos_token_ids=(),
            seed=0,
            cache_salt=salt,
        )
        chain = self.cache.match(request)
        assert len(chain) * BLOCK_SIZE < len(tokens)
        for index, entry in enumerate(chain):
            end = (index + 1) * BLOCK_SIZE
            assert self.contents[entry.block_id] == (salt, tuple(tokens[:end]))
            assert entry.block_id not in self.outdated
        idle = sum(self.pool.ref_count(entry.block_id) == 0 for entry in chain)
        needed = -(-len(tokens) // BLOCK_SIZE) - len(chain)
        if needed > self.pool.num_available - idle:
            return
        uncomputed = min(most_uncomputed, len(tokens) - len(chain) * BLOCK_SIZE)
        for entry in chain:
            self.pool.acquire(entry.block_id)
        request.prefix_chain = chain
        request.block_ids = [entry.block_id for entry in chain] + self.pool.allocate(needed)
        for index in range(len(chain), len(request.block_ids)):
            end = (index + 1) * BLOCK_SIZE
            self.contents[request.block_ids[index]] = (salt, tuple(tokens[:end]))
            self.outdated.discard(request.block_ids[index])
        request.num_computed_tokens = len(tokens) - uncomputed
        self.cache.register(request)
        self.live.append(request)

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 100))
    def go_on(self, choice: int) -> None:
        """Computes what is left of a request, maybe after a reset."""
        request = self.live[choice % len(self.live)]
        request.num_computed_tokens = request.num_tokens
        self.cache.register(request)

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 100))
    def fork(self, choice: int) -> None:
        """Another sequence with the same tokens so far, in the same blocks."""
        parent = self.live[choice % len(self.live)]
        child = Request(
            "c",
            parent.prompt_token_ids,
            SamplingParams(),
            max_model_len=99,
            eos_token_ids=(),
            seed=0,
            cache_salt=parent.cache_salt,
        )
        for block_id in parent.block_ids:
            self.pool.acquire(block_id)
        child.block_ids = list(parent.block_ids)
        child.prefix_chain = list(parent.prefix_chain)
        child.num_computed_tokens = parent.num_computed_tokens
        self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 100))
    def pin(self, choice: int) -> None:
        self.pins.append(self.cache.pin(self.live[choice % len(self.live)]))

    @precondition(lambda self: self.pins)
    @rule(choice=st.integers(0, 100), again=st.booleans())
    def unpin(self, choice: int, again: bool) -> None:
        pin = self.pins.pop(choice % len(self.pins))
        pin.release()
        if again:
            pin.release()

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.outdated = set(range(NUM_BLOCKS)) - set(self.cache.pinned_block_ids())

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 100))
    def end(self, choice: int) -> None:
        self.pool.release(self.live.pop(choice % len(self.live)).block_ids)

    @invariant()
    def counts_agree(self) -> None:
        users = [block for request in self.live for block in request.block_ids]
        users += self.cache.pinned_block_ids()
        for block_id in range(NUM_BLOCKS):
            assert self.pool.ref_count(block_id) == users.count(block_id)
        assert self.pool.num_available == NUM_BLOCKS - len(set(users))
        pinned = [block for pin in self.pins for block in pin.block_ids]
        assert sorted(self.cache.pinned_block_ids()) == sorted(pinned)
        assert self.cache.num_pinned_blocks == len(set(pinned))

    @invariant()
    def cached_blocks_hold_what_the_index_says(self) -> None:
        entries = self.cache.entries()
        for entry in entries:
            assert self.contents[entry.block_id] == (entry.salt, entry.prefix_token_ids())
            assert entry.block_id not in self.outdated
        assert set(self.pool.evictable_block_ids()) <= {entry.block_id for entry in entries}
        assert {entry.block_id for entry in entries}.isdisjoint(self.pool.free_block_ids())


class CollidingPoolMachine(PoolMachine):
    """P04, P05: the same with a hash that collides all the time."""

    hash_function = staticmethod(weak_hash)


class HitDensityPoolMachine(PoolMachine):
    policy = "lhd"


SETTINGS = settings(max_examples=50, stateful_step_count=30, deadline=None, derandomize=True)
TestPool = PoolMachine.TestCase
TestPool.settings = SETTINGS
TestCollidingPool = CollidingPoolMachine.TestCase
TestCollidingPool.settings = SETTINGS
TestHitDensityPool = HitDensityPoolMachine.TestCase
TestHitDensityPool.settings = SETTINGS

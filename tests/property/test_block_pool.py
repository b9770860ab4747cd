"""The pool and the prefix cache against a model that keeps every block's content in full."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.runtime.block_pool import BlockPool
from octavo.runtime.prefix_cache import PrefixCache, sha256
from octavo.runtime.request import Request
from octavo.runtime.sampling_params import SamplingParams

BLOCK_SIZE = 2
NUM_BLOCKS = 7


def weak_hash(data: bytes) -> bytes:
    """Collides all the time: two bits of SHA-256."""
    return bytes([sha256(data)[0] & 3])


class PoolMachine(RuleBasedStateMachine):
    """Sequences over two token ids come and go; `contents` is what lies in each physical block."""

    hash_function = staticmethod(sha256)

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = PrefixCache(self.pool, BLOCK_SIZE, self.hash_function)
        self.live: list[Request] = []
        self.contents: dict[int, tuple[bytes, tuple[int, ...]]] = {}

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        salt=st.sampled_from([b"", b"s"]),
    )
    def start(self, tokens: list[int], salt: bytes) -> None:
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
        idle = sum(self.pool.ref_count(entry.block_id) == 0 for entry in chain)
        needed = -(-len(tokens) // BLOCK_SIZE) - len(chain)
        if needed > self.pool.num_available - idle:
            return
        for entry in chain:
            self.pool.acquire(entry.block_id)
        request.prefix_chain = chain
        request.block_ids = [entry.block_id for entry in chain] + self.pool.allocate(needed)
        for index in range(len(chain), len(request.block_ids)):
            end = (index + 1) * BLOCK_SIZE
            self.contents[request.block_ids[index]] = (salt, tuple(tokens[:end]))
        request.num_computed_tokens = len(tokens)
        self.cache.register(request)
        self.live.append(request)

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 100))
    def end(self, choice: int) -> None:
        self.pool.release(self.live.pop(choice % len(self.live)).block_ids)

    @invariant()
    def counts_agree(self) -> None:
        users = [block for request in self.live for block in request.block_ids]
        for block_id in range(NUM_BLOCKS):
            assert self.pool.ref_count(block_id) == users.count(block_id)
        assert self.pool.num_available == NUM_BLOCKS - len(set(users))

    @invariant()
    def cached_blocks_hold_what_the_index_says(self) -> None:
        entries = self.cache.entries()
        for entry in entries:
            assert self.contents[entry.block_id] == (entry.salt, entry.prefix_token_ids())
        assert set(self.pool.evictable_block_ids()) <= {entry.block_id for entry in entries}
        assert {entry.block_id for entry in entries}.isdisjoint(self.pool.free_block_ids())


class CollidingPoolMachine(PoolMachine):
    """P04, P05: the same with a hash that collides all the time."""

    hash_function = staticmethod(weak_hash)


SETTINGS = settings(max_examples=50, stateful_step_count=30, deadline=None, derandomize=True)
TestPool = PoolMachine.TestCase
TestPool.settings = SETTINGS
TestCollidingPool = CollidingPoolMachine.TestCase
TestCollidingPool.settings = SETTINGS

"""Which cached block is given up first when fresh ones run out."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from octavo.graphs.errors import RequestError

DEFAULT_POLICY = "lhd"
POLICIES = ("lru", "lhd")


class EvictionPolicy(Protocol):
    """Orders the cached blocks that no request uses; every operation takes O(1) amortised time.

    A block's life: `insert` when it enters the prefix cache, in use; `add` when its last user goes;
    `remove` when a prefix hit takes it back; `evict` or `discard` when it leaves the cache.
    """

    def __len__(self) -> int:
        """Blocks that could be evicted."""

    def insert(self, block_id: int, key: bytes, parent_id: int | None) -> None:
        """A block in use was cached.

        key: stands for the tokens of the whole prefix, the same whenever they are cached again.
        parent_id: the cached block whose prefix this one continues; None for a prefix's first.
        """

    def add(self, block_id: int) -> None:
        """A cached block has lost its last user; of a prefix, the end comes first."""

    def remove(self, block_id: int) -> None:
        """A prefix hit took the block back into use."""

    def touch(self, block_id: int) -> None:
        """Another user came to a cached block that is in use."""

    def evict(self) -> int:
        """Chooses a block, forgets it and returns it; only called when there is one."""

    def discard(self, block_id: int) -> None:
        """Forgets a cached block, in use or not, that is never to be found again."""

    def block_ids(self) -> tuple[int, ...]:
        """Every block that could be evicted, roughly in that order (for snapshots)."""


class LeastRecentlyUsed:
    """Evicts the block that has been without a user for longest."""

    def __init__(self) -> None:
        # Not a dict: finding its first item takes ever longer while items leave at the front.
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def insert(self, block_id: int, key: bytes, parent_id: int | None) -> None:
        """Only the time of the last use counts."""

    def add(self, block_id: int) -> None:
        self._blocks[block_id] = None

    def remove(self, block_id: int) -> None:
        del self._blocks[block_id]

    def touch(self, block_id: int) -> None:
        """Its last use ends with its last user."""

    def evict(self) -> int:
        return self._blocks.popitem(last=False)[0]

    def discard(self, block_id: int) -> None:
        self._blocks.pop(block_id, None)

    def block_ids(self) -> tuple[int, ...]:
        return tuple(self._blocks)


def make_policy(name: str, num_blocks: int) -> EvictionPolicy:
    """The policy `lru` or `lhd` for a pool of `num_blocks`; RequestError for any other name."""
    if name == "lru":
        return LeastRecentlyUsed()
    if name == "lhd":
        from octavo.runtime.cache.eviction_lhd import LeastHitDensity

        return LeastHitDensity(num_blocks)
    raise RequestError(f"eviction policy is {name!r}: choose from {', '.join(POLICIES)}")

"""Which cached block is given up first when fresh ones run out."""

from __future__ import annotations

from typing import Protocol


class EvictionPolicy(Protocol):
    """Holds the cached blocks that no request uses; every operation is O(1)."""

    def __len__(self) -> int:
        """Blocks that could be evicted."""

    def add(self, block_id: int) -> None:
        """A cached block has lost its last user."""

    def remove(self, block_id: int) -> None:
        """A prefix hit took the block back into use."""

    def evict(self) -> int:
        """Chooses a block, forgets it and returns it; only called when there is one."""

    def block_ids(self) -> tuple[int, ...]:
        """Every held block, the next to be evicted first (for snapshots)."""


class LeastRecentlyUsed:
    """Evicts the block that has been without a user for longest."""

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}  # insertion order is the order of eviction

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, block_id: int) -> None:
        self._blocks[block_id] = None

    def remove(self, block_id: int) -> None:
        del self._blocks[block_id]

    def evict(self) -> int:
        block_id = next(iter(self._blocks))
        del self._blocks[block_id]
        return block_id

    def block_ids(self) -> tuple[int, ...]:
        return tuple(self._blocks)

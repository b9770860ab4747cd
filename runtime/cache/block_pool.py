"""The physical blocks of the paged cache: who uses each, and which can be handed out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.runtime.cache.eviction import DEFAULT_POLICY, EvictionPolicy, make_policy


class BlockPool:
    """Reference-counted blocks 0..num_blocks-1.

    A block is in use (count > 0), free, or evictable: without a user, but its content is cached and
    stays until the block is needed. Every operation is O(1) for each block it touches.
    """

    def __init__(self, num_blocks: int, policy: EvictionPolicy | None = None) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        # A stack: the block that was freed last is the warmest in the processor's caches.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable = make_policy(DEFAULT_POLICY, num_blocks) if policy is None else policy
        self._cached = bytearray(num_blocks)
        self._on_evict: Callable[[int], None] = _ignore

    def set_on_evict(self, on_evict: Callable[[int], None]) -> None:
        """`on_evict(block_id)` is called when a cached block's content is given up."""
        self._on_evict = on_evict

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free and evictable ones."""
        return len(self._free) + len(self._evictable)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Hands out `count` blocks with one user each; never more than `num_available`."""
        if count > self.num_available:
            raise AssertionError(f"{count} blocks asked for, {self.num_available} are available")
        blocks = []
        for _ in range(count):
            block_id = self._free.pop() if self._free else self._evict()
            self._ref_counts[block_id] = 1
            blocks.append(block_id)
        return blocks

    def acquire(self, block_id: int) -> None:
        """Adds a user to a block that is cached, or in use by a sequence that forks."""
        if self._cached[block_id]:
            if self._ref_counts[block_id] == 0:
                self._evictable.remove(block_id)
            else:
                self._evictable.touch(block_id)
        elif self._ref_counts[block_id] == 0:
            raise AssertionError(f"block {block_id} is free, there is nothing in it to share")
        self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Takes one user from each of a sequence's blocks, given in the sequence's order."""
        # Backwards, so that the end of a prefix is evicted before its beginning.
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if self._cached[block_id]:
                    self._evictable.add(block_id)
                else:
                    self._free.append(block_id)

    def mark_cached(self, block_id: int, key: bytes = b"", parent_id: int | None = None) -> None:
        """From now on the block in use stays evictable, rather than free, without a user.

        key: of the whole prefix; parent_id: the cached block before it, None for the first.
        """
        self._cached[block_id] = 1
        self._evictable.insert(block_id, key, parent_id)

    def forget(self, block_id: int) -> None:
        """Gives up a cached block's content: the block is free, now or when its last user goes."""
        self._cached[block_id] = 0
        self._evictable.discard(block_id)
        if self._ref_counts[block_id] == 0:
            self._free.append(block_id)

    def free_block_ids(self) -> tuple[int, ...]:
        return tuple(self._free)

    def evictable_block_ids(self) -> tuple[int, ...]:
        return self._evictable.block_ids()

    def _evict(self) -> int:
        block_id = self._evictable.evict()
        self._cached[block_id] = 0
        self._on_evict(block_id)
        return block_id


def _ignore(block_id: int) -> None:
    """No prefix cache: nothing is ever evicted."""

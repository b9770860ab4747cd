"""Eviction by least hit density: resists scans, and learns from the reuse it sees."""

from __future__ import annotations

import math
from collections import OrderedDict

from octavo.runtime.cache.reuse_statistics import (
    HORIZON,
    NUM_AGES,
    NUM_CLASSES,
    TICKS_PER_CACHE,
    ReuseStatistics,
)

# What each block before it adds to a block's cost of computation, in that of a first block: more
# keys to attend to. With 16 tokens a block it is a 200th for a model of 135 million parameters, a
# 700th for 1.1 billion, a 1,800th for 8 billion.
_COST_OF_DEPTH = 1 / 500

Queue = OrderedDict[int, "_Block"]


class _Block:
    """A cached block, in use or not."""

    __slots__ = (
        "block_id", "cost", "key", "last_used", "num_children", "num_uses", "parent", "queue"
    )  # fmt: skip

    def __init__(self, block_id: int, key: int, parent: _Block | None, num_uses: int) -> None:
        self.block_id = block_id  # -1 once it has left the cache
        self.key = key
        self.parent = parent
        self.num_uses = num_uses
        # Of computing it again, in that of a prefix's first block.
        self.cost: float = 1.0 if parent is None else parent.cost + _COST_OF_DEPTH
        self.num_children = 0  # cached blocks that continue its prefix
        self.last_used = 0  # tick
        self.queue: Queue | None = None  # None while it is in use


class LeastHitDensity:
    """Evicts the block that promises the fewest hits for the time it would lie in the cache.

    What a block promises depends on how often and how long ago it was used: `ReuseStatistics`. A
    hit saves the computation of the block, which costs more the deeper it lies in its prefix, but
    only together with all blocks before it: the end of a prefix goes before its beginning, whatever
    they promise. Evicted blocks are remembered by their
    keys for 16 times the size of the cache, so that one that comes back is known and that what
    evictions cost is learned. While LRU would have found clearly more, its choice is taken.

    Hit density is from LHD (Beckmann, Chen and Cidon, NSDI 2018); this finds the least one
    exactly, where LHD samples, and learns from a history of keys, where LHD keeps blocks on trial.
    Every operation takes O(1) amortised time (for a fixed number of queues); the history takes
    some 200 bytes a key.
    """

    def __init__(self, num_blocks: int) -> None:
        self._statistics = ReuseStatistics(num_blocks)
        self._blocks: dict[int, _Block] = {}
        self._num_unused = 0
        # [NUM_CLASSES][NUM_AGES] unused blocks that end a cached prefix, least recently used first.
        self._queues: list[list[Queue]] = [
            [OrderedDict() for _ in range(NUM_AGES)] for _ in range(NUM_CLASSES)
        ]
        self._ranked: list[tuple[float, Queue]] = []  # the same, least hit density first
        self._densities: list[list[float]] = []
        self._rank()
        # The other unused blocks, least recently used first.
        self._inner: Queue = OrderedDict()
        # Key to number of uses and tick of the last one, first evicted first.
        self._evicted: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._most_evicted = num_blocks * HORIZON // TICKS_PER_CACHE

    def __len__(self) -> int:
        return self._num_unused

    def insert(self, block_id: int, key: bytes, parent_id: int | None) -> None:
        short_key = hash(key)  # two that collide only blur what is learned
        num_uses, last_used = self._evicted.pop(short_key, (0, 0))
        if num_uses:
            self._statistics.reuse(_class(num_uses), last_used, is_hit=False)
        parent = None if parent_id is None else self._blocks[parent_id]
        self._blocks[block_id] = _Block(block_id, short_key, parent, num_uses + 1)
        if parent is not None:
            parent.num_children += 1
            if parent.queue is not None:
                self._requeue(parent, self._inner)

    def add(self, block_id: int) -> None:
        block = self._blocks[block_id]
        block.last_used = self._statistics.now
        self._num_unused += 1
        queue = self._inner if block.num_children else self._queues[_class(block.num_uses)][0]
        self._requeue(block, queue)
        if self._statistics.release(_class(block.num_uses), self._num_unused):
            self._move_aged()
            if self._densities is not self._statistics.densities:
                self._rank()

    def remove(self, block_id: int) -> None:
        block = self._blocks[block_id]
        self._statistics.reuse(_class(block.num_uses), block.last_used, is_hit=True)
        block.num_uses += 1
        self._num_unused -= 1
        self._requeue(block, None)

    def touch(self, block_id: int) -> None:
        self._blocks[block_id].num_uses += 1

    def evict(self) -> int:
        block = self._choose()
        block_id = block.block_id
        self._evicted[block.key] = (block.num_uses, block.last_used)
        if len(self._evicted) > self._most_evicted:
            self._evicted.popitem(last=False)
        self.discard(block_id)
        return block_id

    def discard(self, block_id: int) -> None:
        block = self._blocks.pop(block_id)
        if block.queue is not None:
            self._num_unused -= 1
            self._requeue(block, None)
        block.block_id = -1
        parent = block.parent
        if parent is None or parent.block_id < 0:
            return
        parent.num_children -= 1
        if parent.num_children == 0 and parent.queue is not None:
            self._requeue(parent, self._queue_of(parent))
            # It was used no earlier than its child, and comes next of its class and age.
            parent.queue.move_to_end(parent.block_id, last=False)

    def block_ids(self) -> tuple[int, ...]:
        queues = [*(queue for _, queue in self._ranked), self._inner]
        return tuple(block_id for queue in queues for block_id in queue)

    def _choose(self) -> _Block:
        if self._statistics.lru_is_better:
            heads = [next(iter(queue.values())) for _, queue in self._ranked if queue]
            if heads:
                return min(heads, key=_last_used)
        best: _Block | None = None
        least = math.inf
        for density, queue in self._ranked:
            if density >= least:  # a block costs at least 1
                break
            if queue:
                block = next(iter(queue.values()))
                if density * block.cost < least:
                    best, least = block, density * block.cost
        if best is not None:
            return best
        # Longer prefixes of these are in use; their users had computed the beginning themselves.
        return next(iter(self._inner.values()))

    def _queue_of(self, block: _Block) -> Queue:
        return self._queues[_class(block.num_uses)][self._statistics.age(block.last_used)]

    def _requeue(self, block: _Block, queue: Queue | None) -> None:
        if block.queue is not None:
            del block.queue[block.block_id]
        if queue is not None:
            queue[block.block_id] = block
        block.queue = queue

    def _move_aged(self) -> None:
        for queues in self._queues:
            for age in range(NUM_AGES - 1):
                queue = queues[age]
                while queue:
                    block = next(iter(queue.values()))
                    now = self._statistics.age(block.last_used)
                    if now == age:
                        break
                    self._requeue(block, queues[now])

    def _rank(self) -> None:
        self._densities = self._statistics.densities
        # Of equal densities, the oldest blocks go first.
        order = sorted(
            (density, -age, block_class)
            for block_class, densities in enumerate(self._densities)
            for age, density in enumerate(densities)
        )
        self._ranked = [
            (density, self._queues[block_class][-age]) for density, age, block_class in order
        ]


def _class(num_uses: int) -> int:
    return min(num_uses, NUM_CLASSES) - 1


def _last_used(block: _Block) -> int:
    return block.last_used

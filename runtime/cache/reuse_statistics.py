"""How soon cached blocks are used again, learned while they are, with or without being evicted."""

from __future__ import annotations

from collections import deque

NUM_CLASSES = 4  # of blocks: used once, twice, three times, more often
TICKS_PER_CACHE = 32  # a tick lasts until this part of all blocks has been released once
HORIZON = 512  # ticks: 16 times the cache, reuse later than that is not learned
NUM_AGES = HORIZON.bit_length()  # ages double: 1 tick, 2, 4, ... ; the last one is open
_TICKS_PER_UPDATE = 8
# What is seen in a tick counts half after this many ticks: chances need many observations, whether
# LRU does better must be noticed while it matters.
_DECAY = 0.5 ** (_TICKS_PER_UPDATE / HORIZON)
_DUEL_DECAY = 0.5 ** (_TICKS_PER_UPDATE / TICKS_PER_CACHE)
# LRU is taken when it finds this much more; at 1, noise would keep a choice that was taken once.
_DUEL_MARGIN = 1.01
# Before anything is known: the same chance in each doubling of the age. So the density falls with
# the age, which is LRU.
_PRIOR_CHANCE = 0.3
# In blocks, some ten prompts: those of one prompt are used again together, one observation.
_PRIOR_WEIGHT = 500.0


class _Cohort:
    """The blocks last used in one tick, counted by class, less those that were used again."""

    __slots__ = ("counts", "tick", "total")

    def __init__(self, tick: int) -> None:
        self.tick = tick
        self.counts = [0] * NUM_CLASSES
        self.total = 0

    def count(self, block_class: int, change: int) -> None:
        self.counts[block_class] += change
        self.total += change


class ReuseStatistics:
    """Chances of reuse by class and age, and the hit density that follows from them.

    Time is counted in released blocks, so that what is learned does not depend on the load. The
    hit density of a block is the largest ratio, over all times it might still be kept, of its
    chance to be used again to the time it would then lie in the cache: its Gittins index
    (Gittins 1979; Aalto, Ayesta and Righter 2009). Hit density as what eviction should compare
    is from LHD (Beckmann, Chen and Cidon, NSDI 2018).
    """

    def __init__(self, num_blocks: int) -> None:
        self.now = 0  # tick
        # [NUM_CLASSES][NUM_AGES] hits for each block and tick
        self.densities: list[list[float]] = []
        self._releases_per_tick = max(1, num_blocks // TICKS_PER_CACHE)
        self._releases = 0
        self._reached = [[0.0] * NUM_AGES for _ in range(NUM_CLASSES)]
        self._reused = [[0.0] * NUM_AGES for _ in range(NUM_CLASSES)]
        self._cohorts: dict[int, _Cohort] = {}
        self._by_age: list[deque[_Cohort]] = [deque() for _ in range(NUM_AGES)]
        self._current = self._begin_cohort()
        # LRU would still hold the blocks last used at this tick or later.
        self._lru_tick = 0
        self._lru_hits = 0.0
        self._hits = 0.0
        self._update()

    @property
    def lru_is_better(self) -> bool:
        """Whether LRU would have found clearly more of late than was found."""
        return self._lru_hits > _DUEL_MARGIN * self._hits

    def age(self, tick: int) -> int:
        """Index of the age now of a block last used at `tick`."""
        return min(NUM_AGES - 1, (self.now - tick + 1).bit_length() - 1)

    def release(self, block_class: int, num_cached: int) -> bool:
        """Counts a release, of a cache of `num_cached` unused blocks; True if a tick ends."""
        self._current.count(block_class, 1)
        self._releases += 1
        if self._releases < self._releases_per_tick:
            return False
        self._releases = 0
        self._end_tick(num_cached)
        return True

    def reuse(self, block_class: int, tick: int, *, is_hit: bool) -> None:
        """A block last used at `tick` is used again, found in the cache or computed anew."""
        self._hits += is_hit
        self._lru_hits += tick >= self._lru_tick
        cohort = self._cohorts.get(tick)
        if cohort is not None:
            cohort.count(block_class, -1)
            if cohort is not self._current:
                self._reused[block_class][self.age(tick)] += 1

    def _begin_cohort(self) -> _Cohort:
        cohort = self._cohorts[self.now] = _Cohort(self.now)
        return cohort

    def _end_tick(self, num_cached: int) -> None:
        self._enter(self._current, 0)
        self.now += 1
        self._current = self._begin_cohort()
        for age in range(NUM_AGES - 1):
            cohorts = self._by_age[age]
            while cohorts and self.age(cohorts[0].tick) > age:
                self._enter(cohorts.popleft(), age + 1)
        oldest = self._by_age[-1]
        while oldest and self.now - oldest[0].tick > HORIZON:
            del self._cohorts[oldest.popleft().tick]
        self._lru_tick = self._find_lru_tick(num_cached)
        if self.now % _TICKS_PER_UPDATE == 0:
            self._update()

    def _enter(self, cohort: _Cohort, age: int) -> None:
        self._by_age[age].append(cohort)
        for block_class, count in enumerate(cohort.counts):
            self._reached[block_class][age] += count

    def _find_lru_tick(self, num_cached: int) -> int:
        """Of the last ticks together, `num_cached` blocks were not used again: LRU's content."""
        for cohort in reversed(self._cohorts.values()):
            num_cached -= cohort.total
            if num_cached < 0:
                return cohort.tick + 1
        return 0

    def _update(self) -> None:
        """Computes the densities and lets what they rest on fade."""
        self.densities = [
            _densities(
                [
                    (reused + _PRIOR_CHANCE * _PRIOR_WEIGHT) / (reached + _PRIOR_WEIGHT)
                    for reused, reached in zip(
                        self._reused[block_class], self._reached[block_class], strict=True
                    )
                ]
            )
            for block_class in range(NUM_CLASSES)
        ]
        for counts in (*self._reached, *self._reused):
            counts[:] = [count * _DECAY for count in counts]
        self._hits *= _DUEL_DECAY
        self._lru_hits *= _DUEL_DECAY


def _densities(chances: list[float]) -> list[float]:
    """Hits for each tick of a block that has reached an age, at the best time to give it up.

    chances: of reuse within each age, for a block that has reached it.
    """
    densities = []
    for start in range(len(chances)):
        best = hits = ticks = 0.0
        present = 1.0
        for age in range(start, len(chances)):
            chance = min(chances[age], 1.0)
            hits += present * chance
            # Reuse comes half way through an age, whose length is 2^age ticks.
            ticks += present * (1 << age) * (1 - chance / 2)
            present *= 1 - chance
            best = max(best, hits / ticks)
        densities.append(best)
    return densities

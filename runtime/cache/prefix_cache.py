"""Computed blocks found again by the tokens they hold.

A full block's key is SHA-256 over the key of the block before it and its own tokens, so it stands
for the whole prefix; the first key is taken over the request's salt. A key only finds a candidate:
the tokens of the whole prefix and the salt are compared as well, so no hash collision, made on
purpose or not, ever hands one request the cache of another. Where whole blocks end, a block that
begins like the request's next tokens can be copied, and only the rest of it is computed.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakSet

import numpy as np

from octavo.backends.base import Int32Array
from octavo.runtime import positions
from octavo.runtime.cache.block_pool import BlockPool
from octavo.runtime.request import Request

# Blocks that are compared where a request leaves all cached prefixes, the newest of them.
_MOST_COMPARED = 32

HashFunction = Callable[[bytes], bytes]


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """One computed full block and, through `parent`, the prefix it continues."""

    key: bytes
    tokens: bytes  # block_size i32
    salt: bytes
    parent: PrefixEntry | None
    parent_key: bytes
    block_id: int
    num_resets: int  # of the cache before the block was computed

    def prefix_token_ids(self) -> tuple[int, ...]:
        """All tokens up to the end of this block."""
        blocks = []
        entry: PrefixEntry | None = self
        while entry is not None:
            blocks.append(entry.tokens)
            entry = entry.parent
        return tuple(np.frombuffer(b"".join(reversed(blocks)), dtype=np.int32).tolist())


class PartialHit(NamedTuple):
    """The first `num_tokens` of this block are a request's next ones."""

    block_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """Counted since the cache was made; resets do not take anything back."""

    queries: int  # tokens of requests that were admitted
    hits: int  # of them, tokens that were found
    evictions: int  # blocks whose content was given up for other tokens
    resets: int
    cached_blocks: int  # now
    pinned_blocks: int  # now

    @property
    def hit_rate(self) -> float:
        """Found tokens of those looked up; 0 before the first."""
        return self.hits / self.queries if self.queries else 0.0


class PinnedPrefix:
    """Keeps the blocks of a prefix in the cache until it is released."""

    def __init__(self, block_ids: Sequence[int], num_tokens: int, release: Callable[[], None]):
        self.block_ids = tuple(block_ids)
        self.num_tokens = num_tokens
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Lets the blocks be evicted like any others; once is enough, more does no harm."""
        if self._release is not None:
            self._release()
            self._release = None


class PrefixCache:
    """The index from keys to blocks. Blocks enter it only after they were computed."""

    def __init__(self, pool: BlockPool, block_size: int, hash_function: HashFunction = sha256):
        self._pool = pool
        self._block_size = block_size
        self._hash = hash_function
        self._by_key: dict[bytes, PrefixEntry] = {}
        self._by_block: dict[int, PrefixEntry] = {}
        # By the key of the block before them, the oldest first.
        self._followers: dict[bytes, dict[PrefixEntry, None]] = {}
        self._pins: Counter[int] = Counter()  # by block
        # Requests that took nothing computed before the last reset; only asked after a reset.
        self._fresh: WeakSet[Request] = WeakSet()
        self._queries = self._hits = self._evictions = self._resets = 0
        pool.set_on_evict(self._evicted)

    def match(self, request: Request) -> list[PrefixEntry]:
        """The longest chain of cached blocks that the request's tokens begin with.

        It never covers all tokens: the last one is computed again because its logits are wanted,
        and so are those whose logits were asked for. Takes no reference; the entries are valid
        until blocks are next allocated. The request holds no computed tokens yet.
        """
        if self._resets:
            self._fresh.add(request)
        return self._chain(request, request.first_logits_position)

    def match_part(self, request: Request, chain: Sequence[PrefixEntry]) -> PartialHit | None:
        """The block that shares most of the tokens after `chain`, which `match` has returned.

        To be copied before anything is written into it, and before blocks are next computed.
        """
        start = len(chain) * self._block_size
        end = min(start + self._block_size, request.first_logits_position)
        followers = self._followers.get(self._parent_key(request, len(chain)))
        if end <= start or not followers:
            return None
        wanted = request.tokens(start, end)
        parent = chain[-1] if chain else None
        best, most = None, 0
        for entry in itertools.islice(reversed(followers), _MOST_COMPARED):
            count = _common_length(wanted, np.frombuffer(entry.tokens, np.int32))
            if (
                count > most
                and entry.salt == request.cache_salt
                and _same_prefix(entry.parent, parent)
            ):
                best, most = entry, count
        return None if best is None else PartialHit(best.block_id, most)

    def register(self, request: Request) -> None:
        """Makes the request's computed full blocks findable; called after a step was committed."""
        chain = request.prefix_chain
        computed = positions.full_blocks(request.num_computed_tokens, self._block_size)
        if len(chain) >= computed or self._is_stale(request):
            return
        for index in range(len(chain), computed):
            parent = chain[-1] if chain else None
            entry = self._find(request, index, parent)
            if entry is None:
                entry = self._insert(request, index, parent)
            # Else another request computed the same prefix at the same time: its block stays the
            # one that is found, and this request keeps its own copy unregistered.
            chain.append(entry)

    def pin(self, request: Request) -> PinnedPrefix:
        """Keeps the full blocks of a request's prompt, as many as are cached now, until released.

        The request may have ended: what it computed is looked up. A pin survives `reset`.
        """
        chain = self._chain(request, request.num_prompt_tokens)
        block_ids = [entry.block_id for entry in chain]
        for block_id in block_ids:
            self._pool.acquire(block_id)
        self._pins.update(block_ids)
        return PinnedPrefix(
            block_ids, len(chain) * self._block_size, lambda: self._unpin(block_ids)
        )

    def reset(self) -> None:
        """Forgets every block that is not pinned: nothing computed before is found again.

        Running requests go on with their blocks, which become free as they end. What they compute
        from now on rests on what was computed before, so it is not registered either.
        """
        self._resets += 1
        self._fresh.clear()
        # The ends of prefixes, which were registered last, first.
        for block_id in reversed(self._by_block.copy()):
            if block_id not in self._pins:
                self._forget(block_id)
                self._pool.forget(block_id)

    def record_query(self, num_tokens: int, num_hits: int) -> None:
        """Counts a request when it is first admitted: of its `num_tokens`, `num_hits` were found.

        A preempted request that finds its own blocks again is no hit and is not recorded.
        """
        self._queries += num_tokens
        self._hits += num_hits

    @property
    def stats(self) -> PrefixCacheStats:
        return PrefixCacheStats(
            queries=self._queries,
            hits=self._hits,
            evictions=self._evictions,
            resets=self._resets,
            cached_blocks=len(self._by_block),
            pinned_blocks=len(self._pins),
        )

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that no request can have, each counted once."""
        return len(self._pins)

    def pinned_block_ids(self) -> tuple[int, ...]:
        """One entry for each pin and block."""
        return tuple(self._pins.elements())

    def entries(self) -> tuple[PrefixEntry, ...]:
        return tuple(self._by_block.values())

    def _chain(self, request: Request, num_tokens: int) -> list[PrefixEntry]:
        chain: list[PrefixEntry] = []
        parent: PrefixEntry | None = None
        for index in range(positions.full_blocks(num_tokens, self._block_size)):
            entry = self._find(request, index, parent)
            if entry is None:
                break
            chain.append(entry)
            parent = entry
        return chain

    def _find(self, request: Request, index: int, parent: PrefixEntry | None) -> PrefixEntry | None:
        entry = self._by_key.get(self._key(request, index))
        if (
            entry is None
            or entry.tokens != self._tokens(request, index)
            or entry.salt != request.cache_salt
            or not _same_prefix(entry.parent, parent)
        ):
            return None
        # The parent may have been evicted and computed again: this keeps later comparisons O(1).
        entry.parent = parent
        return entry

    def _insert(self, request: Request, index: int, parent: PrefixEntry | None) -> PrefixEntry:
        entry = PrefixEntry(
            key=self._key(request, index),
            tokens=self._tokens(request, index),
            salt=request.cache_salt,
            parent=parent,
            block_id=request.block_ids[index],
            parent_key=self._parent_key(request, index),
            num_resets=self._resets,
        )
        # A taken key here is a collision: the block is left out, its entry only links the chain.
        if entry.key not in self._by_key:
            self._by_key[entry.key] = entry
            self._by_block[entry.block_id] = entry
            self._followers.setdefault(entry.parent_key, {})[entry] = None
            parent_id = None
            if parent is not None and self._by_block.get(parent.block_id) is parent:
                parent_id = parent.block_id
            self._pool.mark_cached(entry.block_id, entry.key, parent_id)
        return entry

    def _is_stale(self, request: Request) -> bool:
        """Whether the request's blocks may rest on what was computed before the last reset."""
        if not self._resets or request in self._fresh:
            return False
        # A fork is not admitted, but shares its first blocks with a request that was. While it has
        # no full one, nothing tells when it began.
        chain = request.prefix_chain
        return not chain or chain[-1].num_resets < self._resets

    def _unpin(self, block_ids: Sequence[int]) -> None:
        self._pins.subtract(block_ids)
        self._pins = +self._pins  # without the zeros
        self._pool.release(block_ids)

    def _evicted(self, block_id: int) -> None:
        self._evictions += 1
        self._forget(block_id)

    def _forget(self, block_id: int) -> None:
        entry = self._by_block.pop(block_id)
        del self._by_key[entry.key]
        followers = self._followers[entry.parent_key]
        del followers[entry]
        if not followers:
            del self._followers[entry.parent_key]

    def _key(self, request: Request, index: int) -> bytes:
        keys = request.block_keys
        while len(keys) <= index:
            parent_key = self._parent_key(request, len(keys))
            keys.append(self._hash(parent_key + self._tokens(request, len(keys))))
        return keys[index]

    def _parent_key(self, request: Request, index: int) -> bytes:
        """The key of the block before the one at `index`, which the salt stands for at first."""
        return self._key(request, index - 1) if index else self._hash(request.cache_salt)

    def _tokens(self, request: Request, index: int) -> bytes:
        start = index * self._block_size
        return request.tokens(start, start + self._block_size).tobytes()


def _same_prefix(left: PrefixEntry | None, right: PrefixEntry | None) -> bool:
    while left is not right:
        if left is None or right is None:
            return False
        if left.tokens != right.tokens or left.salt != right.salt:
            return False
        left, right = left.parent, right.parent
    return True


def _common_length(left: Int32Array, right: Int32Array) -> int:
    """Tokens that both begin with."""
    length = min(len(left), len(right))
    if length == 0 or left[0] != right[0]:
        return 0
    differing = np.flatnonzero(left[:length] != right[:length])
    return int(differing[0]) if len(differing) else length

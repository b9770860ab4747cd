"""Computed blocks found again by the tokens they hold.

A full block's key is SHA-256 over the key of the block before it and its own tokens, so it stands
for the whole prefix; the first key is taken over the request's salt. A key only finds a candidate:
the tokens of the whole prefix and the salt are compared as well, so no hash collision, made on
purpose or not, ever hands one request the cache of another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octavo.runtime import positions
from octavo.runtime.block_pool import BlockPool
from octavo.runtime.request import Request

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
    block_id: int

    def prefix_token_ids(self) -> tuple[int, ...]:
        """All tokens up to the end of this block."""
        blocks = []
        entry: PrefixEntry | None = self
        while entry is not None:
            blocks.append(entry.tokens)
            entry = entry.parent
        return tuple(np.frombuffer(b"".join(reversed(blocks)), dtype=np.int32).tolist())


class PrefixCache:
    """The index from keys to blocks. Blocks enter it only after they were computed."""

    def __init__(self, pool: BlockPool, block_size: int, hash_function: HashFunction = sha256):
        self._pool = pool
        self._block_size = block_size
        self._hash = hash_function
        self._by_key: dict[bytes, PrefixEntry] = {}
        self._by_block: dict[int, PrefixEntry] = {}
        pool.set_on_evict(self._forget)

    def match(self, request: Request) -> list[PrefixEntry]:
        """The longest chain of cached blocks that the request's tokens begin with.

        It never covers all tokens: the last one is computed again because its logits are wanted.
        Takes no reference; the entries are valid until blocks are next allocated.
        """
        chain: list[PrefixEntry] = []
        parent: PrefixEntry | None = None
        for index in range(positions.reusable_blocks(request.num_tokens, self._block_size)):
            entry = self._find(request, index, parent)
            if entry is None:
                break
            chain.append(entry)
            parent = entry
        return chain

    def register(self, request: Request) -> None:
        """Makes the request's computed full blocks findable; called after a step was committed."""
        chain = request.prefix_chain
        computed = positions.full_blocks(request.num_computed_tokens, self._block_size)
        for index in range(len(chain), computed):
            parent = chain[-1] if chain else None
            entry = self._find(request, index, parent)
            if entry is None:
                entry = self._insert(request, index, parent)
            # Else another request computed the same prefix at the same time: its block stays the
            # one that is found, and this request keeps its own copy unregistered.
            chain.append(entry)

    def entries(self) -> tuple[PrefixEntry, ...]:
        return tuple(self._by_block.values())

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
        )
        # A taken key here is a collision: the block is left out, its entry only links the chain.
        if entry.key not in self._by_key:
            self._by_key[entry.key] = entry
            self._by_block[entry.block_id] = entry
            self._pool.mark_cached(entry.block_id)
        return entry

    def _forget(self, block_id: int) -> None:
        del self._by_key[self._by_block.pop(block_id).key]

    def _key(self, request: Request, index: int) -> bytes:
        keys = request.block_keys
        while len(keys) <= index:
            parent_key = keys[-1] if keys else self._hash(request.cache_salt)
            keys.append(self._hash(parent_key + self._tokens(request, len(keys))))
        return keys[index]

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

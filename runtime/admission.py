"""Who may be queued, admitted or pinned: whether the paged cache has room for what may come."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.graphs.errors import CapacityError, RequestError
from octavo.runtime import positions
from octavo.runtime.cache.block_pool import BlockPool
from octavo.runtime.cache.prefix_cache import PrefixCache, PrefixEntry
from octavo.runtime.capacity import EngineLimits
from octavo.runtime.request import Request


class Admission:
    """Answers for one pool; changes nothing."""

    def __init__(
        self, limits: EngineLimits, pool: BlockPool, prefix_cache: PrefixCache | None
    ) -> None:
        self._limits = limits
        self._pool = pool
        self._prefix_cache = prefix_cache

    def check_fits(self, request: Request) -> None:
        """Raises CapacityError if the request could not run even alone in the whole pool."""
        num_sequences = _width(request)
        if num_sequences > self._limits.max_num_seqs:
            raise CapacityError(
                f"a beam search of width {num_sequences} runs {num_sequences} sequences side by "
                f"side, max_num_seqs is {self._limits.max_num_seqs}: lower beam_width"
            )
        needed = num_sequences * self._most_blocks(request)
        pinned = 0 if self._prefix_cache is None else self._prefix_cache.num_pinned_blocks
        if needed > self._pool.num_blocks - pinned:
            less = f" less {pinned} for pinned prefixes" if pinned else ""
            raise CapacityError(
                f"the request may reach {request.max_total_tokens} tokens and so need {needed} "
                f"cache blocks, the pool has {self._pool.num_blocks}{less}: raise kv_cache_memory "
                "or lower max_tokens"
            )

    def check_pin(self, request: Request, open_requests: Sequence[Request]) -> None:
        """Raises CapacityError if keeping the prompt's blocks for good leaves a request no room.

        RequestError if the prompt fills no block.
        """
        num_blocks = positions.full_blocks(request.num_prompt_tokens, self._limits.block_size)
        if num_blocks == 0:
            raise RequestError(
                f"the prefix has {request.num_prompt_tokens} tokens and fills no cache block of "
                f"{self._limits.block_size}: only whole blocks can be pinned"
            )
        assert self._prefix_cache is not None
        pinned = self._prefix_cache.num_pinned_blocks + num_blocks
        needed = max((self._most_blocks(one) * _width(one) for one in open_requests), default=1)
        if pinned + needed > self._pool.num_blocks:
            raise CapacityError(
                f"with this prefix {pinned} of the {self._pool.num_blocks} cache blocks would be "
                f"pinned, and an open request may need {needed}: raise kv_cache_memory or release "
                "another pin"
            )

    def has_room(
        self,
        request: Request,
        chain: Sequence[PrefixEntry],
        others: Sequence[Request],
        num_freed: int = 0,
    ) -> bool:
        """Whether admitting the request leaves `others` what they are going to need soon.

        The blocks of all known tokens are promised to their requests. Beyond them there must be
        headroom to grow, or requests would be preempted as soon as they are admitted. It doubles
        with each preemption of the request, up to all that anyone may ever need: no request is
        preempted more than about log2(num_blocks) times, save by more important ones.
        """
        block_size = self._limits.block_size
        num_idle_hits = sum(self._pool.ref_count(entry.block_id) == 0 for entry in chain)
        known = positions.blocks_for(request.num_tokens, block_size)
        promised = known - len(chain) + num_idle_hits
        growth = self._most_blocks(request) - known
        for other in others:
            known = positions.blocks_for(other.num_tokens, block_size)
            promised += max(0, known - len(other.block_ids)) + self._writes_shared_block(other)
            growth += max(0, self._most_blocks(other) - known)
        headroom = min(growth, (len(others) + 1) << request.num_preemptions)
        return promised + headroom <= self._pool.num_available + num_freed

    def _writes_shared_block(self, request: Request) -> bool:
        """Whether the request's next token goes into a block that it has to copy first."""
        index = positions.full_blocks(request.num_computed_tokens, self._limits.block_size)
        blocks = request.block_ids
        return index < len(blocks) and self._pool.ref_count(blocks[index]) > 1

    def _most_blocks(self, request: Request) -> int:
        # The last token is emitted and never fed.
        return positions.blocks_for(request.max_total_tokens - 1, self._limits.block_size)


def _width(request: Request) -> int:
    """Sequences that must run side by side for the request to end."""
    return 1 if request.group is None else request.group.width

"""The state of one request, from its arrival to its last token."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from octavo.runtime.metrics import RequestTimes

if TYPE_CHECKING:
    from octavo.backends.base import Int32Array
    from octavo.runtime.prefix_cache import PrefixEntry
    from octavo.runtime.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again; everything is computed anew
    FINISHED = "finished"


class Request:
    """Tokens known so far, how many of them are computed, and the cache blocks they lie in.

    There are no phases: a request only ever lets `num_computed_tokens` catch up with
    `num_tokens_with_drafts`. Draft tokens lie behind the known tokens in the same buffer until a
    step has verified them.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        seed: int,
        cache_salt: bytes = b"",
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.seed = seed
        self.cache_salt = cache_salt
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_total_tokens = max_model_len
        if params.max_tokens is not None:
            self.max_total_tokens = min(self.num_prompt_tokens + params.max_tokens, max_model_len)
        self.eos_token_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self.stop_token_ids = frozenset(params.stop_token_ids)

        self.num_tokens = self.num_prompt_tokens
        self.num_drafts = 0
        self._token_ids = np.array(prompt_token_ids, dtype=np.int32)  # [capacity]

        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None  # None until the request is first admitted
        self.num_preemptions = 0
        self.times = RequestTimes()

        # Owned by the scheduler while the request runs.
        self.block_ids: list[int] = []
        self.table_row = -1
        # Owned by the prefix cache: keys of the full blocks, entries of the computed ones.
        self.block_keys: list[bytes] = []
        self.prefix_chain: list[PrefixEntry] = []

    @property
    def num_tokens_with_drafts(self) -> int:
        return self.num_tokens + self.num_drafts

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._list(0, self.num_prompt_tokens)

    @property
    def output_token_ids(self) -> list[int]:
        return self._list(self.num_prompt_tokens, self.num_tokens)

    @property
    def draft_token_ids(self) -> list[int]:
        return self._list(self.num_tokens, self.num_tokens_with_drafts)

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def tokens(self, start: int, end: int) -> Int32Array:
        """[end - start] i32, a view: the tokens at `start` to `end - 1`, known, then drafts."""
        return self._token_ids[start:end]

    def token(self, position: int) -> int:
        """The token at `position`, known or a draft."""
        return self._token_ids.item(position)

    def append_token(self, token_id: int) -> None:
        """Adds a sampled token; drafts must be gone."""
        self._reserve(self.num_tokens + 1)
        self._token_ids[self.num_tokens] = token_id
        self.num_tokens += 1

    def set_drafts(self, token_ids: Sequence[int]) -> None:
        """Proposes the tokens after the known ones; the next step verifies them."""
        end = self.num_tokens + len(token_ids)
        self._reserve(end)
        self._token_ids[self.num_tokens : end] = token_ids
        self.num_drafts = len(token_ids)

    def finish(self, reason: FinishReason, stop_reason: int | None = None) -> None:
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def _list(self, start: int, end: int) -> list[int]:
        token_ids: list[int] = self._token_ids[start:end].tolist()
        return token_ids

    def _reserve(self, size: int) -> None:
        capacity = len(self._token_ids)
        if size > capacity:
            # Doubling, not `max_total_tokens` at once: many requests may wait with a huge limit.
            grown = np.empty(max(size, 2 * capacity), dtype=np.int32)
            grown[:capacity] = self._token_ids
            self._token_ids = grown

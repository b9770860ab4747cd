"""The state of one request, from its arrival to its last token."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from octavo.runtime.metrics.request_metrics import RequestTimes

if TYPE_CHECKING:
    from octavo.backends.base import Float32Array, Int32Array
    from octavo.graphs.errors import OctavoError
    from octavo.runtime.beam_group import BeamGroup
    from octavo.runtime.cache.prefix_cache import PrefixEntry
    from octavo.runtime.sampling.beam_search import BeamCandidates
    from octavo.runtime.sampling.logits_processors import LogitsProcessor
    from octavo.runtime.sampling.sampler import RowLogprobs
    from octavo.runtime.sampling.sampling_params import SamplingParams
    from octavo.runtime.text.output_text import OutputText

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again; everything is computed anew
    FINISHED = "finished"


class Request:
    """One sequence: its tokens so far, how many are computed, and the cache blocks they lie in.

    There are no phases: a request only ever lets `num_computed_tokens` catch up with
    `num_tokens_with_drafts`. Draft tokens lie behind the known tokens in the same buffer until a
    step has verified them.

    choice      which of the sequences of one user's request this is; each has its own random stream
    priority    lower ones come first where the scheduler's policy is "priority"
    processors  edit every row of logits before it is sampled
    text        what the tokens say, kept up as they come; None where nobody watches the text
    followers   sequences that start in this one's cache as soon as its prompt is computed
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
        choice: int = 0,
        priority: int = 0,
        cache_salt: bytes = b"",
        processors: Sequence[LogitsProcessor] = (),
        text: OutputText | None = None,
        followers: Sequence[Request] = (),
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.seed = seed
        self.choice = choice
        self.priority = priority
        self.cache_salt = cache_salt
        self.processors = tuple(processors)
        self.text = text
        self.followers = tuple(followers)
        self.group: BeamGroup | None = None
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_total_tokens = max_model_len
        if params.max_tokens is not None:
            self.max_total_tokens = min(self.num_prompt_tokens + params.max_tokens, max_model_len)
        # With a grammar only its end is left to a request that ignores them.
        ignores_eos = params.ignore_eos and params.structured_outputs is None
        self.eos_token_ids = frozenset(() if ignores_eos else eos_token_ids)
        self.stop_token_ids = frozenset(params.stop_token_ids)

        self.num_tokens = self.num_prompt_tokens
        self.num_drafts = 0
        self.draft_method = ""  # of the drafter
        self.draft_probs: Float32Array | None = None  # [drafts, V] of the sampled V
        self._token_ids = np.array(prompt_token_ids, dtype=np.int32)  # [capacity]
        self.logprobs: list[RowLogprobs] = []  # of each output token, if asked for
        self.prompt_logprobs: list[RowLogprobs] = []  # of the prompt's second token, third, ...

        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: OctavoError | None = None  # why the finish_reason is "error"
        self.arrival_number = 0  # the engine counts; a fork has its parent's
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
        # Of a beam whose tokens are all computed: how it may go on. Its group decides.
        self.beam_candidates: BeamCandidates | None = None

    def fork(self, request_id: str, choice: int, end: int) -> Request:
        """A sequence with the first `end` tokens of this one, to be started in its cache."""
        child = Request(
            request_id,
            self.prompt_token_ids,
            self.params,
            max_model_len=self.max_total_tokens,
            eos_token_ids=tuple(self.eos_token_ids),
            seed=self.seed,
            choice=choice,
            priority=self.priority,
            cache_salt=self.cache_salt,
        )
        child.processors = self.processors
        child.group = self.group
        child._token_ids = self._token_ids.copy()
        child.num_tokens = end
        return child

    @property
    def rank(self) -> tuple[int, int, int]:
        """The order in which requests are served: smaller ones first."""
        return self.priority, self.arrival_number, self.choice

    @property
    def first_logits_position(self) -> int:
        """The first position whose logits are still wanted; all after it are wanted as well.

        As many tokens may be taken from the prefix cache: logits of the others were seen.
        """
        if self.params.prompt_logprobs is not None:
            num_seen = len(self.prompt_logprobs)
            if num_seen < self.num_prompt_tokens - 1:
                return num_seen
        return self.num_tokens - 1

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

    def set_drafts(
        self, token_ids: Sequence[int], probs: Float32Array | None = None, method: str = ""
    ) -> None:
        """Proposes the tokens after the known ones; the next step verifies them.

        Not before the followers have started: they take over what is computed.
        """
        assert not self.followers
        end = self.num_tokens + len(token_ids)
        self._reserve(end)
        self._token_ids[self.num_tokens : end] = token_ids
        self.num_drafts = len(token_ids)
        self.draft_probs, self.draft_method = probs, method

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        if self.text is not None:
            self.text.finish()
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

"""What a request has produced so far, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.graphs.errors import OctavoError
from octavo.runtime.metrics.request_metrics import RequestMetrics
from octavo.runtime.request import FinishReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token, of the model's own logits."""

    logprob: float
    rank: int  # 1 for the likeliest token
    decoded_token: str | None = None  # None if the engine has no tokenizer


# Of one position: token id -> Logprob, of the position's own token and of the likeliest ones.
PositionLogprobs = dict[int, Logprob]


@dataclass(frozen=True)
class CompletionOutput:
    """One completion. `token_ids` include the token that stopped it, `text` does not.

    With `RequestOutputKind.DELTA`, text, token_ids and logprobs are what is new.
    """

    index: int
    text: str  # empty if the engine has no tokenizer
    token_ids: list[int]
    finish_reason: FinishReason | None = None  # None while the request runs
    stop_reason: int | str | None = None  # the stop token id or stop text that ended it
    logprobs: list[PositionLogprobs] | None = None  # of each of `token_ids`
    cumulative_logprob: float | None = None  # of all tokens up to now, where logprobs are known
    score: float | None = None  # of a beam search's hypothesis: after the length penalty

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """A request and its completions; for a stream, everything up to now."""

    request_id: str
    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    metrics: RequestMetrics
    # Of each prompt token; None for the first, which nothing precedes.
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    error: OctavoError | None = None  # why the request failed, others were not affected

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.outputs[0].text

"""What a request has produced so far, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.runtime.metrics import RequestMetrics
from octavo.runtime.request import FinishReason


@dataclass(frozen=True)
class CompletionOutput:
    """One completion. `token_ids` include the token that stopped it, `text` does not."""

    index: int
    text: str  # empty if the engine has no tokenizer
    token_ids: list[int]
    finish_reason: FinishReason | None = None  # None while the request runs
    stop_reason: int | None = None  # the one of `stop_token_ids` that ended it

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

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.outputs[0].text

"""Puts the deltas of one completion together again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.runtime.outputs import CompletionOutput, PositionLogprobs

if TYPE_CHECKING:
    from octavo.runtime.request import FinishReason


class CompletionBuffer:
    """All of a completion, or what nobody has taken yet; `has_news` since the last `take`."""

    def __init__(self, index: int, *, with_logprobs: bool) -> None:
        self._index = index
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] | None = [] if with_logprobs else None
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._cumulative_logprob: float | None = None
        self.has_news = False

    def add(self, delta: CompletionOutput) -> None:
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        if self._logprobs is not None and delta.logprobs is not None:
            self._logprobs += delta.logprobs
        self._finish_reason = delta.finish_reason
        self._stop_reason = delta.stop_reason
        self._cumulative_logprob = delta.cumulative_logprob
        self.has_news = True

    def abort(self) -> None:
        """Ends the completion where it is, unless it has ended."""
        if self._finish_reason is None:
            self._finish_reason = "abort"
            self.has_news = True

    def whole(self) -> CompletionOutput:
        """Everything up to now."""
        self._texts = ["".join(self._texts)]
        self.has_news = False
        return CompletionOutput(
            index=self._index,
            text=self._texts[0],
            token_ids=list(self._token_ids),
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            cumulative_logprob=self._cumulative_logprob,
        )

    def delta(self) -> CompletionOutput:
        """What was added since the last call, however many deltas it was."""
        delta = self.whole()
        self._texts.clear()
        self._token_ids.clear()
        if self._logprobs is not None:
            self._logprobs.clear()
        return delta

"""One user's request: its sequences in the engine, and its outputs as they are wanted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from octavo.runtime.beam_group import BeamGroup
from octavo.runtime.outputs import (
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    RequestOutput,
)
from octavo.runtime.prompts import EncodedPrompt
from octavo.runtime.request import Request
from octavo.runtime.sampling.beam_search import BeamHypothesis, BeamSearchParams
from octavo.runtime.sampling.sampler import RowLogprobs
from octavo.runtime.sampling.sampling_params import RequestOutputKind, SamplingParams
from octavo.runtime.text.tokenizer import Tokenizer

# In place of ids where logits are no numbers: the request has failed.
NO_TOKEN = -1


class Generation(Protocol):
    """What the engine's front keeps of one user's request until it has ended."""

    @property
    def request_id(self) -> str:
        """The user's name for it."""

    @property
    def params(self) -> SamplingParams | BeamSearchParams:
        """As the user gave them."""

    @property
    def sequences(self) -> Sequence[Request]:
        """The first one is queued and starts the others."""

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended."""

    def output(self) -> RequestOutput | None:
        """What the user is to see after a step; None if nothing."""


class SampledGeneration:
    """`n` sampled completions of a prompt."""

    def __init__(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        sequences: Sequence[Request],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.sequences = tuple(sequences)
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._views = [_SequenceView(sequence, tokenizer) for sequence in sequences]
        self._prompt_logprobs_sent = False

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self.sequences)

    def output(self) -> RequestOutput | None:
        params, finished = self.params, self.finished
        if not finished and (
            params.output_kind is RequestOutputKind.FINAL_ONLY or params.num_sequences > params.n
        ):
            return None
        if params.output_kind is RequestOutputKind.DELTA:
            completions = [view.delta() for view in self._views if view.has_news]
            if not completions and not finished:
                return None
        else:
            completions = [view.whole() for view in self._views]
        if params.num_sequences > params.n:
            completions = _best(completions, params)
        return request_output(
            self._prompt,
            self.sequences,
            completions,
            request_id=self.request_id,
            prompt_logprobs=self._prompt_logprobs(),
        )

    def _prompt_logprobs(self) -> list[PositionLogprobs | None] | None:
        """Whole, as soon as it is; in a stream of deltas once."""
        leader = self.sequences[0]
        if self.params.prompt_logprobs is None or not (leader.num_output_tokens or leader.finished):
            return None
        if self.params.output_kind is RequestOutputKind.DELTA:
            if self._prompt_logprobs_sent:
                return None
            self._prompt_logprobs_sent = True
        following = self._prompt.token_ids[1:]
        return [None, *_positions(following, leader.prompt_logprobs, self._tokenizer)]


class BeamGeneration:
    """The best hypotheses of a beam search; which they are is known at its end only."""

    def __init__(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        group: BeamGroup,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request_id = request_id
        self.params = group.search.params
        self.group = group
        self._prompt = prompt
        self._tokenizer = tokenizer

    @property
    def sequences(self) -> Sequence[Request]:
        return (self.group.root, *self.group.beams)

    @property
    def finished(self) -> bool:
        return self.group.done

    def output(self) -> RequestOutput | None:
        if not self.finished:
            return None
        search = self.group.search
        completions = [
            self._completion(index, hypothesis, search.params)
            for index, hypothesis in enumerate(search.hypotheses())
        ]
        return request_output(
            self._prompt, [self.group.root], completions, request_id=self.request_id
        )

    def _completion(
        self, index: int, hypothesis: BeamHypothesis, params: BeamSearchParams
    ) -> CompletionOutput:
        token_ids = hypothesis.token_ids
        text = ""
        if self._tokenizer is not None and params.detokenize:
            end = -1 if hypothesis.finish_reason == "stop" else None
            text = self._tokenizer.decode(
                token_ids[:end], skip_special_tokens=params.skip_special_tokens
            )
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=token_ids,
            finish_reason=hypothesis.finish_reason,
            stop_reason=hypothesis.stop_reason,
            cumulative_logprob=hypothesis.cumulative_logprob,
            score=hypothesis.score,
        )


def request_output(
    prompt: EncodedPrompt,
    sequences: Sequence[Request],
    completions: list[CompletionOutput],
    *,
    request_id: str,
    prompt_logprobs: list[PositionLogprobs | None] | None = None,
) -> RequestOutput:
    """The output of a request; its times are those of the first sequence."""
    leader = sequences[0]
    num_cached_tokens = leader.num_cached_tokens or 0
    return RequestOutput(
        request_id=request_id,
        prompt=prompt.text,
        prompt_token_ids=prompt.token_ids,
        outputs=completions,
        finished=all(sequence.finished for sequence in sequences),
        num_cached_tokens=num_cached_tokens,
        metrics=leader.times.metrics(
            num_output_tokens=leader.num_output_tokens,
            num_cached_tokens=num_cached_tokens,
            num_preemptions=sum(sequence.num_preemptions for sequence in sequences),
        ),
        prompt_logprobs=prompt_logprobs,
        error=next((s.error for s in sequences if s.error is not None), None),
    )


class _SequenceView:
    """A sequence's completion, whole or what is new since the last look."""

    def __init__(self, sequence: Request, tokenizer: Tokenizer | None) -> None:
        self._sequence = sequence
        self._tokenizer = tokenizer
        self._num_tokens = 0
        self._num_characters = 0
        self._ended = False

    @property
    def has_news(self) -> bool:
        """Whether `delta` has anything to tell."""
        sequence = self._sequence
        return sequence.num_output_tokens > self._num_tokens or (
            sequence.finished and not self._ended
        )

    def whole(self) -> CompletionOutput:
        return self._completion(0, self._text())

    def delta(self) -> CompletionOutput:
        text = self._sequence.text
        news = "" if text is None else text.text_since(self._num_characters)
        completion = self._completion(self._num_tokens, news)
        self._num_tokens = self._sequence.num_output_tokens
        self._num_characters += len(news)
        self._ended = self._sequence.finished
        return completion

    def _completion(self, start: int, text: str) -> CompletionOutput:
        sequence = self._sequence
        token_ids = sequence.output_token_ids[start:]
        logprobs = None
        if sequence.params.logprobs is not None:
            logprobs = _positions(token_ids, sequence.logprobs[start:], self._tokenizer)
        cumulative = None
        if sequence.logprobs:
            cumulative = math.fsum(row.logprob for row in sequence.logprobs)
        return CompletionOutput(
            index=sequence.choice,
            text=text,
            token_ids=token_ids,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            logprobs=logprobs,
            cumulative_logprob=cumulative,
        )

    def _text(self) -> str:
        sequence, params = self._sequence, self._sequence.params
        if sequence.text is not None:
            return sequence.text.text
        if self._tokenizer is None or not params.detokenize or not sequence.finished:
            return ""
        token_ids = sequence.output_token_ids
        if sequence.finish_reason == "stop" and not params.include_stop_str_in_output:
            del token_ids[-1]  # the token that stopped it is no part of the text
        return self._tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens)


def _best(completions: list[CompletionOutput], params: SamplingParams) -> list[CompletionOutput]:
    """The `n` likeliest of `best_of` completions, numbered in that order."""
    ranked = sorted(completions, key=_cumulative_logprob, reverse=True)
    return [replace(completion, index=index) for index, completion in enumerate(ranked[: params.n])]


def _cumulative_logprob(completion: CompletionOutput) -> float:
    known = completion.cumulative_logprob
    return -math.inf if known is None else known  # ended before its first token


def _positions(
    token_ids: Sequence[int], rows: Sequence[RowLogprobs], tokenizer: Tokenizer | None
) -> list[PositionLogprobs]:
    """Of each position its own token, then the likeliest ones, as vLLM orders them."""
    positions = []
    for token_id, row in zip(token_ids, rows, strict=True):
        position = {token_id: _logprob(token_id, row.logprob, row.rank, tokenizer)}
        likeliest = zip(row.token_ids.tolist(), row.logprobs.tolist(), strict=True)
        for rank, (top_id, logprob) in enumerate(likeliest, start=1):
            if top_id not in (token_id, NO_TOKEN):
                position[top_id] = _logprob(top_id, logprob, rank, tokenizer)
        positions.append(position)
    return positions


def _logprob(token_id: int, logprob: float, rank: int, tokenizer: Tokenizer | None) -> Logprob:
    text = None if tokenizer is None else tokenizer.token_text(token_id)
    return Logprob(logprob, rank, text)

"""From a step's logits to what each sequence gains: sampled tokens, checked drafts, logprobs.

Nothing is changed here: the engine commits the gains, or drops them with a failed step. What goes
wrong with one sequence (its own logits processor raises, its logits are no numbers) is that
sequence's gain, an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.backends.base import Executable, Float32Array
from octavo.graphs.errors import BackendError, OctavoError, RequestError
from octavo.runtime.request import Request
from octavo.runtime.sampling.beam_search import BeamCandidates
from octavo.runtime.sampling.logits_processors import LogitsRow, apply_processors
from octavo.runtime.sampling.sampler import LogprobsRow, RowLogprobs, Sampler, SamplingRow
from octavo.runtime.scheduler import ScheduledRequest, StepPlan
from octavo.runtime.speculation.rejection import VerifiedRows, accept_drafts

NOT_FINITE = -1  # the sampler's answer to logits among which no token can be chosen


@dataclass(slots=True)
class Gain:
    """What a step gives a sequence; nothing for a chunk of a prefill."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[RowLogprobs] = ()  # of `token_ids`, if the request asks for them
    prompt_logprobs: Sequence[RowLogprobs] = ()
    candidates: BeamCandidates | None = None
    followers: list[Gain] = field(default_factory=list)  # first tokens of the request's followers
    error: OctavoError | None = None


@dataclass(slots=True)
class _Sampling:
    """The rows of the logits that one sequence samples in this step."""

    request: Request
    gain: Gain
    raw: Sequence[Float32Array]  # [V] each
    edited: Sequence[Float32Array]  # [V] each, what is sampled
    first_row: int = 0  # among the rows of all sequences


class Acceptance:
    """Reads the rows of one engine's logits.

    rejection  whose acceptance graph decides about the drafts of sequences that sample; None keeps
               those that equal what is sampled anyway
    """

    def __init__(self, sampled_vocab_size: int, rejection: Executable | None = None) -> None:
        self._vocab_size = sampled_vocab_size
        self._rejection = rejection
        self._sampler = Sampler(sampled_vocab_size)

    def accept(
        self, plan: StepPlan, logits_rows: Sequence[int], logits: Float32Array
    ) -> list[Gain]:
        """One gain for each scheduled request; logits [L, V], `logits_rows` [B] of them each."""
        all_rows = list(logits[:, : self._vocab_size])
        gains = [Gain() for _ in plan.scheduled]
        samplings: list[_Sampling] = []
        prompt_rows: list[tuple[Gain, list[LogprobsRow]]] = []
        start = 0
        for entry, gain, count in zip(plan.scheduled, gains, logits_rows, strict=True):
            if count == 0:
                continue
            request, rows = entry.request, all_rows[start : start + count]
            start += count
            num_prompt = _num_prompt_rows(entry, count)
            if num_prompt:
                prompt_rows.append((gain, self._prompt_rows(request, rows[:num_prompt])))
                rows = rows[num_prompt:]
            if rows:
                self._add_samplings(request, gain, rows, samplings)
        self._sample(self._without_rejection(samplings))
        self._find_logprobs(samplings, prompt_rows)
        return gains

    def _add_samplings(
        self, request: Request, gain: Gain, rows: Sequence[Float32Array], to: list[_Sampling]
    ) -> None:
        """A sequence's own rows and, of the first one, those of its followers."""
        self._add_sampling(request, gain, rows, to)
        for follower in request.followers:
            gain.followers.append(Gain())
            self._add_sampling(follower, gain.followers[-1], rows[:1], to)

    def _add_sampling(
        self, request: Request, gain: Gain, raw: Sequence[Float32Array], to: list[_Sampling]
    ) -> None:
        edited = _edit(request, gain, raw) if request.processors else raw
        if not edited:
            return
        if request.group is None:
            to.append(_Sampling(request, gain, raw, edited))
            return
        gain.candidates = request.group.candidates(edited[0])
        if not len(gain.candidates.token_ids):
            gain.error = _no_token(raw[0], edited[0])

    def _without_rejection(self, samplings: list[_Sampling]) -> list[_Sampling]:
        """Those that are still to be sampled after rejection sampling has had its own."""
        if self._rejection is None:
            return samplings
        drawn: list[_Sampling] = []
        others: list[_Sampling] = []
        for sampling in samplings:
            is_drawn = len(sampling.edited) > 1 and not sampling.request.params.greedy
            (drawn if is_drawn else others).append(sampling)
        if drawn:
            rows = [VerifiedRows(s.request, s.raw, s.edited) for s in drawn]
            for sampling, tokens in zip(drawn, accept_drafts(self._rejection, rows), strict=True):
                sampling.gain.token_ids = tokens
                if not tokens:
                    sampling.gain.error = _no_token(sampling.raw[0], sampling.edited[0])
        return others

    def _sample(self, samplings: Sequence[_Sampling]) -> None:
        rows: list[SamplingRow] = []
        for sampling in samplings:
            sampling.first_row = len(rows)
            request = sampling.request
            position = request.num_tokens
            for row in sampling.edited:
                rows.append(
                    SamplingRow(row, request.params, request.seed, position, request.choice)
                )
                position += 1
        tokens = self._sampler.sample(rows) if rows else []
        for sampling in samplings:
            first = sampling.first_row
            _verify_drafts(sampling, tokens[first : first + len(sampling.edited)])

    def _find_logprobs(
        self,
        samplings: Sequence[_Sampling],
        prompt_rows: Sequence[tuple[Gain, list[LogprobsRow]]],
    ) -> None:
        rows = [row for _, own in prompt_rows for row in own]
        wanted = [s for s in samplings if s.request.params.num_sample_logprobs is not None]
        for sampling in wanted:
            num_logprobs = self._count(sampling.request.params.num_sample_logprobs)
            for token, raw in zip(sampling.gain.token_ids, sampling.raw, strict=False):
                rows.append(LogprobsRow(raw, token, num_logprobs))
        if not rows:
            return
        found = iter(self._sampler.logprobs(rows))
        for gain, own in prompt_rows:
            gain.prompt_logprobs = [next(found) for _ in own]
            for row, logprobs in zip(own, gain.prompt_logprobs, strict=True):
                if math.isnan(logprobs.logprob) and gain.error is None:
                    gain.error = _not_finite(row.logits)
        for sampling in wanted:
            gain = sampling.gain
            gain.logprobs = [next(found) for _ in gain.token_ids]

    def _prompt_rows(self, request: Request, rows: Sequence[Float32Array]) -> list[LogprobsRow]:
        """The row at a position tells of the prompt's token after it."""
        start = len(request.prompt_logprobs) + 1
        following = request.tokens(start, start + len(rows)).tolist()
        count = self._count(request.params.prompt_logprobs)
        return [LogprobsRow(row, token, count) for row, token in zip(rows, following, strict=True)]

    def _count(self, num_logprobs: int | None) -> int:
        """-1 stands for the whole vocabulary."""
        return self._vocab_size if num_logprobs == -1 else num_logprobs or 0


def _num_prompt_rows(entry: ScheduledRequest, count: int) -> int:
    """How many of a request's first rows only tell the logprobs of its prompt."""
    request = entry.request
    end = request.num_computed_tokens + entry.num_new_tokens
    num_sampled = max(0, end - request.num_tokens + 1)
    return count - num_sampled


def _edit(request: Request, gain: Gain, raw: Sequence[Float32Array]) -> Sequence[Float32Array]:
    """The rows as the sequence's processors leave them, each after the drafts before it.

    Fewer where a processor fails: the next step meets that row again, if the drafts before it hold.
    An error, and no rows, if it fails at once.
    """
    edited: list[Float32Array] = []
    start, end = request.num_prompt_tokens, request.num_tokens
    for num_drafts, logits in enumerate(raw):
        output = request.tokens(start, end + num_drafts)
        row = LogitsRow(logits, request.tokens(0, start), output)
        try:
            apply_processors(request.processors, row)
        except OctavoError as error:
            if not edited:
                gain.error = error
            break
        edited.append(row.values)
    return edited


def _verify_drafts(sampling: _Sampling, sampled: Sequence[int]) -> None:
    """Keeps the drafts that equal what was sampled at their place, and the token after them.

    Sampled row by row with the target's own distribution, the tokens are exactly those that would
    have come one at a time.
    """
    request, gain = sampling.request, sampling.gain
    if not request.num_drafts and sampled[0] != NOT_FINITE:
        gain.token_ids = sampled
        return
    drafts = request.draft_token_ids
    tokens: list[int] = []
    for index, token in enumerate(sampled):
        if token == NOT_FINITE:
            if not tokens:
                gain.error = _no_token(sampling.raw[index], sampling.edited[index])
            break  # otherwise the next step meets it again, as its first row
        tokens.append(token)
        if index >= len(drafts) or drafts[index] != token:
            break
    gain.token_ids = tokens


def _no_token(raw: Float32Array, edited: Float32Array) -> OctavoError:
    if edited is not raw and np.isfinite(raw).all():
        return RequestError(
            "the request's own limits leave no token to choose: loosen allowed_token_ids, "
            "bad_words, min_tokens, logit_bias, logits_processors or structured_outputs"
        )
    return _not_finite(raw)


def _not_finite(raw: Float32Array) -> BackendError:
    return BackendError(
        f"the engine returned logits whose largest value is {raw.max()}: no token can be chosen, "
        "check the model with `octavo verify`"
    )

"""Beam search: which continuations run on, which are finished, and when the search ends.

The search knows nothing of engines: it is given the likeliest next tokens of every beam and says
which beams follow. Its results are those of Hugging Face's `generate(num_beams=beam_width,
do_sample=False)` for one prompt, with two differences: log-probabilities are added in float64
where Hugging Face adds in float32, and ties have an order (the better beam first, then the lower
token id). With `beam_width` 1, where Hugging Face decodes greedily, this remains a beam search.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from octavo.graphs.errors import RequestError
from octavo.runtime.sampling import parameter_checks as checks
from octavo.runtime.sampling.sampling_params import GREEDY_TEMPERATURE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo.backends.base import Float32Array, Int32Array
    from octavo.runtime.request import FinishReason

# Far beyond any use; keeps `length ** length_penalty` a finite number for every length.
MAX_LENGTH_PENALTY = 10.0


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Immutable; every value is checked when it is made and RequestError names what is wrong.

    The names are vLLM's; `early_stopping` is Hugging Face's and `n` is its num_return_sequences.
    Of plain values: `BeamSearchParams(**dataclasses.asdict(params))` equals `params`.

    beam_width           beams that run side by side, and hypotheses that are kept
    max_tokens           most tokens of a hypothesis, the one that ends it included
    ignore_eos           generate past the model's end-of-sequence tokens
    temperature          divides the logits; below 1e-5 they are left as they are, as with 1
    length_penalty       in [-10, 10]: a hypothesis' score is its log-probability divided by
                         (its number of generated tokens) ** length_penalty, so that values above 0
                         favour long hypotheses and values below 0 short ones
    early_stopping       once there are `beam_width` hypotheses: True ends the search; False ends
                         it if the best beam, as long as it is, would score no better than the
                         worst of them; "never" ends it only if no continuation can score better
    stop_token_ids       further tokens that end a hypothesis, stored without repetitions
    n                    hypotheses to return; None returns `beam_width`
    detokenize           whether the outputs have text
    skip_special_tokens  leaves special tokens out of the text
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop_token_ids: Sequence[int] | None = ()
    n: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            if (value := checks.integer(name, getattr(self, name))) < 1:
                raise RequestError(f"{name} is {value}, it must be at least 1")
        if self.n is not None and not 1 <= checks.integer("n", self.n) <= self.beam_width:
            raise RequestError(
                f"n is {self.n}, it must lie in [1, {self.beam_width}]: "
                "a beam search keeps beam_width hypotheses"
            )
        for name in ("ignore_eos", "detokenize", "skip_special_tokens"):
            checks.boolean(name, getattr(self, name))
        temperature = checks.finite_number("temperature", self.temperature)
        if temperature < 0.0:
            raise RequestError(
                f"temperature is {temperature}, it must be at least 0: "
                "use 0 to leave the logits as they are"
            )
        length_penalty = checks.number_between(
            "length_penalty",
            self.length_penalty,
            -MAX_LENGTH_PENALTY,
            MAX_LENGTH_PENALTY,
            "use 0 to compare hypotheses by their log-probability alone",
        )
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise RequestError(
                f'early_stopping is {self.early_stopping!r}, it must be True, False or "never"'
            )
        stop_token_ids = checks.token_ids("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "temperature", temperature)
        object.__setattr__(self, "length_penalty", length_penalty)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)

    @property
    def num_returned(self) -> int:
        return self.beam_width if self.n is None else self.n


class BeamCandidates(NamedTuple):
    """The likeliest next tokens of one beam, in descending order, ties by the lower id.

    A log-probability of -inf marks a token that cannot follow.
    """

    token_ids: Int32Array  # [C]
    logprobs: NDArray[np.float64]  # [C]


@dataclass(frozen=True, eq=False)
class Beam:
    """A beam after a step: one token more than beam `parent` had before it.

    Beams share their prefixes, so that a step copies no sequence.
    """

    parent: int
    token_id: int
    cumulative_logprob: float
    prefix: Beam | None  # None: this is the prompt, which has no token here

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens, first to last; the time is proportional to their number."""
        tokens = []
        beam = self
        while beam.prefix is not None:
            tokens.append(beam.token_id)
            beam = beam.prefix
        return tokens[::-1]


@dataclass(frozen=True, eq=False)
class BeamHypothesis:
    """A finished sequence. `score` is its log-probability after the length penalty."""

    beam: Beam
    score: float
    finish_reason: FinishReason  # "stop" or "length"
    stop_reason: int | None  # the one of `stop_token_ids` that ended it

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens, the one that ended the hypothesis included."""
        return self.beam.token_ids

    @property
    def cumulative_logprob(self) -> float:
        return self.beam.cumulative_logprob


@dataclass(frozen=True, eq=False)
class BeamStep:
    """The state of a search after `num_tokens` tokens; immutable, to be applied or dropped."""

    num_tokens: int
    beams: tuple[Beam, ...]  # best first, at most beam_width; none once the search is done
    finished: tuple[BeamHypothesis, ...]  # best first, at most beam_width
    done: bool


class BeamSearch:
    """The search for one prompt. `advance` computes a step and only `apply` makes it the state.

    max_output_tokens  the smaller of `params.max_tokens` and what the model's length leaves
    num_candidates     C: candidates that every beam must deliver; fewer only if no more tokens
                       can follow it
    """

    def __init__(
        self, params: BeamSearchParams, *, eos_token_ids: Sequence[int], max_output_tokens: int
    ) -> None:
        if max_output_tokens < 1:
            raise ValueError(f"max_output_tokens is {max_output_tokens}, it must be at least 1")
        self.params = params
        self.max_output_tokens = max_output_tokens
        self._eos_token_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self._stop_token_ids = frozenset(params.stop_token_ids or ())
        # What is wanted of all continuations are the best `beam_width` and the best `beam_width`
        # that do not end. Each beam has those of its own among this many.
        self.num_candidates = params.beam_width + len(self._eos_token_ids | self._stop_token_ids)
        prompt = Beam(0, -1, 0.0, None)
        self._state = BeamStep(0, (prompt,), (), done=False)

    @property
    def beams(self) -> tuple[Beam, ...]:
        """The running beams, best first: the prompt alone at the start, none at the end."""
        return self._state.beams

    @property
    def num_beams_running(self) -> int:
        return len(self._state.beams)

    @property
    def num_tokens(self) -> int:
        """Tokens that every running beam has generated."""
        return self._state.num_tokens

    @property
    def done(self) -> bool:
        return self._state.done

    def hypotheses(self) -> list[BeamHypothesis]:
        """Best first, at most `params.num_returned`; complete once the search is done.

        Fewer than that are left only if no more sequences exist.
        """
        return list(self._state.finished[: self.params.num_returned])

    def advance(self, candidates: Sequence[BeamCandidates]) -> BeamStep:
        """The step that follows from the next tokens of each of `beams`, in their order.

        Changes nothing. ValueError if the candidates do not fit the beams, or if those of one have
        no finite largest log-probability: `best_candidates` of unusable logits has length 0.
        """
        state = self._state
        if state.done:
            raise ValueError("the search is done: there is nothing to advance")
        if len(candidates) != len(state.beams):
            raise ValueError(
                f"{len(candidates)} candidates were given for {len(state.beams)} beams"
            )
        width = self.params.beam_width
        num_tokens = state.num_tokens + 1
        running: list[Beam] = []
        finished = list(state.finished)
        for rank, beam in enumerate(_ranked(state.beams, candidates)):
            hypothesis = self._finish(beam, num_tokens)
            if hypothesis is None:
                running.append(beam)
                if len(running) == width:
                    break
            elif rank < width:
                # Worse ones are passed over: what follows is there to leave enough running beams.
                finished.append(hypothesis)
        finished.sort(key=lambda hypothesis: -hypothesis.score)  # of equal ones, the older first
        del finished[width:]
        done = self._is_done(num_tokens, running, finished)
        return BeamStep(num_tokens, () if done else tuple(running), tuple(finished), done)

    def apply(self, step: BeamStep) -> None:
        """Makes `step`, which `advance` has returned since the last `apply`, the state."""
        if step.num_tokens != self._state.num_tokens + 1:
            raise ValueError(
                f"the step leads to token {step.num_tokens}, "
                f"the search is at token {self._state.num_tokens}: advance it again"
            )
        self._state = step

    def _finish(self, beam: Beam, num_tokens: int) -> BeamHypothesis | None:
        token_id = beam.token_id
        score = beam.cumulative_logprob / self._length_norm(num_tokens)
        if token_id in self._eos_token_ids:
            return BeamHypothesis(beam, score, "stop", None)
        if token_id in self._stop_token_ids:
            return BeamHypothesis(beam, score, "stop", token_id)
        if num_tokens >= self.max_output_tokens:
            return BeamHypothesis(beam, score, "length", None)
        return None

    def _is_done(
        self, num_tokens: int, running: Sequence[Beam], finished: Sequence[BeamHypothesis]
    ) -> bool:
        if not running:
            return True
        if len(finished) < self.params.beam_width:
            return False
        if self.params.early_stopping is True:
            return True
        length = num_tokens
        if self.params.early_stopping == "never" and self.params.length_penalty > 0.0:
            # A log-probability only falls, so no continuation scores better than the same one
            # at the length that divides it most.
            length = self.max_output_tokens
        attainable = running[0].cumulative_logprob / self._length_norm(length)
        return attainable <= finished[-1].score

    def _length_norm(self, num_tokens: int) -> float:
        return math.pow(num_tokens, self.params.length_penalty)


def _ranked(beams: Sequence[Beam], candidates: Sequence[BeamCandidates]) -> Iterator[Beam]:
    """Every possible continuation of the beams, the likeliest first."""
    for index, (_, logprobs) in enumerate(candidates):
        if not (len(logprobs) and math.isfinite(logprobs.max())):
            raise ValueError(f"beam {index} has no finite largest log-probability: it cannot go on")
    token_ids = np.concatenate([beam.token_ids for beam in candidates])
    scores = np.concatenate(
        [
            beam.cumulative_logprob + continuations.logprobs
            for beam, continuations in zip(beams, candidates, strict=True)
        ]
    )
    parents = np.repeat(np.arange(len(beams)), [len(beam.token_ids) for beam in candidates])
    # Stable: of equal scores, the better beam's comes first, then the one it named first.
    for index in np.argsort(-scores, kind="stable").tolist():
        score = float(scores[index])
        if score == -math.inf:
            return
        parent = int(parents[index])
        yield Beam(parent, int(token_ids[index]), score, beams[parent])


def best_candidates(
    logits: Float32Array, count: int, *, temperature: float = 0.0
) -> BeamCandidates:
    """The `count` likeliest tokens of `logits` [V], all that are possible if they are fewer.

    The log-softmax is taken in float64, of logits / temperature unless the temperature is below
    1e-5. None are returned if the largest logit is not finite: no token can be chosen.
    """
    scaled = logits.astype(np.float64)
    if temperature >= GREEDY_TEMPERATURE:
        scaled /= temperature
    largest = float(scaled.max())
    if not math.isfinite(largest):
        return BeamCandidates(np.empty(0, np.int32), np.empty(0, np.float64))
    log_normalizer = largest + math.log(np.exp(scaled - largest).sum())
    last = max(0, len(scaled) - count)
    threshold = np.partition(scaled, last)[last]
    kept = np.flatnonzero((scaled >= threshold) & (scaled > -math.inf))
    kept = kept[np.argsort(-scaled[kept], kind="stable")][:count]
    return BeamCandidates(kept.astype(np.int32), scaled[kept] - log_normalizer)

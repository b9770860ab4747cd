"""How one request samples and when it stops, with vLLM's names, defaults and meanings."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from octavo.graphs.errors import RequestError
from octavo.runtime.sampling import parameter_checks as checks
from octavo.runtime.sampling.structured_outputs import StructuredOutputsParams, structured_outputs

if TYPE_CHECKING:
    from octavo.runtime.sampling.logits_processors import LogitsRow

# vLLM's threshold: below it dividing by the temperature only adds rounding to a greedy choice.
GREEDY_TEMPERATURE = 1e-5
# OpenAI's range; like vLLM, a bias beyond it is taken as its end.
MAX_LOGIT_BIAS = 100.0
# vLLM's default limit: one request must not be able to fill the memory with copies of itself.
MAX_SEQUENCES = 16384
_SEED_LIMIT = 1 << 64
_MAX_ID_DIGITS = 19  # of a 64-bit integer; Python refuses to read numbers without end


class RequestOutputKind(enum.IntEnum):
    """What each output of a request holds, with vLLM's names and values."""

    CUMULATIVE = 0  # everything up to now
    DELTA = 1  # what is new since the output before
    FINAL_ONLY = 2  # everything, once the request has ended


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Immutable; every value is checked when it is made and RequestError names what is wrong.

    Sequences are stored as tuples without repetitions, None as an empty one. Of plain values but
    for `logits_processors`: `SamplingParams(**dataclasses.asdict(params))` equals `params`.

    n                     completions to return; with n > 1 the sampling must be random
    best_of               completions to generate, of which the n with the highest cumulative
                          log-probability are returned; None generates n
    presence_penalty      in [-2, 2]: subtracted from the logits of tokens in the output
    frequency_penalty     in [-2, 2]: subtracted for each time a token is in the output
    repetition_penalty    above 0: divides the positive logits of tokens in prompt or output and
                          multiplies the others; 1 changes nothing
    temperature           scales the logits; below 1e-5 the most likely token is taken (greedy)
    top_p                 in (0, 1]: keeps the smallest set of most likely tokens with that
                          probability
    top_k                 keeps the k most likely tokens; 0 or -1 keeps all
    min_p                 in [0, 1]: keeps tokens at least this likely, relative to the likeliest
    seed                  the same seed gives the same tokens in any batch; None draws one per
                          request
    stop                  texts that end the output when they appear in it
    include_stop_str_in_output  whether the text that ended the output is part of it
    stop_token_ids        further tokens that end the request
    bad_words             texts whose last token is never generated after those before it
    ignore_eos            generate past the model's end-of-sequence tokens
    max_tokens            most tokens to generate; None generates until the model's length
    min_tokens            tokens to generate before anything but the length may end the request
    logprobs              log-probabilities of this many likeliest tokens, and of the chosen one,
                          with each token; -1 gives those of the whole vocabulary, None gives none
    prompt_logprobs       the same for the tokens of the prompt
    detokenize            whether the outputs have text
    skip_special_tokens   leaves special tokens out of the text
    logit_bias            {token id: value added to its logit}, values clamped to [-100, 100], ids
                          also as numeric texts (JSON's keys); stored as pairs (token id, value)
    allowed_token_ids     the only tokens that may be generated; None allows all
    structured_outputs    the form the text must have, see `StructuredOutputsParams` (or a mapping
                          of its fields) and docs/structured-output.md; None leaves it free
    logits_processors     called with every `LogitsRow` before its token is chosen, in this order
    output_kind           what each output holds of a request that is still running
    speculate             whether tokens are drafted and verified, if the engine does so at all
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()  # a str is one text
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, object] | None = None
    logits_processors: Sequence[Callable[[LogitsRow], None]] = ()
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    speculate: bool = True

    def __post_init__(self) -> None:
        self._check_sampling()
        self._check_penalties()
        self._check_counts()
        self._check_lengths()
        self._check_texts()
        self._check_tokens()
        if self.num_sequences > self.n and self.output_kind is RequestOutputKind.DELTA:
            raise RequestError(
                f"best_of is {self.best_of} and n is {self.n}, which completions are returned is "
                "known at the end only: use another output_kind than DELTA"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def num_sequences(self) -> int:
        """Completions to generate; `n` of them are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_sample_logprobs(self) -> int | None:
        """`logprobs`, or 0 where only the chosen tokens' are needed, to find the best completions.

        None if no log-probability is; -1 for the whole vocabulary.
        """
        if self.logprobs is None and self.num_sequences > self.n:
            return 0
        return self.logprobs

    @property
    def has_penalties(self) -> bool:
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    @property
    def logit_bias_items(self) -> tuple[tuple[int, float], ...]:
        """(token id, value) of `logit_bias`, none if it is not given."""
        # Whatever was given, they are pairs from construction on.
        return cast("tuple[tuple[int, float], ...]", self.logit_bias or ())

    @property
    def grammar(self) -> StructuredOutputsParams | None:
        """`structured_outputs`, whatever it was given as."""
        # From construction on it is no mapping.
        return cast("StructuredOutputsParams | None", self.structured_outputs)

    def check_vocabulary(self, vocab_size: int) -> None:
        """RequestError for a token id or a number of log-probabilities beyond the vocabulary."""
        ids = {
            "logit_bias": [token_id for token_id, _ in self.logit_bias_items],
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
        }
        for name, values in ids.items():
            for value in values:
                if value >= vocab_size:
                    raise RequestError(
                        f"token id {value} in {name} lies outside the vocabulary of {vocab_size}: "
                        "give ids below that"
                    )
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and count > vocab_size:
                raise RequestError(
                    f"{name} is {count}, the vocabulary has {vocab_size} tokens: "
                    "use -1 for all of them"
                )

    def _check_sampling(self) -> None:
        _set(self, "temperature", checks.number("temperature", self.temperature))
        if not 0.0 <= self.temperature < math.inf:
            raise RequestError(
                f"temperature is {self.temperature}, it must be a finite number of at least 0: "
                "use 0 for greedy sampling"
            )
        _set(self, "top_p", checks.number("top_p", self.top_p))
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(
                f"top_p is {self.top_p}, it must lie in (0, 1]: use 1 to keep every token"
            )
        if checks.integer("top_k", self.top_k) < -1:
            raise RequestError(
                f"top_k is {self.top_k}, it must be at least 1, or 0 or -1 to keep every token"
            )
        min_p = checks.number_between("min_p", self.min_p, 0, 1, "use 0 to keep every token")
        _set(self, "min_p", min_p)
        if self.seed is not None and not 0 <= checks.integer("seed", self.seed) < _SEED_LIMIT:
            raise RequestError(
                f"seed is {self.seed}, it must lie in [0, 2**64): use None for a random seed"
            )

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = checks.number_between(name, getattr(self, name), -2, 2, "use 0 for none")
            _set(self, name, value)
        repetition = checks.number("repetition_penalty", self.repetition_penalty)
        if not 0.0 < repetition < math.inf:
            raise RequestError(
                f"repetition_penalty is {repetition}, it must be a finite number above 0: "
                "use 1 for none"
            )
        _set(self, "repetition_penalty", repetition)

    def _check_counts(self) -> None:
        if not 1 <= checks.integer("n", self.n) <= MAX_SEQUENCES:
            raise RequestError(f"n is {self.n}, it must lie in [1, {MAX_SEQUENCES}]")
        if self.best_of is not None and not (
            self.n <= checks.integer("best_of", self.best_of) <= MAX_SEQUENCES
        ):
            raise RequestError(
                f"best_of is {self.best_of}, it must lie in [n, {MAX_SEQUENCES}] and n is "
                f"{self.n}: use None to generate n completions"
            )
        if self.greedy and self.num_sequences > 1:
            name = "n" if self.n > 1 else "best_of"
            raise RequestError(
                f"{name} is {getattr(self, name)}, {name} must be 1 when using greedy sampling: "
                "raise the temperature for different completions"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and checks.integer(name, value) < -1:
                raise RequestError(
                    f"{name} is {value}, it must be at least 0, or -1 for the whole vocabulary"
                )

    def _check_lengths(self) -> None:
        if self.max_tokens is not None and checks.integer("max_tokens", self.max_tokens) < 1:
            raise RequestError(
                f"max_tokens is {self.max_tokens}, it must be at least 1: "
                "use None to generate until the model's length"
            )
        if checks.integer("min_tokens", self.min_tokens) < 0:
            raise RequestError(f"min_tokens is {self.min_tokens}, it must be at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, it must be at most max_tokens, "
                f"{self.max_tokens}: raise max_tokens"
            )

    def _check_texts(self) -> None:
        _set(self, "stop", checks.texts("stop", self.stop))
        _set(self, "bad_words", checks.texts("bad_words", self.bad_words))
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "speculate",
        ):
            checks.boolean(name, getattr(self, name))
        if self.stop and not self.detokenize:
            raise RequestError(
                f"stop is {self.stop} and detokenize False, stop texts are found in the text: "
                "use detokenize=True or stop_token_ids"
            )
        try:
            kind = RequestOutputKind(self.output_kind)
        except ValueError:
            names = ", ".join(RequestOutputKind.__members__)
            raise RequestError(
                f"output_kind is {self.output_kind!r}, it must be a RequestOutputKind: {names}"
            ) from None
        _set(self, "output_kind", kind)

    def _check_tokens(self) -> None:
        _set(self, "stop_token_ids", checks.token_ids("stop_token_ids", self.stop_token_ids))
        if self.logit_bias is not None:
            _set(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = checks.token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise RequestError(
                    "allowed_token_ids is empty, no token could be generated: "
                    "use None to allow every token"
                )
            _set(self, "allowed_token_ids", allowed)
        if self.structured_outputs is not None:
            _set(self, "structured_outputs", structured_outputs(self.structured_outputs))
        _set(self, "logits_processors", _processors(self.logits_processors))


def _set(params: SamplingParams, name: str, value: object) -> None:
    object.__setattr__(params, name, value)


def _logit_bias(values: object) -> tuple[tuple[int, float], ...]:
    """Pairs of a mapping, or of pairs, as they come back from another process."""
    try:
        pairs = list(values.items() if isinstance(values, Mapping) else _pairs(values))
    except (TypeError, ValueError):
        raise RequestError(f"logit_bias is {values!r}, it must map token ids to numbers") from None
    biases = {}
    for key, value in pairs:
        token_id = checks.token_id("a key of logit_bias", _token_id_of(key))
        bias = checks.finite_number(f"the logit_bias of token id {token_id}", value)
        biases[token_id] = min(MAX_LOGIT_BIAS, max(-MAX_LOGIT_BIAS, bias))
    return tuple(biases.items())


def _pairs(values: object) -> list[tuple[object, object]]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError
    return [(key, value) for key, value in values]


def _token_id_of(key: object) -> object:
    """JSON has no integer keys: a numeric text stands for its number."""
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS:
        return int(key)
    return key


def _processors(values: object) -> tuple[Callable[[LogitsRow], None], ...]:
    if values is None:
        return ()
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise RequestError(f"logits_processors is {values!r}, it must be a sequence of callables")
    processors = tuple(values)
    for processor in processors:
        if not callable(processor):
            raise RequestError(f"a value of logits_processors is {processor!r}: give callables")
    return processors

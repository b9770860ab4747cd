"""Users' requests of every kind, and what each of them is to get whatever runs beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from octavo.backends.manifest import Limits
from octavo.runtime.llm_engine import LLMEngine
from octavo.runtime.outputs import CompletionOutput, RequestOutput
from octavo.runtime.request import Request
from octavo.runtime.sampling.beam_search import BeamSearchParams
from octavo.runtime.sampling.logits_processors import LogitsRow
from octavo.runtime.sampling.sampling_params import RequestOutputKind, SamplingParams
from tests.unit.runtime_bundles import VOCAB_SIZE
from tests.unit.runtime_harness import random_tokens

MAX_MODEL_LEN = 48
MOST_SEQUENCES = 6
BLOCK_SIZES = (1, 2, 4, 5, 16)
EOS_TOKEN_IDS = tuple(range(200, 212))  # many, or random tokens hardly ever meet one
# The bytes of "abc d" and of "é", whose second half also follows other letters.
LETTERS = (64, 65, 66, 67, 220, 127, 102)
STOPS = ("ab", "b a", "cab", "é", "éa", "dd", "a")


def limits(block_size: int) -> Limits:
    return Limits(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MOST_SEQUENCES,
        max_num_batched_tokens=64,
        block_size=block_size,
    )


@dataclass(frozen=True)
class FailsAfter:
    """A logits processor that raises once the output has `count` tokens."""

    count: int

    def __call__(self, row: LogitsRow) -> None:
        if len(row.output_token_ids) == self.count:
            raise ValueError(f"no token {self.count}")


@dataclass
class UserRequest:
    """Arrives before the step `step` and, unless that is None, is aborted some steps later."""

    prompt: list[int]
    salt: str
    params: SamplingParams | BeamSearchParams
    priority: int
    step: int
    abort_after: int | None
    num_drafts: int  # proposed in each step
    request_id: str = ""
    outputs: list[RequestOutput] = field(default_factory=list)
    aborted: bool = False

    @property
    def num_tokens(self) -> int:
        """Most tokens of a sequence."""
        return min(len(self.prompt) + (self.params.max_tokens or MAX_MODEL_LEN), MAX_MODEL_LEN)

    @property
    def width(self) -> int:
        """Sequences that must run side by side."""
        return self.params.beam_width if isinstance(self.params, BeamSearchParams) else 1

    def num_blocks(self, block_size: int) -> int:
        """The smallest pool that it runs in: a sequence's last token is never fed."""
        return self.width * -(-(self.num_tokens - 1) // block_size)

    @property
    def as_prompt(self) -> dict[str, object]:
        return {"prompt_token_ids": self.prompt, "cache_salt": self.salt}


def _rarely(draw: st.DrawFn, values: st.SearchStrategy[Any], default: Any) -> Any:
    return draw(values) if draw(st.integers(0, 3)) == 0 else default


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    temperature = draw(st.sampled_from([1.0, 0.0, 0.7, 2.0]))
    n, best_of = 1, None
    if temperature:
        n = draw(st.sampled_from([1, 1, 2, 3]))
        best_of = _rarely(draw, st.integers(n, 4), None)
    max_tokens = draw(st.sampled_from([16, 1, 5, 10, None]))
    writes = draw(st.booleans())
    stop = _rarely(draw, st.lists(st.sampled_from(STOPS), max_size=3), ["ab"] if writes else [])
    kinds = [RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY]
    if best_of in (None, n):
        kinds += [RequestOutputKind.DELTA] * 2
    return SamplingParams(
        n=n,
        best_of=best_of,
        temperature=temperature,
        seed=draw(st.integers(0, 3)),
        max_tokens=max_tokens,
        min_tokens=_rarely(draw, st.integers(0, 5 if max_tokens is None else max_tokens), 0),
        allowed_token_ids=LETTERS if writes else None,
        stop=stop,
        include_stop_str_in_output=draw(st.booleans()),
        stop_token_ids=_rarely(draw, st.sampled_from([(64,), (5, 6, 7, 8), (220, 201)]), ()),
        ignore_eos=_rarely(draw, st.just(True), False),
        detokenize=bool(stop) or draw(st.booleans()),
        bad_words=_rarely(draw, st.sampled_from([("ba",), ("a", "dc")]), ()),
        logit_bias=_rarely(draw, st.sampled_from([{64: 2.5, 9: -100.0}, {202: 100.0}]), None),
        presence_penalty=_rarely(draw, st.sampled_from([1.5, -1.0]), 0.0),
        frequency_penalty=_rarely(draw, st.sampled_from([0.5, -0.3]), 0.0),
        repetition_penalty=_rarely(draw, st.sampled_from([1.3, 0.8]), 1.0),
        top_p=_rarely(draw, st.just(0.9), 1.0),
        top_k=_rarely(draw, st.just(10), 0),
        min_p=_rarely(draw, st.just(0.1), 0.0),
        logprobs=_rarely(draw, st.sampled_from([0, 2, -1]), None),
        prompt_logprobs=_rarely(draw, st.sampled_from([0, 1, -1]), None),
        logits_processors=_rarely(
            draw, st.sampled_from([(), (), (FailsAfter(0),), (FailsAfter(4),)]), ()
        ),
        output_kind=draw(st.sampled_from(kinds)),
    )


@st.composite
def beam_params(draw: st.DrawFn) -> BeamSearchParams:
    width = draw(st.sampled_from([4, 4, 3, 2, 1]))
    return BeamSearchParams(
        beam_width=width,
        max_tokens=draw(st.integers(1, 10)),
        n=draw(st.one_of(st.none(), st.integers(1, width))),
        ignore_eos=draw(st.booleans()),
        early_stopping=draw(st.sampled_from([False, True, "never"])),
        length_penalty=draw(st.sampled_from([1.0, 0.0, -0.5])),
        temperature=draw(st.sampled_from([0.0, 3.0])),
        stop_token_ids=draw(st.sampled_from([(), tuple(range(40))])),
    )


@st.composite
def user_requests(draw: st.DrawFn, share_of_beam_searches: float) -> UserRequest:
    # Few different beginnings, so that prefixes are often shared.
    prefix = random_tokens(draw(st.integers(0, 24)), seed=draw(st.integers(0, 1)))
    tail = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=0 if prefix else 1, max_size=8))
    params: st.SearchStrategy[SamplingParams | BeamSearchParams] = sampling_params()
    if draw(st.integers(1, 4)) <= 4 * share_of_beam_searches:
        params = beam_params()
    return UserRequest(
        prompt=prefix + tail,
        salt=draw(st.sampled_from(["", "", "a"])),
        params=draw(params),
        priority=draw(st.sampled_from([0, 0, 1, -1])),
        step=draw(st.sampled_from([0, 0, 0, 1, 2, 5, 9])),
        abort_after=draw(st.one_of(st.none(), st.none(), st.none(), st.integers(0, 10))),
        num_drafts=draw(st.sampled_from([0, 0, 1, 4])),
    )


def request_lists() -> st.SearchStrategy[list[UserRequest]]:
    """The pool holds one of them: beside a beam search it is too large to be fought for."""
    shares = st.sampled_from([0.0, 0.0, 0.25, 1.0])
    return shares.flatmap(lambda share: st.lists(user_requests(share), min_size=1, max_size=6))


def outcome_alone(request: UserRequest, roomy: LLMEngine) -> RequestOutput:
    """What the request gets in an engine that it has for itself."""
    params = request.params
    if isinstance(params, SamplingParams):
        params = replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
    roomy.add_request("alone", request.as_prompt, params)
    outputs: list[RequestOutput] = []
    while roomy.has_unfinished_requests:
        outputs += roomy.step()
    (output,) = outputs
    return output


def propose(request: UserRequest, sequence: Request, expected: RequestOutput) -> None:
    """Drafts for one of the request's sequences: what it gets, with every third token changed."""
    # Which completion of `best_of` a sequence is cannot be told, nor what follows an error.
    if expected.error or len(expected.outputs) < getattr(request.params, "num_sequences", 99):
        return
    # As a proposer would: in a request's decodes alone.
    if not sequence.num_output_tokens or sequence.num_tokens - sequence.num_computed_tokens > 1:
        return
    known = sequence.num_output_tokens
    room = min(request.num_drafts, sequence.max_total_tokens - sequence.num_tokens - 1)
    drafts = expected.outputs[sequence.choice].token_ids[known : known + max(0, room)]
    if drafts:
        sequence.set_drafts(
            [
                token_id if (known + index) % 3 else (token_id + 1) % VOCAB_SIZE
                for index, token_id in enumerate(drafts)
            ]
        )


def check_outputs(request: UserRequest, expected: RequestOutput) -> None:
    """The request's outputs tell what it gets alone, in the way that it asked for."""
    outputs = request.outputs
    is_delta = getattr(request.params, "output_kind", None) is RequestOutputKind.DELTA
    finished = [output.finished for output in outputs]
    # An aborted request is told of no end; but it may have come to its end before.
    if request.aborted:
        assert not any(finished)
    else:
        assert finished == [False] * (len(outputs) - 1) + [True]
    error = None if request.aborted else expected.error
    assert [str(output.error) for output in outputs if output.error] == [str(error)] * bool(error)
    seen = {one.index: _added_up(outputs, one.index, is_delta) for one in expected.outputs}
    if request.aborted or error:
        # Completions of `best_of` are numbered by their order, which an error leaves without sense.
        if not getattr(request.params, "best_of", None):
            for completion in expected.outputs:
                _check_beginning(seen[completion.index], completion)
        return
    assert [seen[one.index] for one in expected.outputs] == expected.outputs
    if is_delta:
        rows = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
        assert rows == [expected.prompt_logprobs] * (expected.prompt_logprobs is not None)
    else:
        assert outputs[-1].outputs == expected.outputs
        assert outputs[-1].prompt_logprobs == expected.prompt_logprobs


def _added_up(outputs: Sequence[RequestOutput], index: int, is_delta: bool) -> CompletionOutput:
    """A completion as its user has it in the end: the last one, or all deltas together."""
    parts = [one for output in outputs for one in output.outputs if one.index == index]
    if not parts:
        return CompletionOutput(index=index, text="", token_ids=[])
    if not is_delta:
        for earlier, later in pairwise(parts):
            assert later.text.startswith(earlier.text)
            assert later.token_ids[: len(earlier.token_ids)] == earlier.token_ids
        return parts[-1]
    assert all(part.token_ids or part.text or part.finished for part in parts)
    assert not any(part.finished for part in parts[:-1])
    logprobs = None
    if parts[-1].logprobs is not None:
        logprobs = [row for part in parts for row in part.logprobs or ()]
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        logprobs=logprobs,
    )


def _check_beginning(completion: CompletionOutput, whole: CompletionOutput) -> None:
    """What was shown of a completion that was ended early, perhaps in the middle of a character."""
    num_tokens = min(len(completion.token_ids), len(whole.token_ids))
    assert completion.token_ids[:num_tokens] == whole.token_ids[:num_tokens]
    text, whole_text = completion.text.rstrip("\ufffd"), whole.text.rstrip("\ufffd")
    num_chars = min(len(text), len(whole_text))
    assert text[:num_chars] == whole_text[:num_chars]

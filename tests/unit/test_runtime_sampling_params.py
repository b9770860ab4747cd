"""Every refused sampling parameter, each with its sentence, and what the accepted ones become."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from typing import Any

import pytest

from octavo.graphs.errors import OctavoError, RequestError
from octavo.runtime.sampling.logits_processors import LogitsRow
from octavo.runtime.sampling.sampling_params import RequestOutputKind, SamplingParams

EVERY_FIELD: dict[str, Any] = {
    "n": 2,
    "best_of": 3,
    "presence_penalty": -2,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.3,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "seed": (1 << 64) - 1,
    "stop": ["\n\n", "끝"],
    "include_stop_str_in_output": True,
    "stop_token_ids": [7, 2],
    "bad_words": ["bad", "very bad"],
    "ignore_eos": True,
    "max_tokens": 99,
    "min_tokens": 9,
    "logprobs": 5,
    "prompt_logprobs": -1,
    "detokenize": True,
    "skip_special_tokens": False,
    "logit_bias": {3: -0.1, 11: 5},
    "allowed_token_ids": [3, 11, 2],
    "structured_outputs": {"choice": ["a", "b"]},
    "output_kind": RequestOutputKind.FINAL_ONLY,
    "speculate": False,
}


def ban_nothing(row: LogitsRow) -> None:
    """A logits processor that another process can find by its name."""


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)
    assert (params.seed, params.max_tokens, params.ignore_eos) == (None, 16, False)
    assert (params.n, params.best_of, params.min_p, params.min_tokens) == (1, None, 0.0, 0)
    assert (params.presence_penalty, params.frequency_penalty) == (0.0, 0.0)
    assert params.repetition_penalty == 1.0
    assert (params.logprobs, params.prompt_logprobs) == (None, None)
    assert (params.logit_bias, params.allowed_token_ids) == (None, None)
    assert (params.stop, params.stop_token_ids, params.bad_words) == ((), (), ())
    assert params.logits_processors == ()
    assert (params.detokenize, params.skip_special_tokens) == (True, True)
    assert not params.include_stop_str_in_output
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert [kind.value for kind in RequestOutputKind] == [0, 1, 2]
    assert not params.has_penalties


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"temperature": math.nan}, "temperature is nan, it must be a finite number"),
        ({"temperature": math.inf}, "temperature is inf, it must be a finite number"),
        ({"temperature": -0.5}, "temperature is -0.5, it must be a finite number of at least 0"),
        ({"temperature": "hot"}, "temperature is 'hot', it must be a number"),
        ({"temperature": True}, "temperature is True, it must be a number"),
        ({"temperature": 10**400}, "temperature is too large"),
        ({"top_p": math.nan}, r"top_p is nan, it must lie in \(0, 1\]"),
        ({"top_p": 0.0}, r"top_p is 0.0, it must lie in \(0, 1\]"),
        ({"top_p": 1.01}, r"top_p is 1.01, it must lie in \(0, 1\]"),
        ({"top_p": None}, "top_p is None, it must be a number"),
        ({"top_k": -2}, "top_k is -2, it must be at least 1, or 0 or -1"),
        ({"top_k": 1.5}, "top_k is 1.5, it must be an integer"),
        ({"top_k": True}, "top_k is True, it must be an integer"),
        ({"max_tokens": 0}, "max_tokens is 0, it must be at least 1"),
        ({"max_tokens": -3}, "max_tokens is -3, it must be at least 1"),
        ({"max_tokens": "8"}, "max_tokens is '8', it must be an integer"),
        ({"max_tokens": False}, "max_tokens is False, it must be an integer"),
        ({"seed": -1}, r"seed is -1, it must lie in \[0, 2\*\*64\)"),
        ({"seed": 1 << 64}, r"it must lie in \[0, 2\*\*64\)"),
        ({"seed": 0.5}, "seed is 0.5, it must be an integer"),
        ({"ignore_eos": 1}, "ignore_eos is 1, it must be True or False"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5, it must be a sequence"),
        ({"stop_token_ids": "</s>"}, "stop_token_ids is '</s>', it must be a sequence"),
        ({"stop_token_ids": [3, -1]}, "a value of stop_token_ids is -1, token ids start at 0"),
        ({"stop_token_ids": [3, "x"]}, "a value of stop_token_ids is 'x', it must be an integer"),
        ({"min_p": math.nan}, r"min_p is nan, it must lie in \[0, 1\]"),
        ({"min_p": -0.1}, r"min_p is -0.1, it must lie in \[0, 1\]"),
        ({"min_p": 1.5}, r"min_p is 1.5, it must lie in \[0, 1\]"),
        ({"presence_penalty": math.nan}, r"presence_penalty is nan, it must lie in \[-2, 2\]"),
        ({"presence_penalty": 2.1}, r"presence_penalty is 2.1, it must lie in \[-2, 2\]"),
        ({"frequency_penalty": -2.1}, r"frequency_penalty is -2.1, it must lie in \[-2, 2\]"),
        ({"frequency_penalty": "much"}, "frequency_penalty is 'much', it must be a number"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0.0, .* above 0"),
        ({"repetition_penalty": -1}, "repetition_penalty is -1.0, .* above 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf, .* finite"),
        ({"repetition_penalty": math.nan}, "repetition_penalty is nan, .* finite"),
        ({"n": 0}, r"n is 0, it must lie in \[1, 16384\]"),
        ({"n": 10**9}, r"n is 1000000000, it must lie in \[1, 16384\]"),
        ({"n": 2.0}, "n is 2.0, it must be an integer"),
        ({"n": 3, "best_of": 2}, r"best_of is 2, it must lie in \[n, 16384\] and n is 3"),
        ({"best_of": True}, "best_of is True, it must be an integer"),
        ({"n": 2, "temperature": 0}, "n is 2, n must be 1 when using greedy sampling"),
        ({"best_of": 2, "temperature": 0}, "best_of must be 1 when using greedy sampling"),
        ({"best_of": 2, "output_kind": RequestOutputKind.DELTA}, "best_of is 2 and n is 1, .*end"),
        ({"logprobs": -2}, "logprobs is -2, it must be at least 0, or -1"),
        ({"logprobs": True}, "logprobs is True, it must be an integer"),
        ({"prompt_logprobs": 1.0}, "prompt_logprobs is 1.0, it must be an integer"),
        ({"prompt_logprobs": -3}, "prompt_logprobs is -3, it must be at least 0, or -1"),
        ({"min_tokens": -1}, "min_tokens is -1, it must be at least 0"),
        ({"min_tokens": 17}, "min_tokens is 17, it must be at most max_tokens, 16"),
        ({"stop": ""}, "a value of stop is empty"),
        ({"stop": ["a", ""]}, "a value of stop is empty"),
        ({"stop": 5}, "stop is 5, it must be a text or a sequence of texts"),
        ({"stop": b"end"}, "stop is b'end', it must be a text"),
        ({"stop": ["a", 5]}, "a value of stop is 5, it must be a text"),
        ({"stop": "a", "detokenize": False}, r"stop is \('a',\) and detokenize False"),
        ({"bad_words": [""]}, "a value of bad_words is empty"),
        ({"detokenize": None}, "detokenize is None, it must be True or False"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens is 'no', it must be True or False"),
        ({"include_stop_str_in_output": 0}, "include_stop_str_in_output is 0, it must be True"),
        ({"logit_bias": {5: math.nan}}, "logit_bias of token id 5 is nan, .* finite"),
        ({"logit_bias": {5: -math.inf}}, "logit_bias of token id 5 is -inf, .* finite"),
        ({"logit_bias": {5: "x"}}, "logit_bias of token id 5 is 'x', it must be a number"),
        ({"logit_bias": {"x": 1.0}}, "a key of logit_bias is 'x', it must be an integer"),
        ({"logit_bias": {"9" * 5000: 1.0}}, "a key of logit_bias is '999.*must be an integer"),
        ({"logit_bias": {-1: 1.0}}, "a key of logit_bias is -1, token ids start at 0"),
        ({"logit_bias": {True: 1.0}}, "a key of logit_bias is True, it must be an integer"),
        ({"logit_bias": [1, 2]}, r"logit_bias is \[1, 2\], it must map token ids to numbers"),
        ({"logit_bias": "5:1"}, "logit_bias is '5:1', it must map token ids to numbers"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": [-1]}, "a value of allowed_token_ids is -1, token ids start at 0"),
        ({"logits_processors": ban_nothing}, "logits_processors is .*, it must be a sequence"),
        ({"logits_processors": ["f"]}, "a value of logits_processors is 'f': give callables"),
        ({"output_kind": 3}, "output_kind is 3, .*: CUMULATIVE, DELTA, FINAL_ONLY"),
        ({"output_kind": "DELTA"}, "output_kind is 'DELTA', it must be a RequestOutputKind"),
    ],
)
def test_a11_bad_values_are_refused(values: dict[str, Any], sentence: str) -> None:
    """A11: NaN in particular."""
    with pytest.raises(RequestError, match=sentence) as caught:
        SamplingParams(**values)
    assert isinstance(caught.value, OctavoError)
    assert isinstance(caught.value, ValueError)


def test_accepted_limits() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(top_k=-1).top_k == -1
    assert SamplingParams(max_tokens=None).max_tokens is None
    assert SamplingParams(seed=(1 << 64) - 1).seed == (1 << 64) - 1
    assert not SamplingParams(temperature=1e-4).greedy
    assert SamplingParams(min_tokens=16, max_tokens=16).min_tokens == 16
    assert SamplingParams(min_tokens=1000, max_tokens=None).min_tokens == 1000
    assert SamplingParams(logprobs=-1, prompt_logprobs=0).logprobs == -1
    assert SamplingParams(n=1, best_of=1, temperature=0).num_sequences == 1
    assert SamplingParams(min_p=1, presence_penalty=-2, frequency_penalty=2).min_p == 1.0


def test_a12_a_low_temperature_is_kept_and_not_greedy() -> None:
    """A12: 1e-4 samples nearly greedily; only below 1e-5 is the most likely token just taken."""
    params = SamplingParams(temperature=1e-4, n=2)
    assert params.temperature == 1e-4
    assert not params.greedy
    assert SamplingParams(temperature=9e-6).greedy


def test_sequences_become_tuples_without_repetitions() -> None:
    params = SamplingParams(
        stop_token_ids=[2, 1, 2], bad_words=["b", "a", "b"], allowed_token_ids=range(3)
    )
    assert params.stop_token_ids == (2, 1)
    assert params.bad_words == ("b", "a")
    assert params.allowed_token_ids == (0, 1, 2)
    assert SamplingParams(stop="ab").stop == ("ab",)
    nothing: dict[str, Any] = dict.fromkeys(
        ("stop", "stop_token_ids", "bad_words", "logits_processors")
    )
    assert SamplingParams(**nothing) == SamplingParams()


def test_logit_bias_is_clamped_and_may_have_jsons_keys() -> None:
    bias: Any = {"7": 250, 5: -1e9, 6: 0.5}
    assert SamplingParams(logit_bias=bias).logit_bias == ((7, 100.0), (5, -100.0), (6, 0.5))


def test_num_sample_logprobs_includes_what_best_of_needs() -> None:
    assert SamplingParams().num_sample_logprobs is None
    assert SamplingParams(n=2, best_of=2).num_sample_logprobs is None
    assert SamplingParams(n=2, best_of=3).num_sample_logprobs == 0
    assert SamplingParams(n=2, best_of=3, logprobs=4).num_sample_logprobs == 4


def test_every_field_survives_plain_values() -> None:
    """As a child process gets them: lists for tuples, numbers for enums."""
    params = SamplingParams(**EVERY_FIELD)
    values = dataclasses.asdict(params)
    assert set(values) == {*EVERY_FIELD, "logits_processors"}
    assert all(
        values[name] != getattr(SamplingParams(), name)
        for name in EVERY_FIELD.keys() - {"detokenize"}
    )
    assert SamplingParams(**values) == params
    assert SamplingParams(**json.loads(json.dumps(values))) == params


def test_params_can_be_hashed_and_pickled() -> None:
    params = SamplingParams(**EVERY_FIELD, logits_processors=[ban_nothing])
    assert pickle.loads(pickle.dumps(params)) == params
    assert len({params, SamplingParams(**EVERY_FIELD), dataclasses.replace(params)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"logit_bias": {5: 1.0, 50000: 1.0}},
            "token id 50000 in logit_bias lies outside the vocabulary of 49152",
        ),
        ({"allowed_token_ids": [49152]}, "token id 49152 in allowed_token_ids lies outside"),
        ({"stop_token_ids": [49151, 60000]}, "token id 60000 in stop_token_ids lies outside"),
        ({"logprobs": 49153}, "logprobs is 49153, the vocabulary has 49152 tokens"),
        ({"prompt_logprobs": 49153}, "prompt_logprobs is 49153, the vocabulary has 49152"),
    ],
)
def test_a04_what_lies_outside_the_vocabulary_is_refused(
    values: dict[str, Any], sentence: str
) -> None:
    """A04: before the request reaches the engine, which never sees the id."""
    params = SamplingParams(**values)
    with pytest.raises(RequestError, match=sentence):
        params.check_vocabulary(49152)
    params.check_vocabulary(60001)

"""Every refused sampling parameter, each with its sentence."""

from __future__ import annotations

import math
from typing import Any

import pytest

from octavo.graphs.errors import OctavoError, RequestError
from octavo.runtime import SamplingParams


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)
    assert (params.seed, params.max_tokens, params.ignore_eos) == (None, 16, False)
    assert params.stop_token_ids == ()


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
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)  # type: ignore[arg-type]
    assert not SamplingParams(temperature=1e-4).greedy

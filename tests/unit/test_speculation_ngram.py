"""What n-grams propose."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.backends.base import StepInputs
from octavo.runtime.request import Request
from octavo.runtime.sampling.sampling_params import SamplingParams
from octavo.runtime.speculation.drafter import ComputedStep, DraftContext
from octavo.runtime.speculation.ngram import NgramDrafter

NOTHING = np.zeros(0, dtype=np.int32)
INPUTS = StepInputs(NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING)
STEP = ComputedStep([], [], INPUTS, [], None)


def request(tokens: list[int]) -> Request:
    return Request("0", tokens, SamplingParams(), max_model_len=500, eos_token_ids=(), seed=0)


def drafts(tokens: list[int], most: int = 4, *, vocab_size: int = 1000) -> list[int]:
    drafter = NgramDrafter(2, 4, sampled_vocab_size=vocab_size)
    (proposal,) = drafter.propose(STEP, [DraftContext(request(tokens), most)])
    assert proposal.probs is None
    return list(proposal.token_ids)


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),
        ([1, 2, 3], []),  # nothing came before
        ([7, 1, 8, 1], []),  # one token alone is too short
        ([1, 2, 9, 1, 2, 8, 1, 2], [8, 1, 2, 8]),  # the latest place
        ([5, 1, 2, 9, 6, 1, 2, 8, 5, 1, 2], [9, 6, 1, 2]),  # a longer match is the better one
        ([1, 2, 1, 2], [1, 2, 1, 2]),  # periodic text goes on
        ([4, 4, 4], [4, 4, 4, 4]),
    ],
)
def test_what_followed_is_proposed(tokens: list[int], wanted: list[int]) -> None:
    assert drafts(tokens) == wanted


def test_no_more_than_was_asked_for() -> None:
    assert drafts([1, 2, 3, 4, 5, 1, 2], most=1) == [3]


def test_what_is_never_sampled_is_never_proposed() -> None:
    """A prompt may hold ids behind the sampled vocabulary."""
    assert drafts([1, 2, 3, 60, 5, 1, 2], vocab_size=50) == [3]
    assert drafts([1, 2, 60, 5, 1, 2], vocab_size=50) == []


def test_each_sequence_has_its_own_index_which_grows_with_it() -> None:
    drafter = NgramDrafter(2, 3, sampled_vocab_size=100)
    one, other = request([1, 2, 3]), request([3, 4, 9, 3, 4])
    contexts = [DraftContext(one, 2), DraftContext(other, 2)]
    found = drafter.propose(STEP, contexts)
    assert [list(proposal.token_ids) for proposal in found] == [[], [9, 3]]
    for token in (8, 1, 2):
        one.append_token(token)
    found = drafter.propose(STEP, contexts)
    assert [list(proposal.token_ids) for proposal in found] == [[3, 8], [9, 3]]

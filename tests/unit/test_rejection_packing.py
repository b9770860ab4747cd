"""What rejection sampling hands to the acceptance graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.backends.base import AcceptInputs, Float32Array, Int32Array
from octavo.backends.manifest import Limits
from octavo.runtime.request import Request
from octavo.runtime.sampling.sampling_params import SamplingParams
from octavo.runtime.speculation.rejection import VerifiedRows, accept_drafts
from tests.unit.runtime_harness import RecordingExecutable

VOCAB = 6
LIMITS = Limits(max_model_len=32, max_num_seqs=4, max_num_batched_tokens=32, block_size=16)


class Recorder(RecordingExecutable):
    """Keeps what it was asked, and accepts nothing."""

    def __init__(self) -> None:
        super().__init__(LIMITS, VOCAB)

    def accept(self, inputs: AcceptInputs) -> Int32Array:
        self.asked = inputs
        return np.full(len(inputs.logits), -1, np.int32)


def request(drafts: list[int], probs: Float32Array | None = None, **params: Any) -> Request:
    made = Request(
        "r", [1, 2], SamplingParams(**params), max_model_len=32, eos_token_ids=(), seed=5
    )
    made.set_drafts(drafts, probs)
    return made


def rows(count: int, scale: float = 1.0) -> list[Float32Array]:
    return [np.arange(VOCAB, dtype=np.float32) * scale + row for row in range(count)]


def packed(*sequences: VerifiedRows) -> AcceptInputs:
    executable = Recorder()
    accept_drafts(executable, sequences)
    return executable.asked


@pytest.mark.parametrize("top_k", [2**31, 2**32 + 1, 2**40])
def test_a_top_k_beyond_the_vocabulary_keeps_all(top_k: int) -> None:
    raw = rows(2)
    asked = packed(VerifiedRows(request([3], top_k=top_k), raw, raw))
    assert asked.top_k.tolist() == [VOCAB, VOCAB]


def test_trimmed_drafts_lose_their_probabilities_and_rows_keep_their_edits() -> None:
    probs = np.eye(VOCAB, dtype=np.float32)[[3, 4, 5]]
    first, second = rows(3), rows(2, 2.0)
    edited = [second[0], second[1].copy()]
    edited[1][[0, 4]] = [-np.inf, 7.0]
    asked = packed(
        VerifiedRows(request([3, 4, 5], probs), first, first),  # the third was trimmed
        VerifiedRows(request([1], temperature=2), second, edited),
    )
    assert asked.first_rows.tolist() == [0, 0, 0, 3, 3]
    assert asked.draft_token_ids.tolist() == [3, 4, -1, 1, -1]
    assert asked.prob_rows.tolist() == [0, 1, -1, -1, -1]
    assert asked.draft_probs.tolist() == probs[:2].tolist()
    assert asked.edit_rows.tolist() == [4, 4]
    assert asked.edit_token_ids.tolist() == [0, 4]
    assert asked.edit_values.tolist() == [-np.inf, 7.0]
    assert asked.temperature.tolist() == [1.0, 1.0, 1.0, 2.0, 2.0]

"""Drafts of heads: from which hidden state, for which request, and how they are chosen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from octavo.backends.base import AcceptInputs, Float32Array, Int32Array, StepInputs, StepOutputs
from octavo.runtime.request import Request
from octavo.runtime.sampling.sampler import Sampler, SamplingRow
from octavo.runtime.sampling.sampling_params import SamplingParams
from octavo.runtime.speculation.draft_sampler import DraftSampler, distribution
from octavo.runtime.speculation.drafter import ComputedStep, DraftContext, Proposal
from octavo.runtime.speculation.heads import HeadsDrafter

NUM_HEADS = 3
VOCAB_SIZE = 12
SAMPLED = 10  # the last two ids are padding
GREEDY = SamplingParams(temperature=0.0)


class FakeHeads:
    """Head j's likeliest token is `feature + j + 1`, and padding is likelier than any token."""

    def __init__(self) -> None:
        self.runs: list[StepInputs] = []
        self.num_closed = 0

    def run(self, inputs: StepInputs) -> StepOutputs:
        self.runs.append(inputs)
        assert inputs.features is not None
        tokens = inputs.features[:, :1].astype(int) + np.arange(1, NUM_HEADS + 1)
        logits = np.random.default_rng(5).normal(size=(tokens.size, VOCAB_SIZE))
        logits[np.arange(tokens.size), tokens.ravel()] = 4.0
        logits[:, SAMPLED:] = 9.0
        return StepOutputs(logits.astype(np.float32))

    def allocate_kv_cache(self, num_blocks: int) -> None:
        raise AssertionError("heads have no cache")

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        raise AssertionError("heads have no cache")

    def accept(self, inputs: AcceptInputs) -> Int32Array:
        raise AssertionError("drafters accept nothing")

    def close(self) -> None:
        self.num_closed += 1


def drafter(executable: FakeHeads, sampler: DraftSampler | None = None) -> HeadsDrafter:
    return HeadsDrafter(
        "medusa", executable, sampled_vocab_size=SAMPLED, num_heads=NUM_HEADS, sampler=sampler
    )


def request(num_tokens: int, params: SamplingParams = GREEDY, choice: int = 0) -> Request:
    """Its last token is 1; the others are 0."""
    tokens = [0] * (num_tokens - 1) + [1]
    return Request("r", tokens, params, max_model_len=99, eos_token_ids=(), seed=8, choice=choice)


def computed(
    requests: Sequence[Request],
    starts: Sequence[int],
    counts: Sequence[int],
    logits_rows: Sequence[int],
    hidden_states: Float32Array,
) -> ComputedStep:
    """A step that computed `counts[b]` tokens of each sequence from `starts[b]` on."""
    total = sum(counts)
    unused = np.zeros(total, dtype=np.int32)
    inputs = StepInputs(
        token_ids=unused,
        positions=unused,
        slot_mapping=unused,
        block_tables=unused[:, None],
        query_start_loc=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        prefix_offsets=np.array(starts, dtype=np.int32),
        logits_indices=unused[: sum(logits_rows)],
    )
    return ComputedStep(requests, starts, inputs, logits_rows, hidden_states)


def rows(*values: float) -> Float32Array:
    """Hidden states [L, 2], a row for each value."""
    return np.array([[value, -value] for value in values], dtype=np.float32)


def test_prefills_decodes_and_verified_drafts_in_one_step() -> None:
    """Rows of the logits in batch order: what each last token was sampled from.

    a  a prompt of 6 tokens, its token sampled: the only row
    b  a chunk of a prompt: no row, and no context
    c  one decode token at position 8
    d  position 4 and three drafts, of which one was accepted: the row of position 5
    e  position 2 and two drafts, all accepted: the last of its rows
    f  position 7 and two drafts, none accepted: the first of its rows
    """
    a, c, d, e, f = (request(count) for count in (7, 10, 7, 6, 9))
    b = request(50)
    step = computed(
        [a, b, c, d, e, f],
        starts=[0, 16, 8, 4, 2, 7],
        counts=[6, 8, 1, 4, 3, 3],
        logits_rows=[1, 0, 1, 4, 3, 3],
        hidden_states=rows(0, 1, 0, 2, 0, 0, 0, 0, 3, 4, 0, 0),
    )
    executable = FakeHeads()
    contexts = [DraftContext(one, NUM_HEADS) for one in (f, e, d, c, a)]
    found = drafter(executable).propose(step, contexts)
    (run,) = executable.runs
    assert run.features is not None
    assert run.features.tolist() == rows(4, 3, 2, 1, 0).tolist()
    assert run.token_ids.tolist() == [1] * 5
    assert run.token_ids.dtype == np.int32
    assert found == [
        Proposal([5, 6, 7]),
        Proposal([4, 5, 6]),
        Proposal([3, 4, 5]),
        Proposal([2, 3, 4]),
        Proposal([1, 2, 3]),
    ]


def test_the_rows_of_prompt_logprobs_come_before() -> None:
    """All positions of the prompt have rows then, the last one's is that of the token."""
    one = request(5)
    step = computed([one], [0], [4], [4], rows(7, 7, 7, 6))
    assert drafter(FakeHeads()).propose(step, [DraftContext(one, 1)]) == [Proposal([7])]


def test_no_more_drafts_than_wanted() -> None:
    requests = [request(4), request(4), request(4)]
    step = computed(requests, [2, 2, 2], [1, 1, 1], [1, 1, 1], rows(0, 3, 5))
    contexts = [DraftContext(one, most) for one, most in zip(requests, (2, 9, 1), strict=True)]
    expected = [[1, 2], [4, 5, 6], [6]]
    for sampler in (None, DraftSampler(SAMPLED)):
        found = drafter(FakeHeads(), sampler).propose(step, contexts)
        assert [list(proposal.token_ids) for proposal in found] == expected
        assert [proposal.probs for proposal in found] == [None] * 3


def test_sequences_that_the_step_did_not_compute_get_no_drafts() -> None:
    """A fork of one that was in it, and one computed again up to a last token that is known."""
    inside, again, outside = request(4), request(7), request(4)
    step = computed([inside, again], [2, 4], [1, 2], [1, 0], rows(2))
    executable = FakeHeads()
    contexts = [DraftContext(one, 1) for one in (outside, again, inside)]
    heads = drafter(executable)
    assert heads.propose(step, contexts) == [Proposal(), Proposal(), Proposal([3])]
    assert heads.propose(step, contexts[:2]) == [Proposal(), Proposal()]
    assert heads.propose(step, []) == []
    assert len(executable.runs) == 1


def sampled_step() -> tuple[list[Request], ComputedStep, list[DraftContext], Float32Array]:
    """Two sampling requests and a greedy one; the heads' logits [3, NUM_HEADS, V] for them."""
    params = SamplingParams(temperature=1.5, top_k=7)
    requests = [request(4, params, choice=1), request(6, params), request(4)]
    step = computed(requests, [2, 4, 2], [1, 1, 1], [1, 1, 1], rows(0, 3, 5))
    contexts = [DraftContext(one, NUM_HEADS) for one in requests]
    executable = FakeHeads()
    drafter(executable).propose(step, contexts)
    logits = executable.run(executable.runs[0]).logits
    return requests, step, contexts, logits.reshape(3, NUM_HEADS, VOCAB_SIZE)


def test_drafts_of_sampling_requests_take_the_targets_random_numbers() -> None:
    """Head j drafts the token at `num_tokens + j`, sampled as the target will sample it there."""
    requests, step, contexts, logits = sampled_step()
    found = drafter(FakeHeads(), DraftSampler(SAMPLED)).propose(step, contexts)
    for index, one in enumerate(requests):
        expected = Sampler(SAMPLED).sample(
            [
                SamplingRow(logits[index, head], one.params, 8, one.num_tokens + head, one.choice)
                for head in range(NUM_HEADS)
            ]
        )
        assert list(found[index].token_ids) == expected
    likeliest = logits[:, :, :SAMPLED].argmax(axis=2).tolist()
    assert list(found[2].token_ids) == likeliest[2]
    assert [list(proposal.token_ids) for proposal in found[:2]] != likeliest[:2]


def test_rejection_sampling_gets_the_distribution_of_every_draft() -> None:
    requests, step, contexts, logits = sampled_step()
    sampler = DraftSampler(SAMPLED, returns_probs=True)
    found = drafter(FakeHeads(), sampler).propose(step, contexts)
    for index in range(2):
        probs = found[index].probs
        assert probs is not None
        assert probs.shape == (NUM_HEADS, SAMPLED)
        for head, token in enumerate(found[index].token_ids):
            expected = distribution(logits[index, head, :SAMPLED], requests[index].params)
            np.testing.assert_array_equal(probs[head], expected)
            assert probs[head, token] > 0
    assert found[2].probs is None


@pytest.mark.parametrize("bad_head", [0, 2])
def test_drafts_end_where_the_logits_name_no_token(bad_head: int) -> None:
    class BrokenHeads(FakeHeads):
        def run(self, inputs: StepInputs) -> StepOutputs:
            outputs = super().run(inputs)
            outputs.logits[bad_head] = np.nan
            return outputs

    one = request(4)
    step = computed([one], [2], [1], [1], rows(0))
    found = drafter(BrokenHeads(), DraftSampler(SAMPLED)).propose(step, [DraftContext(one, 3)])
    assert [list(proposal.token_ids) for proposal in found] == [[1, 2, 3][:bad_head]]


def test_copies_of_blocks_do_not_concern_heads_and_close_frees_them() -> None:
    executable = FakeHeads()
    heads = drafter(executable)
    heads.copy_blocks([(1, 2)])
    heads.close()
    assert executable.num_closed == 1
    assert heads.method == "medusa"

"""Rejection sampling in whole engines: what comes out is distributed as without drafts.

A model of six tokens whose logits depend on the last token alone, so that the probability of every
pair of tokens can be written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from octavo.backends.base import AcceptInputs, Float32Array, Int32Array, StepInputs, StepOutputs
from octavo.backends.manifest import Limits
from octavo.graphs.ops.accept import SCHEMA
from octavo.graphs.ops.accept_torch import accept
from octavo.runtime.capacity import EngineLimits
from octavo.runtime.engine import Engine
from octavo.runtime.request import Request
from octavo.runtime.sampling.logits_processors import make_processors
from octavo.runtime.sampling.sampling_params import SamplingParams
from octavo.runtime.speculation.draft_controller import DraftController
from octavo.runtime.speculation.drafter import ComputedStep, DraftContext, Proposal
from octavo.runtime.speculation.speculator import Speculator
from tests.unit.runtime_harness import RecordingExecutable

VOCAB = 6
LIMITS = Limits(max_model_len=32, max_num_seqs=64, max_num_batched_tokens=512, block_size=16)
LOGITS = np.random.default_rng(3).normal(0, 1.2, (VOCAB, VOCAB)).astype(np.float32)
DRAFTER = np.random.default_rng(4).dirichlet(np.ones(VOCAB), VOCAB).astype(np.float32)
COUNT = 20_000
PROMPT = [2]


class Bigrams(RecordingExecutable):
    """Logits [L, V] by the last token; acceptance by the operator's reference."""

    def __init__(self) -> None:
        super().__init__(LIMITS, VOCAB)

    def run(self, inputs: StepInputs) -> StepOutputs:
        return StepOutputs(LOGITS[inputs.token_ids[inputs.logits_indices]])

    def accept(self, inputs: AcceptInputs) -> Int32Array:
        operands = {
            operand.name: torch.from_numpy(getattr(inputs, operand.name))
            for operand in SCHEMA.inputs
        }
        tokens: Int32Array = accept(**operands, vocab=VOCAB).numpy()
        return tokens


class BigramDrafter:
    """Draws from another table, and says so unless it is `certain` of what it has drawn."""

    method = "bigrams"

    def __init__(self, *, certain: bool) -> None:
        self._certain = certain
        self._generator = np.random.default_rng(5)

    def propose(self, step: ComputedStep, contexts: Sequence[DraftContext]) -> list[Proposal]:
        return [self._propose(context) for context in contexts]

    def _propose(self, context: DraftContext) -> Proposal:
        tokens: list[int] = []
        last = context.request.token(context.request.num_tokens - 1)
        probs: list[Float32Array] = []
        for _ in range(context.num_tokens):
            probs.append(DRAFTER[last])
            last = int(self._generator.choice(VOCAB, p=DRAFTER[last] / DRAFTER[last].sum()))
            tokens.append(last)
        return Proposal(tokens, None if self._certain else np.stack(probs))

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """It has no cache."""

    def close(self) -> None:
        """It holds nothing."""


def triples(
    params: dict[str, Any], *, certain: bool, count: int = COUNT
) -> tuple[NDArray[np.float64], float]:
    """[V, V, V]: how often each three first tokens came out of requests, and the acceptance."""
    engine = Engine(
        Bigrams(),
        EngineLimits(**LIMITS.model_dump(), num_kv_blocks=256),
        sampled_vocab_size=VOCAB,
        enable_prefix_caching=False,
        acceptance="rejection",
    )
    drafter = BigramDrafter(certain=certain)
    controller = DraftController({drafter.method: 2}, adaptive=False)
    speculator = Speculator([drafter], controller, engine.limits)
    engine.speculator = speculator
    # The first token comes from the prefill: it is the third and the second that drafts decide.
    sampling = SamplingParams(max_tokens=4, **params)
    requests = []
    for seed in range(count):
        processors = make_processors(
            sampling, eos_token_ids=(), vocab_size=VOCAB, encode=lambda text: ()
        )
        request = Request(
            str(seed), PROMPT, sampling, max_model_len=32, eos_token_ids=(), seed=seed,
            processors=processors,
        )  # fmt: skip
        requests.append(request)
        engine.add_request(request)
    while engine.has_unfinished_requests:
        engine.step()
    counts = np.zeros((VOCAB, VOCAB, VOCAB))
    outputs = np.array([request.output_token_ids[:3] for request in requests])
    np.add.at(counts, tuple(outputs.T), 1)
    return counts, speculator.counts.num_accepted_tokens / speculator.counts.num_draft_tokens


def distribution(history: list[int], params: dict[str, Any]) -> NDArray[np.float64]:
    """f64 [V]: the target's next token after the prompt and `history`, by the parameters' words."""
    logits = LOGITS[[*PROMPT, *history][-1]].astype(np.float64)
    for token in set(history):
        logits[token] -= params.get("frequency_penalty", 0.0) * history.count(token)
        logits[token] -= params.get("presence_penalty", 0.0)
    weights = np.exp((logits - logits.max()) / params.get("temperature", 1.0))
    order = np.argsort(-weights)
    if params.get("top_k"):
        weights[order[params["top_k"] :]] = 0
    weights[weights < params.get("min_p", 0.0)] = 0
    if "top_p" in params:
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= params["top_p"] * weights.sum()]] = 0
    probabilities: NDArray[np.float64] = weights / weights.sum()
    return probabilities


PARAMS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.3},
    "top-p": {"top_p": 0.8},
    "top-k": {"top_k": 3, "temperature": 0.8},
    "min-p": {"min_p": 0.15},
    "penalties": {"frequency_penalty": 0.9, "presence_penalty": 0.4},
}


@pytest.mark.parametrize(
    ("name", "certain"),
    [*((name, False) for name in PARAMS), ("top-k", True), ("penalties", True)],
)
def test_the_next_tokens_have_the_targets_joint_distribution(name: str, certain: bool) -> None:
    """20,000 requests: the first three tokens jointly, two of which drafts had a part in."""
    params = PARAMS[name]
    counts, acceptance = triples(params, certain=certain)
    joint = np.zeros((VOCAB, VOCAB, VOCAB))
    for a, p_a in enumerate(distribution([], params)):
        for b, p_b in enumerate(distribution([a], params)):
            joint[a, b] = p_a * p_b * distribution([a, b], params)
    possible = joint > 0
    assert counts[~possible].sum() == 0
    expected = COUNT * joint
    rare = possible & (expected < 5)
    common = possible & ~rare
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    freedom = int(common.sum())
    if rare.any():
        statistic += (counts[rare].sum() - expected[rare].sum()) ** 2 / expected[rare].sum()
    # Five standard deviations above the mean of a chi-square.
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)
    assert 0.05 < acceptance < 0.95


def test_equal_seeds_give_equal_tokens() -> None:
    first, _ = triples(PARAMS["top-p"], certain=False, count=2_000)
    second, _ = triples(PARAMS["top-p"], certain=False, count=2_000)
    assert (first == second).all()

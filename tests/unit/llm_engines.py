"""Null engines that read text, run to the end, and what their model says, worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.backends.null import expected_next_token
from octavo.runtime.llm_engine import LLMEngine
from octavo.runtime.outputs import RequestOutput
from octavo.runtime.sampling.beam_search import BeamSearchParams
from octavo.runtime.sampling.sampling_params import RequestOutputKind, SamplingParams
from tests.unit.runtime_bundles import VOCAB_SIZE

Params = SamplingParams | BeamSearchParams

# "a" to "z" in the vocabulary of one token a byte: each token is one letter of the text.
LETTERS = tuple(range(64, 90))


def ids(token_ids: Sequence[int], salt: str | None = None) -> dict[str, object]:
    prompt: dict[str, object] = {"prompt_token_ids": list(token_ids)}
    return prompt if salt is None else {**prompt, "cache_salt": salt}


def letters(**params: object) -> SamplingParams:
    """Random letters; what a request gets is all new after each token."""
    options = {"temperature": 1.0, "seed": 5, "allowed_token_ids": LETTERS, **params}
    options.setdefault("output_kind", RequestOutputKind.FINAL_ONLY)
    return SamplingParams(**options)  # type: ignore[arg-type]


def greedy(**params: object) -> SamplingParams:
    options = {"temperature": 0.0, "output_kind": RequestOutputKind.FINAL_ONLY, **params}
    return SamplingParams(**options)  # type: ignore[arg-type]


def run(engine: LLMEngine) -> list[RequestOutput]:
    """Steps until all has ended, then checks that nothing is in use; every output there was."""
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    assert_idle(engine)
    return outputs


def alone(prompt: list[int], count: int) -> list[int]:
    """The greedy continuation of a prompt, by the null backend's arithmetic alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(expected_next_token(tokens, VOCAB_SIZE))
    return tokens[len(prompt) :]


def by_id(outputs: list[RequestOutput]) -> dict[str, list[RequestOutput]]:
    """The outputs of each request, in their order."""
    found: dict[str, list[RequestOutput]] = {}
    for output in outputs:
        found.setdefault(output.request_id, []).append(output)
    return found


def complete(engine: LLMEngine, prompt: Sequence[int], params: Params) -> RequestOutput:
    """The last output of one request that nothing else runs beside."""
    engine.add_request("alone", ids(prompt), params)
    return run(engine)[-1]


def assert_idle(engine: LLMEngine) -> None:
    assert not engine.has_unfinished_requests
    assert not engine.engine.has_unfinished_requests
    pool, cache = engine.engine.pool, engine.engine.prefix_cache
    pinned = 0 if cache is None else cache.num_pinned_blocks
    assert pool.num_available == pool.num_blocks - pinned


def null_logits(tokens: Sequence[int]) -> NDArray[np.float32]:
    """[V] f32: the null model's logits after `tokens`, which fall with the distance to its best."""
    best = expected_next_token(tokens, VOCAB_SIZE)
    distance = ((np.arange(VOCAB_SIZE) - best) % VOCAB_SIZE).astype(np.float32)
    return -0.25 * np.minimum(distance, 40.0) - 1e-3 * distance


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """[V] f64"""
    shifted = logits.astype(np.float64) - float(logits.max())
    return shifted - np.log(np.exp(shifted).sum())  # type: ignore[no-any-return]


def null_logprobs(tokens: Sequence[int]) -> NDArray[np.float64]:
    """[V] f64: the log-probability of every token after `tokens`."""
    return log_softmax(null_logits(tokens))

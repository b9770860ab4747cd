"""Cases of other systems' bug reports about prefix caches, by their ids in this project's list.

P04 by salt is in `test_runtime_pins.py`, P08 in `test_runtime_transaction.py`, P10 in
`tests/backend/test_window_prefixes.py`; the cache alone is in `tests/property/test_block_pool.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.graphs.errors import CapacityError
from octavo.runtime.llm_engine import LLMEngine
from tests.unit.llm_engines import complete, greedy, ids, letters, run
from tests.unit.runtime_bundles import write_text_engine
from tests.unit.runtime_harness import Harness, alone, random_tokens

BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_engine(tmp_path_factory.mktemp("prefix-cases") / "engine")


@pytest.mark.parametrize("length", [8, 9, 11, 12])
def test_p01_a_full_hit_keeps_the_chain_of_blocks(length: int) -> None:
    """The token computed again ends in a block that others go on to find."""
    prompt = random_tokens(length)
    expected = alone(prompt, 30)
    harness = Harness(block_size=BLOCK_SIZE)
    harness.add(prompt, max_tokens=2)
    harness.run()
    hit = harness.add(prompt, max_tokens=10)
    harness.run()
    # All but the last token may be found, of the whole blocks that the first request computed.
    assert hit.num_cached_tokens == min(length - 1, (length + 1) // BLOCK_SIZE * BLOCK_SIZE)
    assert hit.output_token_ids == expected[:10]
    following = harness.add(prompt + expected[:10], max_tokens=20)
    harness.run()
    # The tenth token was never fed.
    assert following.num_cached_tokens == (length + 9) // BLOCK_SIZE * BLOCK_SIZE
    assert following.output_token_ids == expected[10:]


def test_p02_a_hit_gives_what_a_miss_gives(bundle: Path) -> None:
    """Tokens, text and log-probabilities, for beginnings of every length."""
    cold_engine = LLMEngine(bundle, enable_prefix_caching=False)
    engine = LLMEngine(bundle)
    whole = random_tokens(20)
    complete(engine, whole, greedy(max_tokens=1))
    for length in range(1, 20):
        prompt = [*whole[:length], 7]
        params = letters(n=2, max_tokens=6, logprobs=3, seed=length)
        hit = complete(engine, prompt, params)
        assert hit.num_cached_tokens == length
        assert hit.outputs == complete(cold_engine, prompt, params).outputs


def test_p03_a_batch_stopped_by_stop_strings_changes_no_later_answer(bundle: Path) -> None:
    prompts = [random_tokens(13, seed=seed) for seed in range(4)]
    cold_engine = LLMEngine(bundle, enable_prefix_caching=False)
    later = greedy(max_tokens=20, logprobs=1)
    cold = [complete(cold_engine, prompt, later).outputs for prompt in prompts]
    engine = LLMEngine(bundle)
    for index, prompt in enumerate(prompts):
        free = complete(cold_engine, prompt, letters(max_tokens=20)).text
        stop = free[3 + index : 5 + index]
        engine.add_request(str(index), ids(prompt), letters(max_tokens=20, stop=[stop]))
    stopped = run(engine)
    assert [output.outputs[0].finish_reason for output in stopped] == ["stop"] * 4
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), ids(prompt), later)
    answers = {output.request_id: output for output in run(engine)}
    assert [answers[str(index)].num_cached_tokens for index in range(4)] == [12] * 4
    assert [answers[str(index)].outputs for index in range(4)] == cold


def test_p04_p05_equal_hashes_never_hand_out_another_prefix() -> None:
    """A hash that is always the same finds nothing wrong, and what is right as far as it can."""
    harness = Harness(block_size=BLOCK_SIZE)
    assert harness.engine.prefix_cache is not None
    harness.engine.prefix_cache._hash = lambda data: b"the same"
    prompts = [random_tokens(13, seed=seed) for seed in range(3)]
    for prompt, salt, num_cached in (
        (prompts[0], b"", 0),
        (prompts[1], b"", 0),
        (prompts[0], b"a", 0),
        (prompts[0], b"", 4),
        (prompts[2], b"", 0),
        # The same tokens in the second block, after others.
        (prompts[2][:4] + prompts[0][4:], b"", 0),
    ):
        request = harness.add(prompt, 5, salt=salt)
        harness.run()
        assert request.num_cached_tokens == num_cached
        assert request.output_token_ids == alone(prompt, 5)


def test_p11_tokens_computed_again_are_no_hits_in_the_metrics(bundle: Path) -> None:
    engine = LLMEngine(bundle, num_kv_blocks=7, eviction_policy="lru")
    for seed in range(2):
        engine.add_request(str(seed), ids(random_tokens(6, seed=seed)), greedy(max_tokens=18))
    outputs = run(engine)
    assert sum(output.metrics.num_preemptions for output in outputs) >= 1
    metrics = engine.metrics()
    assert (metrics["prefix_cache_queries"], metrics["prefix_cache_hits"]) == (12, 0)
    assert (metrics["prompt_tokens"], metrics["prompt_tokens_cached"]) == (12, 0)


def test_p12_a_prompt_gets_tokens_or_a_refusal(bundle: Path) -> None:
    """Of any length, in a pool of 5 blocks: never an empty answer."""
    engine = LLMEngine(bundle, num_kv_blocks=5, max_num_batched_tokens=7)
    for length in range(1, 30):
        prompt = random_tokens(length)
        # With 3 tokens, of which the last one is not fed, 18 of prompt fill the 20 places.
        if length <= 18:
            (completion,) = complete(engine, prompt, greedy(max_tokens=3)).outputs
            assert len(completion.token_ids) == 3
            assert completion.finish_reason == "length"
        else:
            with pytest.raises(CapacityError, match=f"may reach {length + 3} tokens"):
                engine.add_request("long", ids(prompt), greedy(max_tokens=3))

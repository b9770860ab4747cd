"""Pinned prefixes, resets and salts of the prefix cache, through `LLMEngine`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.graphs.errors import BackendError, CapacityError, QueueFullError, RequestError
from octavo.runtime import LLM
from octavo.runtime.llm_engine import LLMEngine
from octavo.runtime.outputs import RequestOutput
from octavo.runtime.sampling.sampling_params import RequestOutputKind
from tests.unit.llm_engines import assert_idle, complete, greedy, ids, letters, run
from tests.unit.runtime_bundles import write_text_engine
from tests.unit.runtime_harness import random_tokens

BLOCK_SIZE = 4
PREFIX = random_tokens(14)  # 3 full blocks and half of one


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_engine(tmp_path_factory.mktemp("pins") / "engine")


def cached_tokens(engine: LLMEngine, prompt: list[int]) -> int:
    return complete(engine, prompt, greedy(max_tokens=1)).num_cached_tokens


def flood(engine: LLMEngine) -> None:
    """Other prompts that fill the pool more than once."""
    for seed in range(100, 108):
        complete(engine, random_tokens(40, seed=seed), greedy(max_tokens=5))


def test_a_pinned_prefix_outlives_a_flood(bundle: Path) -> None:
    engine = LLMEngine(bundle, num_kv_blocks=20, eviction_policy="lru")
    cold = complete(engine, PREFIX, greedy(max_tokens=5)).outputs
    flood(engine)
    assert cached_tokens(engine, PREFIX) == 0
    pin = engine.pin_prefix(ids(PREFIX))
    assert pin.num_tokens == 12
    assert_idle(engine)
    flood(engine)
    hit = complete(engine, PREFIX, greedy(max_tokens=5))
    assert hit.num_cached_tokens == 12
    assert hit.outputs == cold
    pin.release()
    pin.release()  # once more, harmless
    assert engine.engine.pool.num_available == 20
    flood(engine)
    assert cached_tokens(engine, PREFIX) == 0


def test_two_pins_of_one_prefix_are_released_one_by_one(bundle: Path) -> None:
    engine = LLMEngine(bundle, num_kv_blocks=20, eviction_policy="lru")
    longer, shorter = engine.pin_prefix(ids(PREFIX)), engine.pin_prefix(ids(PREFIX[:9]))
    assert (longer.num_tokens, shorter.num_tokens) == (12, 8)
    assert engine.engine.pool.num_available == 17
    longer.release()
    assert engine.engine.pool.num_available == 18
    flood(engine)
    assert cached_tokens(engine, PREFIX) == 8
    shorter.release()
    assert engine.engine.pool.num_available == 20


def test_no_pin_without_room_for_what_runs(bundle: Path) -> None:
    engine = LLMEngine(bundle, num_kv_blocks=8)
    # 5 blocks once it has all of its 21 tokens, of which the last one is not fed.
    engine.add_request("open", ids(random_tokens(10, seed=4)), greedy(max_tokens=11))
    pins = [engine.pin_prefix(ids(PREFIX))]
    with pytest.raises(
        CapacityError,
        match="4 of the 8 cache blocks would be pinned, and an open request may need 5",
    ):
        engine.pin_prefix(ids(random_tokens(4, seed=2)))
    run(engine)
    # Alone, anything that leaves one block may be pinned.
    pins.append(engine.pin_prefix(ids(random_tokens(16, seed=2))))
    with pytest.raises(CapacityError, match="8 of the 8 cache blocks would be pinned"):
        engine.pin_prefix(ids(random_tokens(4, seed=3)))
    with pytest.raises(
        CapacityError, match="so need 2 cache blocks, the pool has 8 less 7 for pinned prefixes"
    ):
        engine.add_request("large", ids([1] * 4), greedy(max_tokens=2))
    complete(engine, [1, 2], greedy(max_tokens=3))
    for pin in pins:
        pin.release()
    complete(engine, [1] * 4, greedy(max_tokens=20))


def test_what_cannot_be_pinned(bundle: Path) -> None:
    engine = LLMEngine(bundle)
    with pytest.raises(RequestError, match="has 3 tokens and fills no cache block of 4"):
        engine.pin_prefix(ids([1, 2, 3]))
    with pytest.raises(RequestError, match="the prompt is empty"):
        engine.pin_prefix("")
    with pytest.raises(RequestError, match="prefix caching is off"):
        LLMEngine(bundle, enable_prefix_caching=False).pin_prefix(ids(PREFIX))
    assert_idle(engine)


def test_requests_advance_while_a_prefix_is_pinned_and_lose_no_output(bundle: Path) -> None:
    engine = LLMEngine(bundle, max_num_batched_tokens=4)
    prompts = {name: random_tokens(3, seed=seed) for seed, name in enumerate("abc")}
    params = letters(max_tokens=9, output_kind=RequestOutputKind.DELTA)
    cold = {
        name: complete(engine, prompt, letters(max_tokens=9)) for name, prompt in prompts.items()
    }
    for name, prompt in prompts.items():
        engine.add_request(name, ids(prompt), params)
    outputs = [*engine.step(), *engine.step(), *engine.step()]
    seen = len(outputs)
    pin = engine.pin_prefix(ids(PREFIX))
    # The steps of the pin were theirs as well: their tokens wait to be fetched.
    assert engine.has_unfinished_requests
    outputs += engine.step()
    assert len(outputs) >= seen + 6
    outputs += run(engine)
    assert {output.request_id for output in outputs} == set(prompts)
    for name in prompts:
        parts = [output.outputs[0] for output in outputs if output.request_id == name]
        assert [t for part in parts for t in part.token_ids] == cold[name].outputs[0].token_ids
        assert "".join(part.text for part in parts) == cold[name].text
    pin.release()
    assert_idle(engine)


def test_a_request_that_ends_during_a_pin_is_told_after_it(bundle: Path) -> None:
    engine = LLMEngine(bundle, max_num_batched_tokens=4)
    engine.add_request("short", ids([1, 2]), greedy(max_tokens=2))
    engine.step()
    engine.pin_prefix(ids(PREFIX))
    assert not engine.engine.has_unfinished_requests
    assert engine.has_unfinished_requests
    (output,) = engine.step()
    assert (output.request_id, output.finished) == ("short", True)
    assert not engine.has_unfinished_requests


def test_a_failing_step_loses_no_output_of_a_pin(bundle: Path) -> None:
    engine = LLMEngine(bundle, max_num_batched_tokens=4)
    params = letters(max_tokens=30, output_kind=RequestOutputKind.DELTA)
    cold = complete(engine, [1, 2], letters(max_tokens=30))
    engine.add_request("long", ids([1, 2]), params)
    outputs: list[RequestOutput] = []
    executable: Any = engine.engine._executable
    execute = executable.run
    num_runs = 0

    def failing(inputs: object) -> object:
        nonlocal num_runs
        num_runs += 1
        if num_runs in (3, 7):
            raise BackendError("the step failed")
        return execute(inputs)

    executable.run = failing
    with pytest.raises(BackendError):
        engine.pin_prefix(ids(PREFIX))  # two steps ran before
    pin = engine.pin_prefix(ids(PREFIX))
    while engine.has_unfinished_requests:
        try:
            outputs += engine.step()
        except BackendError:
            assert num_runs == 7
    tokens = [t for output in outputs for t in output.outputs[0].token_ids]
    assert tokens == cold.outputs[0].token_ids
    pin.release()
    assert_idle(engine)


def test_an_aborted_request_is_not_heard_of_after_a_pin(bundle: Path) -> None:
    engine = LLMEngine(bundle, max_num_batched_tokens=4)
    params = greedy(max_tokens=30, output_kind=RequestOutputKind.CUMULATIVE)
    for name in ("aborted", "stays"):
        engine.add_request(name, ids([1, 2]), params)
    engine.step()
    engine.pin_prefix(ids(PREFIX))
    assert engine.abort_request("aborted")
    assert {output.request_id for output in engine.step()} == {"stays"}
    assert {output.request_id for output in run(engine)} == {"stays"}


def test_abort_of_a_request_that_ended_unseen(bundle: Path) -> None:
    """Either its end is still told, or the abort has been its end."""
    engine = LLMEngine(bundle, max_num_batched_tokens=4)
    engine.add_request("a", ids([1, 2]), greedy(max_tokens=2))
    engine.step()
    engine.pin_prefix(ids(PREFIX))
    was_aborted = engine.abort_request("a")
    assert [output.finished for output in run(engine)] == ([] if was_aborted else [True])


def test_a_name_is_free_once_its_outputs_are_fetched(bundle: Path) -> None:
    engine = LLMEngine(bundle, max_num_batched_tokens=4)
    engine.add_request("a", ids([1, 2]), greedy(max_tokens=2))
    engine.step()
    engine.pin_prefix(ids(PREFIX))  # "a" has ended meanwhile
    with pytest.raises(RequestError, match="'a' is still open"):
        engine.add_request("a", ids([3, 4]), greedy(max_tokens=2))
    (first,) = engine.step()
    engine.add_request("a", ids([3, 4]), greedy(max_tokens=2))
    (second,) = run(engine)
    assert (first.prompt_token_ids, second.prompt_token_ids) == ([1, 2], [3, 4])


def test_a_pin_whose_computation_fails_raises(bundle: Path) -> None:
    engine = LLMEngine(bundle)
    executable: Any = engine.engine._executable
    execute = executable.run

    def poisoned(inputs: object) -> Any:
        outputs = execute(inputs)
        outputs.logits[:] = np.nan
        return outputs

    executable.run = poisoned
    with pytest.raises(BackendError, match="largest value is nan"):
        engine.pin_prefix(ids(PREFIX))
    executable.run = execute
    assert_idle(engine)
    assert engine.engine.pool.num_available == engine.engine.pool.num_blocks


def test_a_pin_waits_for_nobody(bundle: Path) -> None:
    """It goes before everything that waits, or its caller would wait for strangers."""
    engine = LLMEngine(bundle, max_num_seqs=2)
    for index in range(6):
        engine.add_request(str(index), ids([index, 1]), greedy(max_tokens=4 if index < 2 else 30))
    engine.step()
    pin = engine.pin_prefix(ids(PREFIX))
    assert engine.metrics()["num_requests_waiting"] >= 3
    pin.release()
    run(engine)


def test_a_full_queue_refuses_a_pin(bundle: Path) -> None:
    engine = LLMEngine(bundle, max_num_waiting=1, max_num_seqs=1)
    for name in ("a", "b"):
        engine.add_request(name, ids([1, 2]), greedy(max_tokens=4))
    with pytest.raises(QueueFullError):
        engine.pin_prefix(ids(PREFIX))
    assert [output.request_id for output in run(engine)] == ["a", "b"]


def test_streams_go_on_through_a_pin(bundle: Path) -> None:
    with LLM(bundle, max_num_batched_tokens=4) as llm:
        params = letters(max_tokens=12, output_kind=RequestOutputKind.DELTA)
        whole = llm.generate("hello", letters(max_tokens=12))[0].text
        stream = llm.stream("hello", params)
        text = next(stream).text
        pin = llm.pin_prefix(ids(PREFIX))
        assert llm.generate(ids(PREFIX), greedy(max_tokens=1))[0].num_cached_tokens == 12
        text += "".join(output.text for output in stream)
        assert text == whole
        pin.release()


def test_a_reset_forgets_all_but_pins(bundle: Path) -> None:
    engine = LLMEngine(bundle)
    other = random_tokens(20, seed=1)
    cold = complete(engine, other, greedy(max_tokens=6)).outputs
    assert cached_tokens(engine, other) == 19
    pin = engine.pin_prefix(ids(PREFIX))
    engine.reset_prefix_cache()
    assert cached_tokens(engine, other) == 0
    assert cached_tokens(engine, PREFIX) == 12
    pin.release()
    engine.reset_prefix_cache()
    assert cached_tokens(engine, PREFIX) == 0
    assert complete(engine, other, greedy(max_tokens=6)).outputs == cold


def test_a_reset_leaves_running_requests_alone(bundle: Path) -> None:
    engine = LLMEngine(bundle, max_num_batched_tokens=8)
    params = letters(n=3, max_tokens=9)
    cold = complete(engine, PREFIX, params).outputs
    engine.reset_prefix_cache()
    engine.add_request("runs", ids(PREFIX), params)
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
        engine.reset_prefix_cache()
    assert_idle(engine)
    assert [output.outputs for output in outputs] == [cold]


def test_a_salt_shares_with_its_equals_only(bundle: Path) -> None:
    """P04: what a request finds depends on its own salt, so nobody learns what others asked."""
    engine = LLMEngine(bundle)
    found = []
    for salt in (None, "a", "b", "a", None, "", "b"):
        engine.add_request("salted", ids(PREFIX, salt), greedy(max_tokens=2))
        found.append(run(engine)[-1].num_cached_tokens)
    assert found == [0, 0, 0, 12, 12, 12, 12]


def test_requests_of_different_salts_share_no_block_at_the_same_time(bundle: Path) -> None:
    engine = LLMEngine(bundle)
    engine.add_request("first a", ids(PREFIX, "a"), greedy(max_tokens=9))
    engine.step()
    engine.add_request("b", ids(PREFIX, "b"), greedy(max_tokens=9))
    engine.add_request("again a", ids(PREFIX, "a"), greedy(max_tokens=9))
    engine.step()
    blocks = {r.request_id: r.block_ids for r in engine.engine.scheduler.running}
    assert blocks["again a"][:3] == blocks["first a"][:3]
    assert not set(blocks["b"]) & set(blocks["first a"] + blocks["again a"])
    run(engine)


def test_a_pin_of_one_salt_is_no_hit_for_another(bundle: Path) -> None:
    engine = LLMEngine(bundle)
    pin = engine.pin_prefix(ids(PREFIX, "a"))
    assert cached_tokens(engine, PREFIX) == 0
    engine.add_request("a", ids(PREFIX, "a"), greedy(max_tokens=1))
    assert run(engine)[-1].num_cached_tokens == 12
    pin.release()

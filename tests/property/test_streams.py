"""Streams, calls and pins of one `LLM` in any order: each gets its own, as if it were alone."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.runtime import LLM, SamplingParams
from octavo.runtime.outputs import CompletionOutput, RequestOutput
from octavo.runtime.sampling.beam_search import BeamSearchParams
from octavo.runtime.sampling.sampling_params import RequestOutputKind
from tests.unit.llm_engines import ids, letters
from tests.unit.runtime_bundles import write_text_engine
from tests.unit.runtime_harness import random_tokens

ACTIONS = ("open", "next", "next", "next", "rest", "close", "generate", "beams", "pin", "reset")
NUM_STREAMS = 3
BEAMS = BeamSearchParams(beam_width=2, max_tokens=4)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_engine(tmp_path_factory.mktemp("streams") / "engine")


def prompt(number: int) -> dict[str, object]:
    return ids(random_tokens(5 + 3 * number, seed=number))


def params(number: int, kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY) -> SamplingParams:
    return letters(n=1 + number % 2, max_tokens=6 + number, seed=number, output_kind=kind)


@pytest.fixture(scope="module")
def expected(bundle: Path) -> list[list[CompletionOutput]]:
    with LLM(bundle, enable_prefix_caching=False) as llm:
        sampled = [llm.generate(prompt(n), params(n))[0].outputs for n in range(NUM_STREAMS)]
        return [*sampled, llm.beam_search(prompt(0), BEAMS)[0].outputs]


def texts(outputs: list[RequestOutput], count: int) -> list[str]:
    """Of each completion, from its deltas."""
    found = [""] * count
    for output in outputs:
        for completion in output.outputs:
            found[completion.index] += completion.text
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(ACTIONS), st.integers(0, NUM_STREAMS - 1)), max_size=40
    ),
    num_kv_blocks=st.sampled_from([12, 20, 100]),
    max_num_batched_tokens=st.sampled_from([3, 32]),
)
def test_streams_calls_and_pins_in_any_order(
    bundle: Path,
    expected: list[list[CompletionOutput]],
    actions: list[tuple[str, int]],
    num_kv_blocks: int,
    max_num_batched_tokens: int,
) -> None:
    llm = LLM(bundle, num_kv_blocks=num_kv_blocks, max_num_batched_tokens=max_num_batched_tokens)
    streams: dict[int, Generator[RequestOutput, None, None]] = {}
    seen: dict[int, list[RequestOutput]] = {}
    pins: list[Any] = []

    def check_rest(number: int) -> None:
        seen[number] += streams.pop(number)
        whole = [completion.text for completion in expected[number]]
        assert texts(seen[number], len(whole)) == whole
        assert [output.finished for output in seen[number]].count(True) == 1

    for action, number in [*actions, *(("rest", number) for number in range(NUM_STREAMS))]:
        if action == "open" and number not in streams:
            streams[number] = llm.stream(prompt(number), params(number, RequestOutputKind.DELTA))
            seen[number] = []
        elif action == "next" and number in streams and not any(o.finished for o in seen[number]):
            seen[number].append(next(streams[number]))
        elif action == "rest" and number in streams:
            check_rest(number)
        elif action == "close" and number in streams:
            streams.pop(number).close()
        elif action == "generate":
            (output,) = llm.generate(prompt(number), params(number))
            assert output.outputs == expected[number]
        elif action == "beams":
            assert llm.beam_search(prompt(0), BEAMS)[0].outputs == expected[-1]
        elif action == "pin" and not pins:
            pins.append(llm.pin_prefix(ids(random_tokens(5))))
        elif action == "reset":
            llm.reset_prefix_cache()
            for pin in pins:
                pin.release()
            pins.clear()

    for pin in pins:
        pin.release()
    assert not llm.engine.has_unfinished_requests
    assert llm.engine.pool.num_available == num_kv_blocks
    assert not llm._outputs  # outputs that nobody is going to fetch
    llm.close()

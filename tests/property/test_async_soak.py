"""Thousands of random requests through AsyncLLM on a pool so small that preemption is constant.

Every one ends as it does alone, whatever happens around it: others that are cancelled, refused or
more important, and an engine that is killed three times. Nothing is left, and memory stays flat.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from octavo.backends.manifest import Limits
from octavo.graphs.errors import EngineDeadError, OctavoError
from octavo.runtime import LLM, RequestOutput, SamplingParams
from octavo.runtime.async_llm import AsyncLLM
from octavo.runtime.sampling.beam_search import BeamSearchParams
from octavo.runtime.sampling.sampling_params import RequestOutputKind
from octavo.runtime.serving.options import SupervisionOptions
from tests.unit.runtime_bundles import write_text_engine

SEED = 20260
LIMITS = Limits(max_model_len=128, max_num_seqs=16, max_num_batched_tokens=64, block_size=4)
# The largest request needs 28 blocks alone.
SMALL_POOL = 28
NUM_AT_ONCE = 40
# Bytes that parent and child may have gained over the last 700 requests: a leak of 3 KB a request,
# less than what one is made of, is more.
MEMORY_BOUND = 2 << 20


@dataclass(frozen=True)
class Case:
    prompt: Any
    params: Any  # keyword arguments of SamplingParams, or BeamSearchParams
    priority: int
    cancel_after: int | None  # outputs; 0 leaves before the first one
    expected: RequestOutput | OctavoError = field(repr=False, default=None)  # type: ignore[assignment]


def random_case(rng: random.Random, prefixes: list[list[int]]) -> Case:
    prefix = rng.choice(prefixes)[: rng.randint(0, 24)]
    tail = [rng.randrange(256) for _ in range(rng.randint(0 if prefix else 1, 25))]
    prompt: Any = {"prompt_token_ids": prefix + tail}
    if rng.random() < 0.1:
        prompt["cache_salt"] = rng.choice("ab")
    elif rng.random() < 0.1:
        prompt = "".join(rng.choice("abc \u00e9\U0001f600") for _ in range(rng.randint(1, 10)))
    params: Any = random_params(rng)
    if rng.random() < 0.06:
        prompt, params = random_mistake(rng, prompt, params)
    return Case(
        prompt=prompt,
        params=params,
        priority=rng.choice([0, 0, 0, 1, 2, -1]),
        cancel_after=rng.choice([0, 1, 2, 5]) if rng.random() < 0.2 else None,
    )


def random_params(rng: random.Random) -> Any:
    if rng.random() < 0.03:
        return BeamSearchParams(beam_width=rng.randint(1, 3), max_tokens=rng.randint(1, 6))
    params: dict[str, Any] = {"max_tokens": rng.choice([1, 4, 12, 24, 40, 60])}
    if rng.random() < 0.5:
        params["temperature"] = 0.0
    else:
        params["seed"] = rng.getrandbits(64)
        params["temperature"] = rng.choice([0.5, 1.0, 2.0])
        params["n"] = rng.choice([1, 1, 1, 2, 3])
        params["top_p"] = rng.choice([1.0, 0.9])
        params["top_k"] = rng.choice([0, 20])
    if rng.random() < 0.2:
        params["stop"] = rng.sample("abcdefgh0123456789 -", 4)
    if rng.random() < 0.2:
        params["stop_token_ids"] = rng.sample(range(257), 12)
    if rng.random() < 0.1:
        params["logprobs"] = rng.randint(0, 3)
    if rng.random() < 0.05:
        params["prompt_logprobs"] = 1
    if rng.random() < 0.1:
        params["repetition_penalty"] = 1.3
        params["min_tokens"] = 1
    params["output_kind"] = rng.choice(list(RequestOutputKind))
    return params


def random_mistake(rng: random.Random, prompt: Any, params: Any) -> tuple[Any, Any]:
    mistakes: list[tuple[Any, Any]] = [
        ({"prompt_token_ids": [300]}, params),
        ({"prompt_token_ids": [1] * 128}, params),
        ("", params),
        (prompt, {"max_tokens": 0}),
        (prompt, {"logit_bias": {5000: 1.0}}),
        ({"prompt_token_ids": [1] * 60}, BeamSearchParams(beam_width=3, max_tokens=60)),
    ]
    return rng.choice(mistakes)


def params_of(case: Case) -> SamplingParams | BeamSearchParams:
    """Raises RequestError where the mistake is in the parameters alone."""
    return SamplingParams(**case.params) if isinstance(case.params, dict) else case.params


def alone(llm: LLM, case: Case) -> RequestOutput | OctavoError:
    try:
        params = params_of(case)
        if isinstance(params, BeamSearchParams):
            return llm.beam_search(case.prompt, params)[0]
        return llm.generate(case.prompt, params)[0]
    except OctavoError as error:
        return error


def make_cases(engine: Path, count: int) -> list[Case]:
    rng = random.Random(SEED)
    prefixes = [[rng.randrange(256) for _ in range(24)] for _ in range(6)]
    with LLM(engine, num_kv_blocks=SMALL_POOL) as small, LLM(engine, num_kv_blocks=1000) as large:
        cases = []
        for _ in range(count):
            case = random_case(rng, prefixes)
            # Wide beams may be refused: the small pool never holds them.
            llm = small if isinstance(case.params, BeamSearchParams) else large
            cases.append(replace(case, expected=alone(llm, case)))
    return cases


class Soak:
    """One run of all cases; counts what happened to them."""

    def __init__(self, llm: AsyncLLM, cases: list[Case]) -> None:
        self.llm = llm
        self.cases = cases
        self.counts: Counter[str] = Counter()
        self.num_done = 0
        self.may_submit = asyncio.Event()
        self.may_submit.set()
        self._open: set[int] = set()
        self._lost: set[int] = set()  # open when an engine was killed, and not told so yet
        self._slots = asyncio.Semaphore(NUM_AT_ONCE)

    async def run(self, numbers: range) -> None:
        async with asyncio.TaskGroup() as group:
            for number in numbers:
                await self._slots.acquire()
                await self.may_submit.wait()
                task = group.create_task(self._submit(number))
                task.add_done_callback(lambda _: self._slots.release())

    async def kill_engine(self) -> None:
        """Only what is open now may be lost."""
        self.may_submit.clear()
        (child,) = psutil.Process().children()
        self._lost |= self._open
        self.counts["open when killed"] += len(self._open)
        os.kill(child.pid, signal.SIGKILL)
        while self.llm.is_healthy and psutil.Process().children() == [child]:
            await asyncio.sleep(0.001)
        self.may_submit.set()

    async def _submit(self, number: int) -> None:
        while True:
            self._open.add(number)
            try:
                await self._check(number)
                break
            except EngineDeadError as error:
                if number not in self._lost or "was killed by signal 9" not in str(error):
                    raise  # it was not open, or ended for another reason
                self._lost.remove(number)
                self.counts["resubmitted"] += 1
            finally:
                self._open.discard(number)
        self._lost.discard(number)
        self.num_done += 1

    async def _check(self, number: int) -> None:
        case = self.cases[number]
        expected = case.expected
        if isinstance(expected, OctavoError):
            with pytest.raises(type(expected)) as caught:
                await self._read(replace(case, cancel_after=None), params_of(case))
            assert str(caught.value) == str(expected)
            self.counts["refused"] += 1
            return
        params = params_of(case)
        output = await self._read(case, params)
        if output is None:
            self.counts["cancelled"] += 1
            return
        assert output.finished
        assert comparable(output) == comparable(expected), case
        self.counts[str(output.outputs[0].finish_reason)] += 1

    async def _read(self, case: Case, params: Any) -> RequestOutput | None:
        """The whole output; None if it was left before it was."""
        stream = self.llm.generate(case.prompt, params, priority=case.priority)
        joined: RequestOutput | None = None
        count = 0
        if case.cancel_after == 0:
            task = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                return None
            raise task.exception() or AssertionError("it ended at once")
        async with aclosing(stream):
            async for output in stream:
                assert joined is None or not joined.finished
                joined = output if not is_delta(params) else join(joined, output)
                count += 1
                if count == case.cancel_after and not output.finished:
                    assert_begins(case.expected, joined)
                    return None
        return joined


def is_delta(params: Any) -> bool:
    return getattr(params, "output_kind", None) is RequestOutputKind.DELTA


def join(before: RequestOutput | None, delta: RequestOutput) -> RequestOutput:
    completions = {} if before is None else {one.index: one for one in before.outputs}
    for completion in delta.outputs:
        old = completions.get(completion.index)
        if old is not None:
            completion = replace(
                completion,
                text=old.text + completion.text,
                token_ids=old.token_ids + completion.token_ids,
                logprobs=None
                if completion.logprobs is None
                else (old.logprobs or []) + completion.logprobs,
            )
        completions[completion.index] = completion
    prompt_logprobs = delta.prompt_logprobs
    if prompt_logprobs is None and before is not None:
        prompt_logprobs = before.prompt_logprobs
    outputs = [completions[index] for index in sorted(completions)]
    return replace(delta, outputs=outputs, prompt_logprobs=prompt_logprobs)


def comparable(output: RequestOutput) -> RequestOutput:
    return replace(output, request_id="", num_cached_tokens=0, metrics=None)  # type: ignore[arg-type]


def assert_begins(expected: RequestOutput | OctavoError, output: RequestOutput) -> None:
    assert isinstance(expected, RequestOutput)
    for completion in output.outputs:
        whole = expected.outputs[completion.index]
        assert whole.token_ids[: len(completion.token_ids)] == completion.token_ids
        assert whole.text.startswith(completion.text)


def resident_memory() -> Counter[str]:
    """Bytes of this process and of its engine's."""
    parent = psutil.Process()
    children = parent.children()
    return Counter(
        parent=parent.memory_info().rss, child=sum(c.memory_info().rss for c in children)
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_engine(tmp_path_factory.mktemp("soak") / "engine", limits=LIMITS)


def soak_options(mode: Literal["thread", "process"]) -> dict[str, Any]:
    return {
        "engine": mode,
        "num_kv_blocks": SMALL_POOL,
        "scheduling_policy": "priority",
        "max_num_partial_prefills": 2,
        "supervision": SupervisionOptions(restart_delay=0.01),
    }


async def assert_idle(llm: AsyncLLM) -> dict[str, Any]:
    metrics = await llm.metrics()
    assert metrics["num_requests_running"] == metrics["num_requests_waiting"] == 0
    assert metrics["kv_cache_usage_perc"] == 0
    return metrics


def test_soak_of_the_engine_process(engine: Path) -> None:
    cases = make_cases(engine, 2000)

    async def test() -> None:
        async with AsyncLLM(engine, **soak_options("process")) as llm:
            soak = Soak(llm, cases)

            async def kill_three_times() -> None:
                for count in (200, 500, 800):
                    while soak.num_done < count:
                        await asyncio.sleep(0.002)
                    await soak.kill_engine()

            killer = asyncio.create_task(kill_three_times())
            await soak.run(range(1300))
            await killer
            before = resident_memory()
            await soak.run(range(1300, 2000))
            metrics = await assert_idle(llm)
            gained = resident_memory() - before
            assert soak.num_done == 2000
            assert 3 * 5 <= soak.counts["open when killed"] <= 3 * NUM_AT_ONCE
            assert 3 <= soak.counts["resubmitted"] <= soak.counts["open when killed"]
            assert min(soak.counts[one] for one in ("refused", "cancelled", "stop", "length")) > 80
            assert metrics["num_preemptions"] > 500
            assert gained["parent"] < MEMORY_BOUND
            assert gained["child"] < MEMORY_BOUND

    asyncio.run(test())


def test_soak_of_the_engine_thread(engine: Path) -> None:
    cases = make_cases(engine, 300)

    async def test() -> None:
        async with AsyncLLM(engine, **soak_options("thread")) as llm:
            soak = Soak(llm, cases)
            await soak.run(range(300))
            metrics = await assert_idle(llm)
            assert soak.num_done == 300
            assert metrics["num_preemptions"] > 50

    asyncio.run(test())

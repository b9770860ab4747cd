"""AsyncLLM on null engines: the same in a thread and in a process, and the same as LLM."""

from __future__ import annotations

import asyncio
import gc
import shutil
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from octavo.backends.null.executable import NullExecutable
from octavo.graphs.errors import (
    BackendError,
    BundleError,
    CapacityError,
    EngineClosedError,
    EngineDeadError,
    OctavoError,
    QueueFullError,
    RequestError,
)
from octavo.runtime import LLM, RequestOutput, SamplingParams
from octavo.runtime.async_llm import AsyncLLM
from octavo.runtime.sampling.beam_search import BeamSearchParams
from octavo.runtime.sampling.sampling_params import RequestOutputKind
from tests.unit.async_harness import (
    assert_idle,
    collect,
    comparable,
    first,
    ids,
    last,
    leaves_nothing,
    run,
    write_long_engine,
)

Mode = Literal["thread", "process"]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
LONG = SamplingParams(temperature=0, max_tokens=4000)
DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_long_engine(tmp_path_factory.mktemp("async") / "engine")


@pytest.fixture(scope="module")
def llm(engine: Path) -> Iterator[LLM]:
    with LLM(engine) as loaded:
        yield loaded


@pytest.fixture(params=["thread", "process"])
def mode(request: pytest.FixtureRequest) -> Mode:
    mode: Mode = request.param
    return mode


@pytest.fixture(autouse=True)
def _leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with leaves_nothing(monkeypatch):
        yield


SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 12},
    "seeded": {"seed": 7, "temperature": 1.5, "max_tokens": 20},
    "several completions": {"n": 3, "seed": 2**64 - 1, "max_tokens": 9},
    "the best of some": {"n": 2, "best_of": 4, "seed": 3, "max_tokens": 6},
    "log-probabilities": {"logprobs": 3, "prompt_logprobs": 2, "seed": 1, "n": 2, "max_tokens": 5},
    "all log-probabilities": {"logprobs": -1, "temperature": 0, "max_tokens": 3},
    "stop texts": {"stop": ["0", "a", "\ud800"], "seed": 5, "max_tokens": 200},
    "stop text shown": {"stop": "e", "include_stop_str_in_output": True, "seed": 6},
    "stop ids": {"stop_token_ids": list(range(0, 257, 5)), "seed": 8, "max_tokens": 100},
    "edited logits": {
        "logit_bias": {"65": 50.0, 66: 49.5},
        "repetition_penalty": 1.3,
        "allowed_token_ids": range(60, 80),
        "bad_words": ["AB"],
        "min_tokens": 4,
        "seed": 1,
    },
    "huge numbers": {"top_k": 10**30, "max_tokens": 10**30, "seed": 1, "stop_token_ids": [3]},
    "no text": {"detokenize": False, "seed": 4},
}


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_streams_end_with_what_generate_returns(
    engine: Path, llm: LLM, mode: Mode, kind: RequestOutputKind
) -> None:
    async def test() -> None:
        async with AsyncLLM(engine, engine=mode) as async_llm:
            for name, options in SAMPLED.items():
                if kind is DELTA and "best_of" in options:
                    continue
                (expected,) = llm.generate("abc", SamplingParams(**options))
                params = SamplingParams(**options, output_kind=kind)
                outputs = await collect(async_llm, "abc", params)
                assert [output.finished for output in outputs][-1:] == [True], name
                whole = _joined(outputs) if kind is DELTA else outputs[-1]
                assert comparable(whole) == comparable(expected), name
                assert len(outputs) == 1 or kind is not FINAL_ONLY
                if kind is RequestOutputKind.CUMULATIVE:
                    _assert_grows(outputs)
            await assert_idle(async_llm)

    run(test())


def _joined(deltas: list[RequestOutput]) -> RequestOutput:
    """What a reader of deltas makes of them."""
    completions: dict[int, Any] = {}
    prompt_logprobs = [d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None]
    assert len(prompt_logprobs) <= 1
    for delta in deltas:
        for completion in delta.outputs:
            before = completions.get(completion.index)
            if before is not None:
                logprobs = None
                if completion.logprobs is not None:
                    logprobs = before.logprobs + completion.logprobs
                completion = replace(
                    completion,
                    text=before.text + completion.text,
                    token_ids=before.token_ids + completion.token_ids,
                    logprobs=logprobs,
                )
            completions[completion.index] = completion
    return replace(
        deltas[-1],
        outputs=[completions[index] for index in sorted(completions)],
        prompt_logprobs=prompt_logprobs[0] if prompt_logprobs else None,
    )


def _assert_grows(outputs: list[RequestOutput]) -> None:
    final = outputs[-1].outputs
    for output in outputs:
        assert len(output.outputs) == len(final)
        for completion, whole in zip(output.outputs, final, strict=True):
            assert whole.text.startswith(completion.text)
            assert whole.token_ids[: len(completion.token_ids)] == completion.token_ids
            assert completion.logprobs is None or len(completion.logprobs) == len(
                completion.token_ids
            )


def test_beam_search(engine: Path, llm: LLM, mode: Mode) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=0.5)
    (expected,) = llm.beam_search("abc", params)

    async def test() -> None:
        async with AsyncLLM(engine, engine=mode) as async_llm:
            (output,) = await collect(async_llm, "abc", params)
            assert comparable(output) == comparable(expected)
            assert [one.score for one in output.outputs] == [one.score for one in expected.outputs]

    run(test())


def test_many_requests_at_once_give_what_each_gives_alone(
    engine: Path, llm: LLM, mode: Mode
) -> None:
    prompts = [ids(*range(1, 2 + number % 23)) for number in range(40)]
    params = [
        SamplingParams(seed=number, temperature=1.2, max_tokens=1 + number, n=1 + number % 2)
        for number in range(40)
    ]
    expected = llm.generate(prompts, params)

    async def test() -> None:
        async with AsyncLLM(engine, engine=mode, num_kv_blocks=300) as async_llm:
            pairs = zip(prompts, params, strict=True)
            outputs = await asyncio.gather(*(last(async_llm, *pair) for pair in pairs))
            assert [comparable(one) for one in outputs] == [comparable(one) for one in expected]
            assert len({output.request_id for output in outputs}) == 40
            await assert_idle(async_llm)

    run(test())


def test_metrics_and_times_come_along(engine: Path, mode: Mode) -> None:
    async def test() -> None:
        async with AsyncLLM(engine, engine=mode) as llm:
            output = await last(llm, ids(*range(40)), GREEDY)
            assert output.metrics.total_time is not None
            assert output.metrics.time_to_first_token is not None
            assert output.metrics.total_time >= output.metrics.time_to_first_token > 0
            again = await last(llm, ids(*range(40)), GREEDY)
            assert again.num_cached_tokens == again.metrics.num_cached_tokens == 32
            await llm.reset_prefix_cache()
            assert (await last(llm, ids(*range(40)), GREEDY)).num_cached_tokens == 0
            metrics = await llm.metrics()
            assert metrics["generation_tokens"] == 24
            assert metrics["request_success"] == {"stop": 0, "length": 3, "abort": 0, "error": 0}

    run(test())


@pytest.mark.parametrize("num_outputs", [0, 1, 2, 20])
def test_leaving_a_stream_frees_its_blocks_at_once(
    engine: Path, mode: Mode, num_outputs: int
) -> None:
    """By break, aclose and cancellation, before the first output and after some.

    A18: with n > 1 and log-probabilities too.
    """

    async def leave_by_break(llm: AsyncLLM) -> None:
        count = 0
        async with aclosing(llm.generate("ab", LONG)) as stream:
            async for _ in stream:
                count += 1
                if count >= num_outputs:
                    break

    async def leave_by_cancelling(llm: AsyncLLM) -> None:
        taken = asyncio.Event()
        count = 0

        async def read() -> None:
            nonlocal count
            params = SamplingParams(n=2, seed=1, max_tokens=4000, logprobs=2, prompt_logprobs=1)
            async for _ in llm.generate("ab", params):
                count += 1
                if count >= num_outputs:
                    taken.set()

        task = asyncio.create_task(read())
        if num_outputs:
            await taken.wait()
        else:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test() -> None:
        async with AsyncLLM(engine, engine=mode, num_kv_blocks=1100) as llm:
            neighbour = await first(llm, "zz", LONG)
            for _ in range(3):
                await leave_by_break(llm)
                await leave_by_cancelling(llm)
            assert (await llm.metrics())["num_requests_running"] == 1
            await neighbour.aclose()
            await assert_idle(llm)
            assert (await last(llm, "ab", GREEDY)).finished

    run(test())


def test_a_generator_that_is_never_read_queues_nothing(engine: Path, mode: Mode) -> None:
    async def test() -> None:
        async with AsyncLLM(engine, engine=mode) as llm:
            await llm.generate("ab", GREEDY).aclose()
            stream = llm.generate("ab", LONG)
            await anext(stream)
            del stream  # dropped, not closed: the event loop closes it, a few turns later
            for _ in range(5):
                await asyncio.sleep(0)
            await assert_idle(llm)

    run(test())


def test_a_slow_reader_holds_up_nobody_and_gets_the_rest_at_once(
    engine: Path, llm: LLM, mode: Mode
) -> None:
    params = SamplingParams(seed=1, max_tokens=300, n=2, output_kind=DELTA)
    (expected,) = llm.generate("slow", SamplingParams(seed=1, max_tokens=300, n=2))

    async def test() -> None:
        async with AsyncLLM(engine, engine=mode) as async_llm:
            stream = async_llm.generate("slow", params)
            outputs = [await anext(stream)]
            fast = await collect(async_llm, "ab", GREEDY)
            assert fast[-1].finished
            assert await async_llm.drain()  # the request itself has ended long before its reader
            outputs += [output async for output in stream]
            assert len(outputs) == 2
            assert comparable(_joined(outputs)) == comparable(expected)

    run(test())


def test_abort_by_id_ends_the_stream(engine: Path, mode: Mode) -> None:
    async def test() -> None:
        async with AsyncLLM(engine, engine=mode) as llm:
            stream = await first(llm, "ab", LONG, request_id="mine")
            with pytest.raises(
                RequestError,
                match=r"a request with the id 'mine' is still open: give each its own id",
            ):
                await last(llm, "ab", GREEDY, request_id="mine")
            assert await llm.abort("mine")
            outputs = [output async for output in stream]
            assert outputs[-1].finished
            assert outputs[-1].outputs[0].finish_reason == "abort"
            assert 1 <= len(outputs[-1].outputs[0].token_ids) < 4000
            assert not await llm.abort("mine")
            await assert_idle(llm)
            again = await last(llm, "ab", GREEDY, request_id="mine")  # free again
            assert again.request_id == "mine"
            # One that has shown nothing yet.
            params = SamplingParams(n=2, seed=1, max_tokens=4000, output_kind=FINAL_ONLY)
            task = asyncio.create_task(collect(llm, "ab", params, request_id="quiet"))
            await asyncio.sleep(0.05)
            assert await llm.abort("quiet")
            (output,) = await task
            assert [one.finish_reason for one in output.outputs] == ["abort", "abort"]
            await assert_idle(llm)

    run(test())


def test_draining_finishes_what_is_open_and_refuses_the_rest(engine: Path, mode: Mode) -> None:
    async def test() -> None:
        async with AsyncLLM(engine, engine=mode) as llm:
            await last(llm, "ab", GREEDY)
            task = asyncio.create_task(last(llm, "ab", LONG))
            await asyncio.sleep(0.05)
            assert not await llm.drain(timeout=0)
            with pytest.raises(EngineClosedError, match="the AsyncLLM is draining and takes no"):
                await last(llm, "ab", GREEDY)
            assert await llm.drain()
            output = await task
            assert output.finished
            assert len(output.outputs[0].token_ids) == 4000
            assert llm.is_healthy
            assert await llm.drain()

    run(test())


def test_shutdown_ends_open_requests(engine: Path, mode: Mode) -> None:
    async def test() -> None:
        llm = AsyncLLM(engine, engine=mode)
        stream = await first(llm, "ab", LONG)
        waiting = asyncio.create_task(last(llm, "zz", LONG))
        await asyncio.sleep(0)
        await llm.shutdown()
        for pending in (_read_to_the_end(stream), waiting):
            with pytest.raises(EngineClosedError, match="shut down while the request was running"):
                await pending
        with pytest.raises(EngineClosedError, match="the AsyncLLM is shut down: make another one"):
            await last(llm, "ab", GREEDY)
        with pytest.raises(EngineClosedError):
            await llm.check_health()
        await llm.shutdown()

    run(test())


def test_never_started(engine: Path, mode: Mode) -> None:
    async def test() -> None:
        llm = AsyncLLM(engine, engine=mode)
        assert not llm.is_healthy
        with pytest.raises(OctavoError, match="before it is started"):
            llm.get_tokenizer()
        assert not await llm.abort("x")
        await llm.shutdown()
        with pytest.raises(EngineClosedError, match="shut down before it was started"):
            await last(llm, "ab", GREEDY)

    AsyncLLM(engine, engine=mode)
    run(test())


def test_shutting_down_while_it_starts(engine: Path, mode: Mode) -> None:
    async def test() -> None:
        llm = AsyncLLM(engine, engine=mode)
        tasks = [asyncio.create_task(llm.start()) for _ in range(3)]
        await asyncio.sleep(0)
        await llm.shutdown()
        await asyncio.wait(tasks)
        for task in tasks:  # one that was quick has started it
            assert isinstance(task.exception(), EngineClosedError | None)
        with pytest.raises(EngineClosedError):
            await last(llm, "ab", GREEDY)

    run(test())


def test_a_forgotten_one_ends_by_itself_and_serves_several_event_loops(
    engine: Path, mode: Mode
) -> None:
    llm = AsyncLLM(engine, engine=mode)
    assert run(last(llm, "ab", GREEDY)).finished
    stream = run(first(llm, "ab", LONG))  # the loop closes its generators when it ends
    assert run(last(llm, "ab", GREEDY)).finished
    run(assert_idle(llm))
    del llm, stream
    gc.collect()


def test_the_tokenizer_is_the_parents_own(engine: Path, llm: LLM, mode: Mode) -> None:
    messages = [{"role": "user", "content": "hi"}]

    async def test() -> None:
        async with AsyncLLM(engine, engine=mode) as async_llm:
            assert async_llm.get_tokenizer().encode("abc") == llm.get_tokenizer().encode("abc")
            prompt = async_llm.chat_prompt(messages)
            assert prompt == llm.chat_prompt(messages)
            output = await last(async_llm, prompt, GREEDY)
            assert comparable(output) == comparable(llm.chat(messages, GREEDY)[0])

    run(test())


BAD_REQUESTS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "no text": ("", lambda: GREEDY),
    "no tokens": ({"prompt_token_ids": []}, lambda: GREEDY),
    "no prompt": (5, lambda: GREEDY),
    "unknown key": ({"text": "a"}, lambda: GREEDY),
    "id outside": (ids(1, 257), lambda: GREEDY),
    "id negative": (ids(-1), lambda: GREEDY),
    "id of a wrong kind": ({"prompt_token_ids": ["a"]}, lambda: GREEDY),
    "lone surrogate": ("a\ud800", lambda: GREEDY),
    "salt": ({"prompt_token_ids": [1], "cache_salt": 3}, lambda: GREEDY),
    "too long": (ids(*[1] * 4096), lambda: GREEDY),
    "no params": ("ab", lambda: {"max_tokens": 3}),
    "NaN": ("ab", lambda: SamplingParams(top_p=float("nan"))),
    "bias outside": ("ab", lambda: SamplingParams(logit_bias={257: 1.0})),
    "huge bias id": ("ab", lambda: SamplingParams(logit_bias={10**25: 1.0})),
    "stop id outside": ("ab", lambda: SamplingParams(stop_token_ids=[300])),
    "bad word": ("ab", lambda: SamplingParams(bad_words=["\ud800"])),
    "too many logprobs": ("ab", lambda: SamplingParams(logprobs=258)),
    "too wide beams": ("ab", lambda: BeamSearchParams(beam_width=9, max_tokens=2)),
    "beam stop id": (
        "ab",
        lambda: BeamSearchParams(beam_width=2, max_tokens=2, stop_token_ids=[300]),
    ),
    "too large for the cache": ("ab", lambda: SamplingParams(max_tokens=3000)),
}


def test_bad_requests_are_refused_as_llm_does(engine: Path, mode: Mode) -> None:
    """Alone, and beside good ones, which they do not touch. A01, A02, A04, A11."""
    expected = {}
    with LLM(engine, num_kv_blocks=60) as llm:
        good = comparable(llm.generate("good", GREEDY)[0])
        for name, (prompt, params) in BAD_REQUESTS.items():
            with pytest.raises(OctavoError) as caught:
                llm_stream(llm, prompt, params)
            expected[name] = (type(caught.value), str(caught.value))

    async def test() -> None:
        async with AsyncLLM(engine, engine=mode, num_kv_blocks=60) as async_llm:

            async def attempt(name: str) -> None:
                prompt, params = BAD_REQUESTS[name]
                with pytest.raises(OctavoError) as caught:
                    await last(async_llm, prompt, params())
                assert (type(caught.value), str(caught.value)) == expected[name]

            for name in BAD_REQUESTS:
                await attempt(name)
            with pytest.raises(RequestError, match=r"priority is 'x', it must be an integer"):
                await last(async_llm, "ab", GREEDY, priority="x")
            with pytest.raises(RequestError, match=r"request_id is 5, it must be a text"):
                await last(async_llm, "ab", GREEDY, request_id=5)
            tasks = [asyncio.create_task(last(async_llm, "good", GREEDY)) for _ in range(6)]
            await asyncio.gather(*map(attempt, BAD_REQUESTS))
            for output in await asyncio.gather(*tasks):
                assert comparable(output) == good
            await assert_idle(async_llm)

    run(test())


def llm_stream(llm: LLM, prompt: Any, params: Callable[[], Any]) -> None:
    for _ in llm.stream(prompt, params()):
        pass


def test_a_full_queue_refuses(engine: Path, mode: Mode) -> None:
    async def test() -> None:
        options: dict[str, Any] = {"max_num_seqs": 1, "max_num_waiting": 2}
        async with AsyncLLM(engine, engine=mode, **options) as llm:
            running = await first(llm, "ab", LONG)
            tasks = [asyncio.create_task(last(llm, "ab", GREEDY)) for _ in range(5)]
            while (await llm.metrics())["admission_rejections"] < 3:
                await asyncio.sleep(0.005)
            await running.aclose()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            refusals = [str(error) for error in results if isinstance(error, QueueFullError)]
            assert refusals == ["2 requests are waiting, max_num_waiting is 2: try again later"] * 3
            served = [one for one in results if isinstance(one, RequestOutput)]
            assert [one.finished for one in served] == [True] * 2
            assert (await llm.metrics())["admission_rejections"] == 3
            assert (await last(llm, "ab", GREEDY)).finished

    run(test())


def test_as_many_requests_are_open_as_may(engine: Path, mode: Mode) -> None:
    async def test() -> None:
        async with AsyncLLM(engine, engine=mode, max_open_requests=2) as llm:
            streams = [await first(llm, "ab", LONG) for _ in range(2)]
            with pytest.raises(QueueFullError, match="2 requests are open, max_open_requests is 2"):
                await last(llm, "ab", GREEDY)
            await streams[0].aclose()
            assert (await last(llm, "ab", GREEDY)).finished
            await streams[1].aclose()
            assert (await llm.metrics())["admission_rejections"] == 1

    run(test())


def test_logits_processors_need_the_thread(engine: Path, mode: Mode) -> None:
    def favour_three(row: Any) -> None:
        row.assign([3], [1e4])

    params = SamplingParams(logits_processors=[favour_three], temperature=0, max_tokens=4)

    async def test() -> None:
        async with AsyncLLM(engine, engine=mode) as llm:
            if mode == "thread":
                assert (await last(llm, "ab", params)).outputs[0].token_ids == [3] * 4
                return
            with pytest.raises(
                RequestError,
                match="logits_processors are given, which cannot be sent to the engine's process",
            ):
                await last(llm, "ab", params)

    run(test())


def test_a_failed_step_ends_what_is_open_and_the_next_requests_work(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the thread; the same loop runs in the process."""
    run_step = NullExecutable.run
    broken = False

    def step(self: NullExecutable, inputs: Any) -> Any:
        if broken:
            raise BackendError("the device is gone")
        return run_step(self, inputs)

    monkeypatch.setattr(NullExecutable, "run", step)

    async def test() -> None:
        nonlocal broken
        async with AsyncLLM(engine, engine="thread") as llm:
            streams = [await first(llm, "ab", LONG) for _ in range(3)]
            broken = True
            for stream in streams:
                with pytest.raises(BackendError, match="the device is gone"):
                    await _read_to_the_end(stream)
            broken = False
            assert (await last(llm, "ab", GREEDY)).finished
            await assert_idle(llm)
            broken = True
            for _ in range(2):
                with pytest.raises(BackendError, match="the device is gone"):
                    await last(llm, "ab", GREEDY)
            cause = "the engine thread died of BackendError: the device is gone"
            with pytest.raises(EngineDeadError, match=f"{cause} while the request was running"):
                await last(llm, "ab", GREEDY)
            with pytest.raises(EngineDeadError, match=f"{cause}: make another AsyncLLM"):
                await last(llm, "ab", GREEDY)
            with pytest.raises(EngineDeadError, match=cause):
                await llm.check_health()

    run(test())


async def _read_to_the_end(stream: Any) -> None:
    async for _ in stream:
        pass


def test_a_pin_that_nobody_waits_for_is_released(engine: Path, mode: Mode) -> None:
    async def test() -> None:
        async with AsyncLLM(engine, engine=mode) as llm:
            task = asyncio.create_task(llm.pin_prefix(ids(*range(64))))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await llm.reset_prefix_cache()
            assert (await last(llm, ids(*range(80)), GREEDY)).num_cached_tokens == 0

    run(test())


def test_errors_of_loading_are_those_of_llm(engine: Path, mode: Mode, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(engine, broken)
    (broken / "model.null").write_text("something else")

    async def starting(path: Path, **options: Any) -> OctavoError:
        llm = AsyncLLM(path, engine=mode, **options)
        with pytest.raises(OctavoError) as caught:
            await llm.start()
        with pytest.raises(type(caught.value)):
            await last(llm, "ab", GREEDY)
        assert not llm.is_healthy
        await llm.shutdown()
        return caught.value

    for path, options, kind in (
        (broken, {}, BundleError),
        (engine, {"num_threads": 0}, (RequestError, CapacityError)),
        (engine, {"max_num_seqs": 9}, CapacityError),
        (engine, {"kv_cache_memory": "lots"}, RequestError),
    ):
        with pytest.raises(kind) as expected:
            LLM(path, **options)
        error = run(starting(path, **options))
        assert (type(error), str(error)) == (type(expected.value), str(expected.value))


def test_options_are_checked_at_once(engine: Path) -> None:
    with pytest.raises(RequestError, match='engine is \'x\', it must be "process" or "thread"'):
        AsyncLLM(engine, engine="x")  # type: ignore[arg-type]
    with pytest.raises(OctavoError, match="max_open_requests"):
        AsyncLLM(engine, max_open_requests=0)
    with pytest.raises(RequestError, match="cannot be sent to the engine's process"):
        AsyncLLM(engine, eviction_policy=object())  # type: ignore[arg-type]

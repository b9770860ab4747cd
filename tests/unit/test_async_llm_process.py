"""AsyncLLM's child process: its death, its replacement, its end with its parent."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo.graphs.errors import EngineDeadError, RequestError
from octavo.runtime import LLM, SamplingParams
from octavo.runtime.async_llm import AsyncLLM
from octavo.runtime.invariants import InvariantError
from octavo.runtime.serving import engine_process
from octavo.runtime.serving.child_process import private_folder_for_sockets
from octavo.runtime.serving.messages import Command, Event, Failed, Started, StartFailed
from octavo.runtime.serving.options import SupervisionOptions
from tests.unit.async_harness import (
    assert_idle,
    collect,
    comparable,
    engine_pid,
    first,
    ids,
    last,
    leaves_nothing,
    run,
    write_long_engine,
)

GREEDY = SamplingParams(temperature=0, max_tokens=8)
LONG = SamplingParams(temperature=0, max_tokens=4000)
QUICK = SupervisionOptions(restart_delay=0.01)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_long_engine(tmp_path_factory.mktemp("async") / "engine")


@pytest.fixture(autouse=True)
def _leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with leaves_nothing(monkeypatch):
        yield


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def kill(llm: AsyncLLM, number: int = signal.SIGKILL) -> int:
    """Kills the engine's process; returns its number once the parent has seen it end."""
    pid = engine_pid()
    os.kill(pid, number)
    await until(lambda: not llm.is_healthy or engine_pid_or_none() not in (None, pid))
    return pid


def _is_supervised() -> bool:
    return any(thread.name == "octavo-supervisor" for thread in threading.enumerate())


def engine_pid_or_none() -> int | None:
    children = psutil.Process().children()
    return children[0].pid if children else None


def test_a_killed_engine_ends_what_was_open_and_the_next_requests_work(engine: Path) -> None:
    with LLM(engine) as llm:
        expected = comparable(llm.generate("ab", GREEDY)[0])

    async def test() -> None:
        async with AsyncLLM(engine, supervision=QUICK) as llm:
            for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM):
                done = await last(llm, "ab", GREEDY)
                slow = llm.generate("ab", SamplingParams(max_tokens=50, temperature=0))
                outputs = [await anext(slow)]
                while (await llm.metrics())["num_requests_running"]:
                    pass
                before = await llm.metrics()
                streams = [await first(llm, "ab", LONG) for _ in range(3)]
                pid = await kill(llm, number)
                message = (
                    f"the engine process {pid} was killed by signal {int(number)} "
                    "while the request was running: send it again"
                )
                for stream in streams:
                    with pytest.raises(EngineDeadError) as caught:
                        async for _ in stream:
                            pass
                    assert str(caught.value) == message
                # What had ended before is there for its reader.
                outputs += [output async for output in slow]
                assert outputs[-1].finished
                after = await llm.metrics()
                _assert_not_less(before, after)
                assert comparable(await last(llm, "ab", GREEDY)) == expected == comparable(done)
                assert llm.is_healthy
                _assert_not_less(after, await llm.metrics())
                await assert_idle(llm)
            metrics = await llm.metrics()
            assert metrics["request_success"]["error"] == 9

    run(test())


def _assert_not_less(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Of counters and histograms."""
    for name, value in before.items():
        if isinstance(value, dict) and "count" in value:
            assert value["count"] <= after[name]["count"], name
            for bound, count in value["buckets"].items():
                assert count <= after[name]["buckets"][bound], name
        elif isinstance(value, dict):
            assert all(value[label] <= after[name][label] for label in value), name
        elif name not in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert value <= after[name], name


def test_requests_wait_for_the_next_engine(engine: Path) -> None:
    async def test() -> None:
        supervision = SupervisionOptions(restart_delay=0.3)
        async with AsyncLLM(engine, supervision=supervision) as llm:
            for _ in range(2):  # the first is replaced at once, the second after a delay
                pid = await kill(llm)
                with pytest.raises(EngineDeadError, match=f"the engine process {pid} was killed"):
                    await llm.check_health()
                metrics = llm.metrics()
                tasks = [asyncio.create_task(last(llm, "ab", GREEDY)) for _ in range(5)]
                cancelled = asyncio.create_task(last(llm, "ab", LONG))
                assert (await metrics)["num_requests_running"] == 0
                cancelled.cancel()
                assert all(output.finished for output in await asyncio.gather(*tasks))
                await llm.check_health()
                await assert_idle(llm)

    run(test())


def test_requests_do_not_wait_for_ever(engine: Path) -> None:
    async def test() -> None:
        supervision = SupervisionOptions(restart_delay=20.0, restart_timeout=0.2)
        async with AsyncLLM(engine, supervision=supervision) as llm:
            await kill(llm)
            await until(lambda: llm.is_healthy)
            pid = await kill(llm)
            for question in (last(llm, "ab", GREEDY), llm.reset_prefix_cache()):
                with pytest.raises(
                    EngineDeadError,
                    match=f"the engine process {pid} was killed by signal 9, and no other one was "
                    "ready within 0.2 s: send the request again later",
                ):
                    await question

    run(test())


def test_an_engine_that_dies_again_and_again_is_given_up(
    engine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        supervision = SupervisionOptions(max_restarts=2, restart_delay=0.0)
        async with AsyncLLM(engine, supervision=supervision) as llm:
            for _ in range(2):
                await kill(llm)
                await last(llm, "ab", GREEDY)
            known = (await llm.metrics())["request_success"]
            assert known["length"] >= 1
            stream = await first(llm, "ab", LONG)
            pid = await kill(llm)
            cause = (
                f"the engine process {pid} was killed by signal 9, "
                "the last of 3 deaths within 300 s"
            )
            with pytest.raises(EngineDeadError, match=f"{cause} while the request was running"):
                async for _ in stream:
                    pass
            with pytest.raises(EngineDeadError, match=f"{cause}: make another AsyncLLM"):
                await last(llm, "ab", GREEDY)
            with pytest.raises(EngineDeadError, match=cause):
                await llm.check_health()
            assert llm.get_tokenizer().encode("a")
            assert (await llm.metrics())["request_success"] == {**known, "error": 1}

    with caplog.at_level(logging.ERROR, "octavo.runtime.serving.supervisor"):
        run(test())
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == [
        "it is started again",
        "it is started again",
        "it is not started again",
    ]


def test_an_engine_that_can_no_longer_be_loaded(engine: Path, tmp_path: Path) -> None:
    copied = tmp_path / "engine"
    shutil.copytree(engine, copied)

    async def test() -> None:
        supervision = SupervisionOptions(max_restarts=1)
        async with AsyncLLM(copied, supervision=supervision) as llm:
            shutil.rmtree(copied)
            os.kill(engine_pid(), signal.SIGKILL)
            await until(lambda: not _is_supervised())  # it has given up
            with pytest.raises(
                EngineDeadError, match=r"engine process \d+ died of \w+Error: .*: make"
            ):
                await last(llm, "ab", GREEDY)

    run(test())


def test_a_process_that_dies_before_it_has_started(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.runtime.serving.child_process.MODULE", "octavo.no_such_module")

    async def test() -> None:
        llm = AsyncLLM(engine)
        with pytest.raises(EngineDeadError, match="exited with code 1 while it started"):
            await llm.start()
        await llm.shutdown()

    run(test())


def test_pins_are_made_again(engine: Path) -> None:
    async def test() -> None:
        async with AsyncLLM(engine, supervision=QUICK) as llm:
            pin = await llm.pin_prefix(ids(*range(64)))
            other = await llm.pin_prefix(ids(*range(100, 164)))
            with pytest.raises(RequestError):
                await llm.pin_prefix(ids(1))
            for _ in range(2):
                await kill(llm)
                output = await last(llm, ids(*range(80)), GREEDY)
                assert output.num_cached_tokens == 64
                await llm.reset_prefix_cache()
                assert (await last(llm, ids(*range(80)), GREEDY)).num_cached_tokens == 64
            other.release()
            await kill(llm)
            assert (await last(llm, ids(*range(100, 180)), GREEDY)).num_cached_tokens == 0
            pin.release()
            pin.release()
            await llm.reset_prefix_cache()
            assert (await last(llm, ids(*range(80)), GREEDY)).num_cached_tokens == 0

    run(test())


def test_an_engine_that_hangs_is_unhealthy_until_it_speaks(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.runtime.async_llm._METRICS_PATIENCE", 0.1)

    async def test() -> None:
        supervision = SupervisionOptions(heartbeat_timeout=0.3, shutdown_timeout=0.5)
        async with AsyncLLM(engine, supervision=supervision) as llm:
            pid = engine_pid()
            stream = await first(llm, "ab", LONG)
            os.kill(pid, signal.SIGSTOP)
            assert llm.is_healthy
            await until(lambda: not llm.is_healthy)
            with pytest.raises(
                EngineDeadError, match=f"the engine process {pid} has work and has said nothing"
            ):
                await llm.check_health()
            metrics = await llm.metrics()  # the last known ones
            assert metrics["generation_tokens"] >= 0
            os.kill(pid, signal.SIGCONT)
            await until(lambda: llm.is_healthy)
            assert [output.finished async for output in stream][-1]
            await asyncio.sleep(0.5)
            assert llm.is_healthy  # it has nothing to say
            os.kill(pid, signal.SIGSTOP)  # and cannot end by itself: it is killed

    run(test())


def test_a_reader_that_blocks_the_event_loop_loses_nothing(engine: Path) -> None:
    """Meanwhile more messages come than the sockets hold."""
    params = SamplingParams(temperature=0, max_tokens=1500, logprobs=5)
    with LLM(engine) as llm:
        expected = [comparable(one) for one in llm.generate(["a", "b", "c"], params)]

    async def test() -> None:
        async with AsyncLLM(engine) as llm:
            tasks = [asyncio.create_task(collect(llm, text, params)) for text in "abc"]
            await asyncio.sleep(0.1)
            time.sleep(1.0)  # the event loop stands still
            outputs = await asyncio.gather(*tasks)
            assert [comparable(one[-1]) for one in outputs] == expected
            assert all(len(one) < 1500 for one in outputs)

    run(test())


def test_more_requests_than_the_sockets_hold(engine: Path) -> None:
    """The engine reads nothing for a while; then all of them are there, in their order."""

    async def test() -> None:
        async with AsyncLLM(engine) as llm:
            pid = engine_pid()
            os.kill(pid, signal.SIGSTOP)
            params = SamplingParams(temperature=0, max_tokens=1)
            prompts = [ids(*[number % 250] * 200) for number in range(1000)]
            tasks = [asyncio.create_task(last(llm, prompt, params)) for prompt in prompts]
            await asyncio.sleep(0.2)
            for task in tasks[500:]:
                task.cancel()
            await asyncio.wait(tasks[500:])
            os.kill(pid, signal.SIGCONT)
            outputs = await asyncio.gather(*tasks[:500])
            assert [one.prompt_token_ids[0] for one in outputs] == [n % 250 for n in range(500)]
            await assert_idle(llm)
            metrics = await llm.metrics()
            assert metrics["request_success"]["length"] >= 500

    run(test())


def test_an_error_that_ends_the_process_is_named(
    engine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Channel:
        def __init__(self) -> None:
            self.events: list[Event] = []

        def receive(self, timeout: float | None) -> list[Command]:
            raise InvariantError("the books are wrong")

        def send(self, event: Event) -> None:
            self.events.append(event)

    channel = Channel()
    assert engine_process.serve(channel, str(engine), {}) == 1
    started, failed = channel.events
    assert started == Started(str(engine))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, InvariantError)
    assert "the engine process" in caplog.text
    channel = Channel()
    assert engine_process.serve(channel, str(engine), {"num_threads": 0}) == 1
    (failed_start,) = channel.events
    assert isinstance(failed_start, StartFailed)


def script(engine: Path, body: str) -> list[str]:
    code = f"""
import asyncio, os, signal, sys, time, warnings
from octavo.runtime import SamplingParams
from octavo.runtime.async_llm import AsyncLLM
LONG = SamplingParams(temperature=0, max_tokens=4000)
{body}
"""
    return [
        sys.executable,
        "-W",
        "error",
        "-X",
        "dev",
        "-c",
        code.replace("ENGINE", repr(str(engine))),
    ]


def test_the_engine_ends_with_a_killed_parent(engine: Path) -> None:
    """Also in the middle of a request, and although a fork of the parent lives on."""
    body = """
async def main():
    llm = AsyncLLM(ENGINE)
    stream = llm.generate("ab", LONG)
    await anext(stream)
    warnings.simplefilter("ignore")  # of forks of programs with threads
    if os.fork() == 0:
        time.sleep(5)  # with all that the parent has open
        os._exit(0)
    print(llm._client.name.split()[-1], flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen(script(engine, body), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(timeout=30)
    folder = Path(tempfile.gettempdir())
    assert list(folder.glob("octavo-*")) == []


def test_an_interrupted_program_ends_its_engine(engine: Path) -> None:
    body = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs begin without it
async def main():
    async with AsyncLLM(ENGINE) as llm:
        async for output in llm.generate("ab", LONG):
            print(llm._client.name.split()[-1], flush=True)
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
asyncio.run(main())
"""
    done = subprocess.run(script(engine, body), capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert "Warning" not in done.stderr
    assert not psutil.pid_exists(int(done.stdout.split()[0]))


def test_a_program_that_forgets_to_shut_down_ends(engine: Path) -> None:
    """The event loop is closed first, then the interpreter; the engine goes with it."""
    body = """
llm = AsyncLLM(ENGINE)
async def main():
    stream = llm.generate("ab", LONG)
    await anext(stream)
    print(llm._client.name.split()[-1], flush=True)
asyncio.run(main())
"""
    done = subprocess.run(script(engine, body), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not psutil.pid_exists(int(done.stdout))


def test_the_folder_of_the_sockets_has_a_short_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 30)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = private_folder_for_sockets()
    assert len(str(folder)) < 80
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(long.iterdir()) == []
    folder.rmdir()


def test_importing_it_loads_neither_zmq_nor_msgpack() -> None:
    code = (
        "import sys, octavo.runtime.async_llm; print(sorted({'zmq', 'msgpack', 'tokenizers', "
        "'jinja2', 'pydantic', 'prometheus_client', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("library", ["zmq", "msgpack"])
def test_a_missing_library_names_the_extra(engine: Path, library: str) -> None:
    body = f"""
sys.modules[{library!r}] = None
AsyncLLM(ENGINE, engine="thread")
AsyncLLM(ENGINE)
"""
    done = subprocess.run(script(engine, body), capture_output=True, text=True, check=False)
    error = done.stderr.splitlines()[-1]
    assert error.startswith("octavo.graphs.errors.OctavoError: an engine in its own process needs")
    assert "install `octavo[serve]`" in error

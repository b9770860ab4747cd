"""The engine's process and the stub that holds it, without a server between."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo.backends import null
from octavo.backends.manifest import Limits
from octavo.tools.triton.engine_child import parent_of
from octavo.tools.triton.stub import frames
from octavo.tools.triton.stub.responder import Responder
from octavo.tools.triton.stub.settings import Settings
from octavo.tools.triton.stub.supervisor import EngineFailedError, RefusedError, Supervisor
from tests.unit.triton_fakes import Sender, TritonError, backend_utils, wait_until
from tests.unit.word_bundles import VOCAB_SIZE, continuation, words, write_word_engine

PROMPT = [3, 14, 15]
# One request at a time, and room for one that goes on for long.
LONG = Limits(max_model_len=1 << 16, max_num_seqs=1, max_num_batched_tokens=64, block_size=16)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_word_engine(tmp_path_factory.mktemp("engines") / "words", limits=LONG)


def settings(engine: Path, **options: Any) -> Settings:
    cache = {"kv_cache_memory": "2MiB"}
    return Settings(str(engine), sys.executable, engine_options=cache, **options)


@contextmanager
def supervised(engine: Path, **options: Any) -> Iterator[Supervisor]:
    supervisor = Supervisor(settings(engine, **options))
    supervisor.start()
    try:
        yield supervisor
    finally:
        supervisor.stop()


@pytest.fixture(scope="module")
def supervisor(engine: Path) -> Iterator[Supervisor]:
    with supervised(engine, max_open_requests=3) as running:
        yield running


def request(*, stream: bool = False, **parameters: Any) -> dict[str, Any]:
    return {
        "text": words(PROMPT),
        "token_ids": None,
        "parameters": {"temperature": 0, **parameters},
        "stream": stream,
        "exclude_input": True,
        "returns": ["token_ids"],
        "priority": 0,
        "cache_salt": "",
    }


def forever() -> dict[str, Any]:
    return request(stream=True, max_tokens=60_000)


def submit(supervisor: Supervisor, wanted: dict[str, Any], delay: float = 0.0) -> Sender:
    sender = Sender(delay)
    supervisor.submit(wanted, Responder(backend_utils(), sender))
    return sender


def token_ids(sender: Sender) -> list[int]:
    return [
        one
        for response in sender.wait()
        for one in json.loads(sender.values("token_ids", response))
    ]


class Children:
    """The child processes that a test has started."""

    def __init__(self) -> None:
        self._before = psutil.Process().children()

    def all(self) -> list[psutil.Process]:
        return [one for one in psutil.Process().children() if one not in self._before]

    def only(self) -> psutil.Process:
        (child,) = self.all()
        return child


@pytest.fixture
def children() -> Children:
    return Children()


def test_a_request_is_answered_once_or_in_pieces(supervisor: Supervisor) -> None:
    whole = submit(supervisor, request(max_tokens=20))
    assert whole.text() == words(continuation(PROMPT, 20))
    assert len(whole.responses) == 1
    pieces = submit(supervisor, request(stream=True, max_tokens=20))
    assert pieces.text() == words(continuation(PROMPT, 20))
    assert len(pieces.responses) > 1


def test_what_a_slow_server_has_not_taken_is_merged(supervisor: Supervisor) -> None:
    """Each response takes as long as some tokens of the engine: fewer responses, all the tokens."""
    sender = submit(supervisor, request(stream=True, max_tokens=200), delay=0.02)
    assert token_ids(sender) == continuation(PROMPT, 200)
    assert len(sender.responses) < 100


def test_a_client_that_leaves_ends_its_request_in_the_engine(supervisor: Supervisor) -> None:
    gone = submit(supervisor, forever())
    waiting = submit(supervisor, request(max_tokens=1))
    wait_until(lambda: len(gone.responses) > 3)
    supervisor.cancel_abandoned()
    assert not gone.ended.is_set()
    gone.cancelled = True
    supervisor.cancel_abandoned()
    assert token_ids(waiting) == continuation(PROMPT, 1)
    with pytest.raises(TritonError, match="the client cancelled the request"):
        gone.wait()


def test_requests_beyond_the_limit_are_refused(supervisor: Supervisor) -> None:
    senders = [submit(supervisor, forever()) for _ in range(3)]
    with pytest.raises(RefusedError, match="3 requests are open, max_open_requests is 3") as caught:
        submit(supervisor, request())
    assert caught.value.code == "UNAVAILABLE"
    for sender in senders:
        sender.cancelled = True
    supervisor.cancel_abandoned()
    assert submit(supervisor, request(max_tokens=1)).wait()


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens is 0, it must be at least 1"),
        ({"logit_bias": {"97": 1}}, "token id 97 in logit_bias lies outside the vocabulary of 97"),
        ({"best": 1}, "'best' is no sampling parameter"),
    ],
)
def test_a_refusal_of_the_engine_is_an_error_of_that_request(
    supervisor: Supervisor, parameters: dict[str, Any], sentence: str
) -> None:
    other = submit(supervisor, request(max_tokens=30))
    with pytest.raises(TritonError, match=sentence) as caught:
        submit(supervisor, request(**parameters)).wait()
    assert caught.value.code == TritonError.INVALID_ARG
    assert other.text() == words(continuation(PROMPT, 30))


def test_token_ids_have_no_text_to_put_before_the_output(supervisor: Supervisor) -> None:
    wanted = {**request(max_tokens=1), "text": None, "token_ids": PROMPT}
    assert token_ids(submit(supervisor, wanted)) == continuation(PROMPT, 1)
    with pytest.raises(TritonError, match="exclude_input_in_output is false"):
        submit(supervisor, {**wanted, "exclude_input": False}).wait()


def test_metrics_and_health_come_by_themselves(supervisor: Supervisor) -> None:
    before = supervisor.status.snapshot
    submit(supervisor, request(max_tokens=7)).wait()
    wait_until(lambda: supervisor.status.snapshot not in (None, before))
    status = supervisor.status
    assert status.complaint is None
    assert status.snapshot is not None
    assert status.snapshot["generation_tokens"] >= 7


def test_a_lower_priority_runs_first(engine: Path) -> None:
    options = {"kv_cache_memory": "2MiB", "scheduling_policy": "priority"}
    supervisor = Supervisor(Settings(str(engine), sys.executable, engine_options=options))
    supervisor.start()
    first = submit(supervisor, {**forever(), "priority": -1})
    wait_until(lambda: bool(first.responses))
    later = submit(supervisor, {**request(max_tokens=500), "priority": 1})
    sooner = submit(supervisor, {**request(max_tokens=500), "priority": 0})
    first.cancelled = True
    supervisor.cancel_abandoned()
    assert token_ids(sooner) == continuation(PROMPT, 500)
    assert not later.ended.is_set()
    supervisor.stop()
    assert token_ids(later) == continuation(PROMPT, 500)


def test_a_dead_engine_ends_its_requests_and_is_replaced(engine: Path, children: Children) -> None:
    with supervised(engine) as supervisor:
        running, waiting = submit(supervisor, forever()), submit(supervisor, request())
        wait_until(lambda: bool(running.responses))
        dead = children.only()
        dead.kill()
        for sender in (running, waiting):
            with pytest.raises(TritonError) as caught:
                sender.wait()
            assert str(caught.value) == (
                f"the engine process {dead.pid} was killed by signal 9 while the request was "
                "running: send it again"
            )
            assert caught.value.code == TritonError.UNAVAILABLE
        assert (
            supervisor.status.complaint == f"the engine process {dead.pid} was killed by signal 9"
        )
        with pytest.raises(RefusedError, match="killed by signal 9: send the request again later"):
            submit(supervisor, request())
        wait_until(lambda: supervisor.status.complaint is None)
        assert submit(supervisor, request(max_tokens=5)).text() == words(continuation(PROMPT, 5))
        assert supervisor.status.generation == 2


def test_an_engine_that_keeps_dying_is_given_up(engine: Path, children: Children) -> None:
    with supervised(engine, max_restarts=1, restart_delay=0.0) as supervisor:
        for _ in range(2):
            wait_until(lambda: supervisor.status.complaint is None)
            children.only().kill()
            wait_until(lambda: supervisor.status.complaint is not None)
        wait_until(lambda: "must be loaded again" in str(supervisor.status.complaint))
        assert str(supervisor.status.complaint).endswith(
            "killed by signal 9, the last of 2 deaths: the model must be loaded again"
        )
        assert children.all() == []


@pytest.mark.parametrize("python", [sys.executable, "/no/such/python"])
def test_an_engine_that_cannot_be_loaded_says_why(tmp_path: Path, python: str) -> None:
    supervisor = Supervisor(Settings(str(tmp_path / "none"), python))
    sentence = "none is no engine" if python == sys.executable else "could not be started"
    with pytest.raises(EngineFailedError, match=sentence):
        supervisor.start()
    supervisor.stop()


def test_b03_files_of_another_version_are_told_apart(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "PROTOCOL", 0)
    supervisor = Supervisor(settings(engine))
    with pytest.raises(EngineFailedError) as caught:
        supervisor.start()
    assert str(caught.value) == (
        f"the model's files speak protocol 0 and the Octavo of {sys.executable} speaks 1: "
        "export the model again with that Octavo"
    )
    supervisor.stop()


def test_an_unknown_option_of_the_engine_is_named(engine: Path) -> None:
    supervisor = Supervisor(Settings(str(engine), sys.executable, engine_options={"speed": 11}))
    with pytest.raises(EngineFailedError, match="speed"):
        supervisor.start()
    supervisor.stop()


def test_stopping_lets_open_requests_end_and_refuses_others(
    engine: Path, children: Children
) -> None:
    supervisor = Supervisor(settings(engine))
    supervisor.start()
    child = children.only()
    sender = submit(supervisor, request(stream=True, max_tokens=200), delay=0.002)
    supervisor.stop()
    assert token_ids(sender) == continuation(PROMPT, 200)
    with pytest.raises(RefusedError, match="the model is being unloaded"):
        submit(supervisor, request())
    assert not child.is_running()


def test_stopping_does_not_wait_for_ever(engine: Path) -> None:
    supervisor = Supervisor(settings(engine, drain_timeout=0.1))
    supervisor.start()
    sender = submit(supervisor, forever())
    supervisor.stop()
    with pytest.raises(TritonError, match="the model was unloaded while the request was running"):
        sender.wait()


def test_the_engine_ends_with_a_stub_that_was_killed(engine: Path) -> None:
    code = f"""
    import sys, time
    from octavo.tools.triton.stub.settings import Settings
    from octavo.tools.triton.stub.supervisor import Supervisor

    Supervisor(Settings({str(engine)!r}, sys.executable, {{"kv_cache_memory": "2MiB"}})).start()
    print("started", flush=True)
    time.sleep(600)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    ) as stub:
        assert stub.stdout is not None
        assert stub.stdout.readline() == "started\n"
        (child,) = psutil.Process(stub.pid).children()
        os.kill(stub.pid, signal.SIGKILL)
    wait_until(lambda: not child.is_running())


def test_the_parent_of_a_process_is_read() -> None:
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as process:
        assert parent_of(process.pid) == os.getpid()
    assert parent_of(process.pid) is None


def test_an_engine_that_fails_for_good_says_what_it_died_of(tmp_path: Path) -> None:
    """Its cache is damaged under it: steps fail until it counts as dead."""
    engine = null.write_engine(tmp_path / "null", vocab_size=VOCAB_SIZE, limits=LONG)
    code = """
    import sys
    from octavo.graphs.errors import BackendError
    from octavo.backends.null.executable import NullExecutable
    from octavo.tools.triton import engine_child

    def run(self, inputs):
        raise BackendError("the device is gone")

    NullExecutable.run = run
    engine_child.main()
    """
    ours, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )
    with ours, child, ours.makefile("rb") as stream:
        start = {
            "engine": str(engine),
            "options": {"kv_cache_memory": "2MiB"},
            "max_open_requests": 9,
            "heartbeat_timeout": 60.0,
            "server": None,
        }
        ours.sendall(frames.encode({"protocol": frames.PROTOCOL, "start": start}))
        said = []
        wanted = {**request(), "text": None, "token_ids": PROMPT}
        while (message := frames.read(stream)) is not None:
            said.append(message)
            if "outputs" in message:
                ours.sendall(frames.encode({"delivered": True}))
            if "outputs" in message or "ready" in message:
                ours.sendall(frames.encode({"add": len(said), "request": wanted}))
        assert child.wait(timeout=30) == 1
    errors = [outcome[2] for message in said for outcome in message.get("outputs", [])]
    assert errors == [["the device is gone", "INTERNAL"]] * 2
    assert said[-1] == {"dying": "the engine thread died of BackendError: the device is gone"}


def test_a_message_that_ends_in_the_middle_is_the_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(frames.encode({"cancel": 1}) + frames.encode({"cancel": 2})[:7])
        theirs.close()
        with ours.makefile("rb") as stream:
            assert frames.read(stream) == {"cancel": 1}
            assert frames.read(stream) is None


def test_a_request_too_large_for_a_message_is_refused(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "MOST_BYTES", 1000)
    with pytest.raises(RefusedError, match=r"bytes, at most 1,000 are taken: shorten") as caught:
        submit(supervisor, {**request(), "text": "w1 " * 1000})
    assert caught.value.code == "INVALID_ARG"
    assert supervisor.num_open == 0

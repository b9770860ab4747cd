"""A server from its start to its end, and through the death of its engine."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from octavo.backends.manifest import Limits
from tests.server_process import ServerProcess, serving
from tests.unit.word_bundles import continuation, words, write_word_engine

LONG = 3500  # tokens that take the null engine about a second
LIMITS = Limits(max_model_len=4096, max_num_seqs=8, max_num_batched_tokens=64, block_size=16)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_word_engine(tmp_path_factory.mktemp("engines") / "words", limits=LIMITS)


class Stream:
    """A streamed completion, read in a thread from its first event on."""

    def __init__(self, server: ServerProcess, max_tokens: int = LONG) -> None:
        self._url = f"{server.url}/v1/completions"
        self._body = {
            "model": "words", "prompt": [5], "max_tokens": max_tokens, "temperature": 0,
            "stream": True,
        }  # fmt: skip
        self.begun = threading.Event()
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self.begun.wait(30)

    def _read(self) -> None:
        with httpx2.stream("POST", self._url, json=self._body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line:
                    self.lines.append(line.removeprefix("data: "))
                    self.begun.set()

    def end(self) -> list[Any]:
        """All events but [DONE]."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self.lines[-1] == "[DONE]"
        return [json.loads(line) for line in self.lines[:-1]]


def post(server: ServerProcess, **body: Any) -> httpx2.Response:
    request = {"model": "words", "prompt": [5], "max_tokens": 3, "temperature": 0, **body}
    return httpx2.post(f"{server.url}/v1/completions", json=request, timeout=60)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def server(engine: Path) -> Iterator[ServerProcess]:
    with serving(engine) as process:
        yield process


def test_it_listens_before_the_engine_is_there(engine: Path) -> None:
    server = ServerProcess(engine)
    try:
        assert server.first_line == f"words is served at {server.url}"
        assert server.url.startswith("http://127.0.0.1:")
        status, body = server.get("/ready")
        if status != 200:
            assert (status, json.loads(body)["error"]["code"]) == (503, "service_unavailable")
            assert server.get("/health")[0] == 200
        server.wait_until_ready()
        assert json.loads(server.get("/health")[1]) == {"status": "ready"}
        assert post(server).json()["choices"][0]["text"] == words(continuation([5], 3))
    finally:
        server.close()


def test_sigterm_lets_open_requests_end_and_refuses_new_ones(server: ServerProcess) -> None:
    stream = Stream(server)
    engine_pid = server.engine_pid
    server.signal(signal.SIGTERM)
    until(lambda: server.get("/ready")[0] == 503)
    refused = post(server)
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"] == "1"
    assert json.loads(server.get("/health")[1]) == {"status": "draining"}
    events = stream.end()
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text == words(continuation([5], LONG))
    assert server.wait() == 0
    assert not psutil.pid_exists(engine_pid)
    assert "Traceback" not in server.stderr()


@pytest.mark.parametrize("by", ["timeout", "second signal"])
def test_a_drain_that_is_over_ends_streams_with_an_error(engine: Path, by: str) -> None:
    timeout = "0.2" if by == "timeout" else "60"
    with serving(engine, "--drain-timeout", timeout) as server:
        stream = Stream(server)
        server.signal(signal.SIGTERM)
        if by == "second signal":
            until(lambda: server.get("/ready")[0] == 503)
            server.signal(signal.SIGINT)
        *events, last = stream.end()
        assert "was shut down while the request was running" in last["error"]["message"]
        assert len(events) < LONG
        assert server.wait() == 0
        assert "Traceback" not in server.stderr()


def test_an_engine_that_is_killed_is_told_and_replaced(server: ServerProcess) -> None:
    stream = Stream(server)
    old = server.kill_engine()
    *events, last = stream.end()
    assert "was killed by signal 9" in last["error"]["message"]
    assert last["error"]["code"] == "service_unavailable"
    text = "".join(event["choices"][0]["text"] for event in events)
    assert words(continuation([5], LONG)).startswith(text)
    assert server.get("/health")[0] == 200  # it is being helped
    server.wait_until_ready()
    assert server.engine_pid != old
    assert post(server).json()["choices"][0]["text"] == words(continuation([5], 3))


def test_ready_tells_the_truth_while_the_engine_is_replaced(server: ServerProcess) -> None:
    old = server.kill_engine()
    answers: list[tuple[int, str]] = []

    def not_ready() -> bool:
        answers.append(server.get("/ready"))
        return answers[-1][0] == 503

    until(not_ready)
    told = json.loads(answers[-1][1])["error"]["message"]
    assert f"engine process {old} was killed by signal 9" in told
    server.wait_until_ready()


def test_an_engine_that_dies_too_often_asks_for_a_restart(server: ServerProcess) -> None:
    for _ in range(6):
        server.kill_engine()
    until(lambda: server.get("/health")[0] == 503)
    status, body = server.get("/health")
    assert status == 503
    assert "restart the server" in json.loads(body)["error"]["message"]
    assert post(server).status_code == 503
    server.signal(signal.SIGTERM)
    assert server.wait() == 0


def test_the_engine_does_not_outlive_a_killed_server(server: ServerProcess) -> None:
    engine_pid = server.engine_pid
    server.signal(signal.SIGKILL)
    server.wait()
    until(lambda: not psutil.pid_exists(engine_pid))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo.tools.main", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_an_engine_that_cannot_be_loaded_is_one_sentence(engine: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in engine.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.null").write_text("something else")
    done = run(str(broken), "--port=0")
    assert done.returncode == 1
    (sentence,) = [line for line in done.stderr.splitlines() if not line.startswith("INFO")]
    assert sentence.startswith("error: ")
    assert "model.null" in sentence


def test_a_port_that_is_taken_is_one_sentence(engine: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(str(engine), f"--port={port}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: the server cannot listen at 127.0.0.1:{port} (Address already in use): choose "
        "another --host or --port\n"
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--rate-limit=often", "the rate limit is 'often'"),
        ("--max-body-size=much", "max_body_size is 'much'"),
        ("--kv-cache-memory=much", "kv_cache_memory is 'much'"),
    ],
)
def test_an_option_that_cannot_be_is_one_sentence(engine: Path, option: str, message: str) -> None:
    done = run(str(engine), "--port=0", option)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr

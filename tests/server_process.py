"""`octavo serve` as its users run it: a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import psutil

_PATIENCE = 60.0  # seconds


class ServerProcess:
    """A server that listens, and may still be loading.

    url  such as http://127.0.0.1:45123
    """

    def __init__(
        self, engine: Path, *options: str, environment: dict[str, str] | None = None
    ) -> None:
        command = [sys.executable, "-m", "octavo.tools.main", "serve", str(engine), "--port=0"]
        self._stderr: IO[bytes] = TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [*command, "--no-access-log", *options],
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        assert self._process.stdout is not None
        self.first_line = self._process.stdout.readline().strip()
        self.url = self.first_line.rpartition(" ")[2]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def engine_pid(self) -> int:
        """Of the engine's own process."""
        (child,) = psutil.Process(self.pid).children()
        return int(child.pid)

    def kill_engine(self) -> int:
        """Kills the engine's process, once there is one, and returns its number when it is gone."""
        children: list[psutil.Process] = []
        end = time.monotonic() + _PATIENCE
        while not children:
            assert time.monotonic() < end, "there is no engine"
            time.sleep(0.01)
            children = psutil.Process(self.pid).children()
        (child,) = children
        child.kill()
        while child.is_running():
            assert time.monotonic() < end, "the engine is still there"
            time.sleep(0.01)
        return int(child.pid)

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of an answer."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=_PATIENCE) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def wait_until_ready(self) -> None:
        end = time.monotonic() + _PATIENCE
        while (status := self.get("/ready")[0]) != 200:
            assert self._process.poll() is None, self.stderr()
            assert time.monotonic() < end, f"/ready still answers {status}"
            time.sleep(0.05)

    def signal(self, number: int = signal.SIGTERM) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        """The exit code."""
        return self._process.wait(_PATIENCE)

    def stderr(self) -> str:
        """All of it up to now."""
        self._stderr.seek(0)
        return self._stderr.read().decode()

    def close(self) -> None:
        """Whatever it does, it ends."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._stderr.close()


@contextmanager
def serving(
    engine: Path, *options: str, environment: dict[str, str] | None = None
) -> Iterator[ServerProcess]:
    """A server that is ready; it is gone afterwards."""
    server = ServerProcess(engine, *options, environment=environment)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.close()

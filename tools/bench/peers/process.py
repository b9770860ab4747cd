"""A driver in a process of its own, spoken to over JSON lines and stopped while others measure."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from octavo.graphs.errors import OctavoError
from octavo.tools.bench.peers.catalog import Peer

DRIVERS = Path(__file__).parent / "drivers"
TIMEOUT = 1200.0  # seconds for one answer


class PeerError(OctavoError):
    """A peer that cannot be installed, prepared, loaded or run."""


class DriverProcess:
    """`driver` answers requests; between `pause` and `resume` none of its threads runs."""

    def __init__(self, peer: Peer, root: Path, num_threads: int, log: Path) -> None:
        python = str(root / "bin" / "python") if peer.in_own_environment else sys.executable
        command = [python, "-P", str(DRIVERS / "serve.py"), str(DRIVERS / f"{peer.name}.py")]
        log.parent.mkdir(parents=True, exist_ok=True)
        self._name = peer.name
        self._log = log
        self._buffer = b""
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment(peer, root, num_threads),
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def request(self, operation: str, *, timeout: float = TIMEOUT, **arguments: Any) -> Any:
        """The result of an operation; PeerError with the driver's own reason where it has none."""
        assert self._process.stdin is not None
        line = json.dumps({"op": operation, **arguments}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died(operation) from None
        answer = json.loads(self._read_line(operation, timeout))
        if not answer["ok"]:
            raise PeerError(f"{self._name} failed to {operation}: {_first_line(answer['error'])}")
        return answer["result"]

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        """To the whole session, since an engine may have processes of its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read_line(self, operation: str, timeout: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise PeerError(f"{self._name} did not {operation} within {timeout:g} seconds")
            more = os.read(self._process.stdout.fileno(), 1 << 16)
            if not more:
                raise self._died(operation)
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _died(self, operation: str) -> PeerError:
        self._process.wait()
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = lines[-1] if lines else "no message"
        code = self._process.returncode
        return PeerError(f"{self._name} ended with {code} instead of `{operation}`: {last}")


def environment(peer: Peer, root: Path, num_threads: int) -> dict[str, str]:
    variables = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
    if peer.in_own_environment:
        variables["VIRTUAL_ENV"] = str(root.resolve())
        variables["PATH"] = f"{root.resolve() / 'bin'}{os.pathsep}{variables['PATH']}"
        for name in ("PYTHONPATH", "PYTHONHOME"):
            variables.pop(name, None)
    for name, value in peer.environment.items():
        variables[name] = value.format(root=root.resolve())
    return variables


def _first_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[0] if lines else "no message"

"""The process that runs the engine, as the stub holds it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
from typing import Any

from . import frames
from .settings import Settings

MODULE = "octavo.tools.triton.engine_child"
# Seconds for which it may not read: it reads at once, whatever its engine does.
_SEND_TIMEOUT = 30


class EngineGoneError(Exception):
    """The process has ended, or reads nothing any more and was killed."""


class EngineProcess:
    """Started at once, or OSError. It ends with this process: then it reads the socket's end.

    `send` may be called by any thread, after each other; `read` by one.
    """

    def __init__(self, settings: Settings) -> None:
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as on_failure, theirs:
            on_failure.callback(ours.close)
            # A session of its own: Ctrl-C in the terminal is for the server, which then ends it.
            self._process = subprocess.Popen(
                [settings.python, "-P", "-m", MODULE, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if name != "PYTHONHOME"},
            )
            on_failure.pop_all()
        self.pid = self._process.pid
        # Not `settimeout`, which would turn the reading side non-blocking too.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT, 0))
        self._socket = ours
        self._reader = ours.makefile("rb")

    def send(self, frame: bytes) -> None:
        """EngineGoneError if it cannot take the frame."""
        try:
            self._socket.sendall(frame)
        except BlockingIOError:
            self.kill()  # the frame may be there in part: nothing can be said after it
            raise EngineGoneError from None
        except OSError:
            raise EngineGoneError from None

    def read(self) -> dict[str, Any] | None:
        """Its next message, None when there will be no more."""
        return frames.read(self._reader)

    def close(self) -> None:
        """Asks it to end, which it does after its current step; `read` then gives None."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """Ends it, whatever it does, with what it has started; harmless when it has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def reap(self, timeout: float) -> str:
        """Waits for its end, kills it after `timeout` s, and says how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        self.kill()
        status = self._process.wait()
        self._reader.close()
        self._socket.close()
        how = f"was killed by signal {-status}" if status < 0 else f"exited with code {status}"
        return f"the engine process {self.pid} {how}"

"""The engine's process, as its parent holds it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.runtime.serving import wire

MODULE = "octavo.runtime.serving.engine_process"


class ChildProcess:
    """Starts it; it ends when this process does, because it then reads the end of its stdin.

    A command of its own, not a fork or spawn of this program: the user's main module is not
    imported again, and no thread's lock is copied.

    pidfd  readable once it has ended; None where the system has none
    """

    def __init__(self, endpoint: str, engine: str, options: Mapping[str, Any]) -> None:
        # In a group of its own: Ctrl-C in the terminal is for the parent, which then ends it, and
        # what the child has started ends with it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE], stdin=subprocess.PIPE, process_group=0
        )
        self.pid = self._process.pid
        self.pidfd = _open_pidfd(self.pid)
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has died, which is noticed elsewhere
            config = wire.pack([endpoint, engine, options])
            self._stdin.write(len(config).to_bytes(8) + config)
            self._stdin.flush()

    @property
    def ended(self) -> bool:
        if self._process.returncode is not None:
            return True
        # Not `poll`: until it is waited for, its number and its group are nobody else's.
        state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return state is not None

    def kill(self) -> None:
        """Ends it, whatever it does, with what it has started; harmless when it has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> str:
        """Kills it if it runs, and says how it ended: "was killed by signal 9"."""
        self.kill()  # of its group, what is left
        status = self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        return f"was killed by signal {-status}" if status < 0 else f"exited with code {status}"


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # another system, or a sandbox without it
        return None


def private_folder_for_sockets() -> Path:
    """A new folder that no other user can enter, with a name short enough for a socket's."""
    import tempfile

    folder = tempfile.mkdtemp(prefix="octavo-")
    if len(os.fsencode(folder)) > 80:  # of 107 bytes for the whole address
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="octavo-", dir="/tmp")
    return Path(folder)

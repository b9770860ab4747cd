"""Wakes a thread that waits for file descriptors."""

from __future__ import annotations

import contextlib
import os
import select
import threading


class WakePipe:
    """Set by any thread; waited for, cleared and closed by one."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self._lock = threading.Lock()
        self._closed = False

    def set(self) -> None:
        """Harmless when it is set already or closed."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):  # it is full: the thread will wake
                    os.write(self._write_fd, b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 4096):
                pass

    def wait(self, timeout: float) -> None:
        """Waits until it is set, at most `timeout` seconds, and clears it."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        poll.poll(timeout * 1000)
        self.clear()

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
                os.close(self._write_fd)

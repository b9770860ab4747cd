"""Memory that is reserved now and touched later is fetched from the system ahead of use.

The system gives a page when it is first touched. A prefill into new cache blocks would wait for
thousands of pages: 4 ms for 512 tokens of SmolLM2 where memory is at hand, ten times as much in a
virtual machine whose host has to find it first.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14: fetches pages, changes no byte
_SLICE = 1 << 18  # bytes of an array at once: the system's lock on memory is held meanwhile
_NICENESS = 10  # of this thread: a tenth of a core that computes


class PageIn:
    """Fetches the pages of arrays in a thread of low priority, the beginnings of all arrays first.

    Where the system cannot do that, pages come when they are touched, as always.
    """

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        self._arrays = tuple(arrays)  # memory must not be given back while it is fetched
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="octavo-page-in", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends early and lets go of the arrays; harmless when called twice."""
        self._stopped.set()
        self._thread.join()
        self._arrays = ()

    def wait(self) -> None:
        """Returns when everything has been fetched."""
        self._thread.join()

    def _run(self) -> None:
        if sys.platform != "linux":
            return
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        advise = ctypes.CDLL(None, use_errno=True).madvise  # lets go of the interpreter meanwhile
        for address, size in _slices(self._arrays):
            if self._stopped.is_set():
                return
            refused = advise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE)
            if refused:  # an older kernel, or no more memory: whoever touches it will tell
                return


def _slices(arrays: Sequence[NDArray[Any]]) -> Iterator[tuple[int, int]]:
    """Addresses and sizes of whole pages, array after array, then the next slice of each."""
    longest = max((array.nbytes for array in arrays), default=0)
    for start in range(0, longest, _SLICE):
        for array in arrays:
            first = array.ctypes.data
            begin = _rounded_up(first + start)
            end = min(_rounded_up(first + start + _SLICE), first + array.nbytes)
            size = (end - begin) // mmap.PAGESIZE * mmap.PAGESIZE
            if size > 0:
                yield begin, size


def _rounded_up(address: int) -> int:
    return -(-address // mmap.PAGESIZE) * mmap.PAGESIZE

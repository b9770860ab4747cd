"""Pages of caches that are fetched ahead of use."""

from __future__ import annotations

import os
import resource
import sys
import threading
from itertools import pairwise

import numpy as np
import pytest

from octavo.backends import page_in
from octavo.backends.page_in import PageIn

PAGES = 4096
ARRAYS = 3


def minor_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux fetches pages on request")
def test_pages_are_there_when_they_are_touched() -> None:
    arrays = [np.zeros(PAGES << 12, np.int8) for _ in range(ARRAYS)]
    PageIn(arrays).wait()
    before = minor_faults()
    for array in arrays:
        array[:: 1 << 12] = 1
    # Kernels before 5.14 have no such request; then every page faults.
    if minor_faults() - before > ARRAYS * PAGES // 2:
        pytest.skip("this kernel is older than 5.14")
    assert minor_faults() - before < ARRAYS * PAGES // 100


def test_what_is_written_meanwhile_stays() -> None:
    array = np.zeros(64 << 20, np.int8)
    fetching = PageIn([array])
    array[:] = 7
    fetching.wait()
    assert (array == 7).all()


def test_the_caller_keeps_its_priority() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    PageIn([np.zeros(8 << 20, np.int8)]).wait()
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_it_can_be_stopped_at_any_time() -> None:
    fetching = PageIn([np.zeros(256 << 20, np.int8)])
    fetching.stop()
    fetching.stop()


def test_every_whole_page_once_and_nothing_beyond() -> None:
    room = np.zeros(5 << 20, np.int8)
    arrays = [room[100 : (3 << 20) + 5000], room[:10], room[:0]]
    covered = sorted(page_in._slices(arrays))
    first = arrays[0].ctypes.data
    begin = -(-first // 4096) * 4096
    end = (first + arrays[0].nbytes) // 4096 * 4096
    assert covered[0][0] == begin
    assert all(a + size == b for (a, size), (b, _) in pairwise(covered))
    assert covered[-1][0] + covered[-1][1] == end

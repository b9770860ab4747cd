"""Memory of paged caches."""

from __future__ import annotations

import gc

import numpy as np
import psutil
import pytest

from octavo.backends.large_arrays import zeroed


@pytest.mark.parametrize("shape", [(3, 2, 5), (1,), (0, 4)])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_zeros_that_can_be_written(shape: tuple[int, ...], dtype: str) -> None:
    array = zeroed(shape, dtype)
    assert array.shape == shape
    assert array.dtype == np.dtype(dtype)
    assert not array.any()
    array[...] = 1
    assert array.sum() == array.size


def test_what_is_not_touched_costs_nothing() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    array = zeroed((1 << 30,), "float32")  # 4 GiB
    array[:1000] = 1
    assert process.memory_info().rss - before < 64 << 20
    del array
    gc.collect()


def test_too_much_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="cannot be reserved"):
        zeroed((1 << 62,), "float32")

"""Weights in files beside the engine instead of in memory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from octavo.compiler import memory

LARGE = torch.arange(1 << 19, dtype=torch.bfloat16).view(1 << 9, 1 << 10)


def mapped_from(folder: Path) -> int:
    """Bytes of this process that are mapped from files of a folder."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [line[0].split("-") for line in lines if len(line) > 5 and str(folder) in line[5]]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


def test_large_results_are_files_without_names(tmp_path: Path) -> None:
    with memory.weights_in_files(tmp_path):
        floats = memory.cast(LARGE, torch.float32)
        joined = memory.concatenated([floats, floats[:3]])
        assert mapped_from(tmp_path) >= floats.nbytes + joined.nbytes
    assert list(tmp_path.iterdir()) == []
    torch.testing.assert_close(floats, LARGE.float(), rtol=0, atol=0)
    torch.testing.assert_close(joined, torch.cat([floats, floats[:3]]), rtol=0, atol=0)
    del floats, joined
    assert mapped_from(tmp_path) == 0


def test_small_results_and_those_outside_are_in_memory(tmp_path: Path) -> None:
    assert not memory.keeps_weights_in_files()
    kept = [memory.cast(LARGE, torch.float32), memory.concatenated([LARGE, LARGE])]
    with memory.weights_in_files(tmp_path):
        assert memory.keeps_weights_in_files()
        kept.append(memory.cast(LARGE[:5], torch.float32))
        assert mapped_from(tmp_path) == 0
    assert [len(tensor) for tensor in kept] == [512, 1024, 5]


def test_a_full_disk_is_an_error_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with memory.weights_in_files(tmp_path), pytest.raises(OSError, match="No space"):
        memory.cast(LARGE, torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_releasing_harms_nobody() -> None:
    kept = torch.ones(1 << 16)
    memory.release()
    assert kept.sum() == 1 << 16

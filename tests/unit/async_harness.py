"""AsyncLLM in tests: engines that run long enough to be interrupted, and what may be left."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from octavo.backends.manifest import Limits
from octavo.runtime import RequestOutput
from octavo.runtime.async_llm import AsyncLLM
from tests.unit.runtime_bundles import write_text_engine

T = TypeVar("T")

LONG_LIMITS = Limits(max_model_len=4096, max_num_seqs=8, max_num_batched_tokens=64, block_size=16)


def write_long_engine(path: Path, **options: Any) -> Path:
    """A null engine with a tokenizer whose longest answers take half a second."""
    return write_text_engine(path, limits=LONG_LIMITS, **options)


def run(test: Coroutine[Any, Any, T]) -> T:
    """Runs a test's coroutine; what hangs fails."""
    return asyncio.run(asyncio.wait_for(test, 60))


def ids(*token_ids: int) -> dict[str, object]:
    return {"prompt_token_ids": list(token_ids)}


def comparable(output: RequestOutput) -> RequestOutput:
    """Without what differs between two runs of a request."""
    return replace(output, request_id="", num_cached_tokens=0, metrics=None)  # type: ignore[arg-type]


async def collect(llm: AsyncLLM, *args: Any, **options: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(*args, **options)]


async def last(llm: AsyncLLM, *args: Any, **options: Any) -> RequestOutput:
    return (await collect(llm, *args, **options))[-1]


async def first(llm: AsyncLLM, *args: Any, **options: Any) -> Any:
    """A stream that has begun: its generator, after its first output."""
    stream = llm.generate(*args, **options)
    await anext(stream)
    return stream


async def assert_idle(llm: AsyncLLM) -> None:
    """Nothing of any request is left in the engine."""
    metrics = await llm.metrics()
    assert metrics["num_requests_running"] == metrics["num_requests_waiting"] == 0
    assert metrics["kv_cache_usage_perc"] == 0


def engine_pid() -> int:
    """The one child process of this process."""
    (child,) = psutil.Process().children()
    pid: int = child.pid
    return pid


@contextmanager
def leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread, process, file descriptor, socket or temporary file."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        gc.collect()
        before = _left(Path(folder))
        yield
        gc.collect()
        assert _left(Path(folder)) == before


def _left(folder: Path) -> dict[str, object]:
    return {
        "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("octavo")),
        "processes": [child.pid for child in psutil.Process().children(recursive=True)],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "files": sorted(os.listdir(folder)),
    }

"""What TensorRT measured of kernels, kept in a file from one build to the next."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.backends.tensorrt.library_log import Log
from octavo.graphs.errors import BuildError


@contextlib.contextmanager
def timing_cache(config: Any, log: Log, path: str | None) -> Iterator[None]:
    """Reads the file if it is there, and writes what the build added to it. None: no cache.

    Raises BuildError for a file that TensorRT does not take.
    """
    if path is None:
        yield
        return
    file = Path(path)
    known = file.read_bytes() if file.exists() else b""
    log.warnings.clear()
    cache = config.create_timing_cache(known)
    # A damaged file is a warning only, and an empty cache.
    damaged = known and any("timing cache" in line.lower() for line in log.warnings)
    if damaged or cache is None or not config.set_timing_cache(cache, False):
        raise BuildError(
            f"the timing cache {file} was not taken, it is damaged or of another version or GPU: "
            "remove it or name another file"
        )
    yield
    file.parent.mkdir(parents=True, exist_ok=True)
    written = file.with_name(f".{file.name}.{os.getpid()}")
    written.write_bytes(bytes(config.get_timing_cache().serialize()))
    written.replace(file)

"""The console scripts as processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# OpenMP's threads, which wait by spinning, make PyTorch 15 times slower on a busy machine.
THREADS = {"OMP_NUM_THREADS": "1"}


def script(name: str) -> str:
    """An installed console script of this interpreter's environment."""
    return str(Path(sys.executable).with_name(name))


def run(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [script(name), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **THREADS},
    )

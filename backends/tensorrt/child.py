"""Runs the builder in a process of its own and turns whatever becomes of it into one sentence."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from octavo.backends.tensorrt.flavour import Flavour
from octavo.backends.tensorrt.request import EngineReport, EngineRequest
from octavo.graphs.errors import BuildError

_MODULE = "octavo.backends.tensorrt.builder"
_VERSIONED_LIBRARY = re.compile(r"(lib\w+\.so)\.[0-9.]+")
_WORDS_SHOWN = 300  # characters


def run_builder(request: EngineRequest, flavour: Flavour, folder: Path) -> EngineReport:
    """Builds `request.engine`; `folder` takes what is needed meanwhile. Raises BuildError."""
    written = folder / "request.json"
    request.write(written)
    with (folder / "builder.log").open("wb") as log:
        done = subprocess.run(
            [sys.executable, "-m", _MODULE, str(written)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(flavour, folder),
            check=False,
        )
    if not request.report.exists():
        raise BuildError(_died(done.returncode, flavour, Path(log.name)))
    content: dict[str, Any] = json.loads(request.report.read_bytes())
    if "error" in content:
        error = BuildError(content["error"])
        if content["errno"] is None:
            raise error
        # The reason, such as a full disk, in the form that whoever publishes looks for.
        raise error from OSError(content["errno"], os.strerror(content["errno"]))
    return EngineReport.from_json(content)


def _environment(flavour: Flavour, folder: Path) -> dict[str, str]:
    links = folder / "lib"
    _link_libraries(flavour, links)
    known = os.environ.get("LD_LIBRARY_PATH")
    paths = [str(links), *([known] if known else [])]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(paths),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def _link_libraries(flavour: Flavour, links: Path) -> None:
    """`libtensorrt_rtx.so`, which the ONNX parser opens by that name, is not in the wheel."""
    links.mkdir()
    spec = importlib.util.find_spec(f"{flavour.module}_libs")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for library in sorted(Path(folder).iterdir()):
            if found := _VERSIONED_LIBRARY.fullmatch(library.name):
                (links / found[1]).symlink_to(library)


def _died(status: int, flavour: Flavour, log: Path) -> str:
    how = f"ended with status {status}"
    remedy = "build with --tensorrt builder_optimization_level=0, or with another backend"
    if status < 0:
        how = f"was ended by {signal.Signals(-status).name}"
    if status == -signal.SIGKILL:
        remedy = "it probably ran out of memory, build on a machine with more"
    words = " ".join(log.read_text(encoding="utf-8", errors="replace").split())[-_WORDS_SHOWN:]
    said = f" after it said: {words}" if words else ""
    return f"the {flavour.title} builder {how}{said}: {remedy}"

"""The process that builds an engine: `python -m octavo.backends.tensorrt.builder REQUEST`.

A process of its own, since native code that aborts must not take the compiler with it, since the
memory of a build is returned when it ends, and since TensorRT-RTX looks for a library by a name
that must be on LD_LIBRARY_PATH when a process starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from octavo.backends.tensorrt import network, plugin
from octavo.backends.tensorrt.builder_config import configure
from octavo.backends.tensorrt.flavour import FLAVOURS, Flavour
from octavo.backends.tensorrt.library_log import Log, last_error, make_log
from octavo.backends.tensorrt.request import EngineReport, EngineRequest
from octavo.backends.tensorrt.timing_cache import timing_cache
from octavo.graphs.errors import BuildError, OctavoError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def build(request: EngineRequest) -> EngineReport:
    """Writes `request.engine`; raises BuildError, BackendError, or OSError of the file."""
    flavour = FLAVOURS[request.flavour]
    trt = flavour.load()
    log = make_log(trt)
    plugin.register(trt)
    builder = trt.Builder(log)
    parsed = network.parse(trt, builder, log, request.model, flavour)
    network.require_attention(trt, parsed, request.num_attention_layers)
    network.require_aliases(parsed, request.aliases)
    config = builder.create_builder_config()
    with timing_cache(config, log, request.options.timing_cache):
        configure(trt, builder, config, parsed, request, flavour)
        _write_engine(trt, builder, parsed, config, log, request.engine, flavour)
    layers = [str(parsed.get_layer(i).type).rpartition(".")[2] for i in range(parsed.num_layers)]
    return EngineReport(
        version=trt.__version__,
        num_layers=parsed.num_layers,
        layers=dict(sorted(Counter(layers).items())),
        inputs=tuple(parsed.get_input(i).name for i in range(parsed.num_inputs)),
        outputs=tuple(parsed.get_output(i).name for i in range(parsed.num_outputs)),
        warnings=tuple(log.warnings),
    )


def _write_engine(
    trt: Any, builder: Any, parsed: Any, config: Any, log: Log, path: Path, flavour: Flavour
) -> None:
    with path.open("wb") as file:
        writer = _make_writer(trt, file)
        built = builder.build_serialized_network_to_stream(parsed, config, writer)
        if writer.error is not None:
            raise writer.error
    if not built or path.stat().st_size == 0:
        raise BuildError(f"{flavour.title} could not build the engine: {last_error(log)}")


def _make_writer(trt: Any, file: Any) -> Any:
    class FileWriter(trt.IStreamWriter):
        """TensorRT swallows what `write` raises and calls the build a success."""

        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.error: OSError | None = None

        def write(self, data: bytes) -> int:
            try:
                if self.error is None:
                    file.write(data)
            except OSError as error:
                self.error = error
            return len(data)

    return FileWriter()


def _die_with_parent() -> None:
    """A compiler that is killed leaves no build behind."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: list[str]) -> None:
    _die_with_parent()
    request = EngineRequest.read(Path(arguments[0]))
    try:
        content: dict[str, Any] = asdict(build(request))
    except OctavoError as error:
        content = {"error": str(error), "errno": None}
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        content = {"error": f"{type(error).__name__}: {error}", "errno": number}
    request.report.write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

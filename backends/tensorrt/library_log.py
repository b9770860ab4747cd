"""What TensorRT says while it works: errors for our own sentences, warnings for the manifest."""

from __future__ import annotations

from typing import Any, Protocol

_MOST_KEPT = 20


class Log(Protocol):
    """An `ILogger` that remembers."""

    errors: list[str]
    warnings: list[str]


def make_log(trt: Any) -> Log:
    """A logger of the library `trt`, whose class can only be derived from once it is loaded."""

    class KeptLog(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.warnings: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                kept = self.errors
            elif severity == trt.ILogger.Severity.WARNING:
                kept = self.warnings
            else:
                return
            line = " ".join(message.split())
            if line not in kept:
                kept.append(line)
                del kept[:-_MOST_KEPT]

    log: Log = KeptLog()
    return log


def last_error(log: Log) -> str:
    return log.errors[-1] if log.errors else "it gave no reason"

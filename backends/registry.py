"""Backends by name; a backend's library is imported only when it is chosen."""

from __future__ import annotations

import importlib

from octavo.backends.base import Backend
from octavo.graphs.errors import BackendError

_MODULES = {
    "inductor": "octavo.backends.inductor",
    "null": "octavo.backends.null",
    "onnxruntime": "octavo.backends.onnxruntime",
    "tensorrt": "octavo.backends.tensorrt",
    "tensorrt_rtx": "octavo.backends.tensorrt.rtx",
    "torch": "octavo.backends.torch",
    "torch_tensorrt": "octavo.backends.torch_tensorrt",
}


def names() -> tuple[str, ...]:
    return tuple(sorted(_MODULES))


def get(name: str) -> Backend:
    """The backend called `name`; raises BackendError if there is none or its library is missing."""
    if name not in _MODULES:
        raise BackendError(f"there is no backend {name!r}: choose one of {', '.join(names())}")
    try:
        backend: Backend = importlib.import_module(_MODULES[name]).BACKEND
    except (Exception, SystemExit) as error:  # a broken library may raise anything
        raise BackendError(
            f"the backend {name!r} cannot be used, its import failed with "
            f"{_first_line(error)}: install its extra of `octavo` again"
        ) from error
    return backend


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

"""The libraries that an engine is built with and needs again: versions, and importing them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from octavo.backends.base import Compatibility
from octavo.backends.libraries import release, version_of
from octavo.graphs.errors import BackendError

_NEEDED = ("torch", "torch-tensorrt")
# By any of these names; an engine runs only with the release that built it.
_TENSORRT = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")


def installed() -> dict[str, str]:
    """Versions by distribution; those that are not installed are left out."""
    found = {name: version_of(name) for name in (*_NEEDED, *_TENSORRT)}
    return {name: version for name, version in found.items() if version is not None}


def check_installed() -> Compatibility:
    for name in _NEEDED:
        if version_of(name) is None:
            return Compatibility(
                f"{name} is not installed: install Octavo with its extra [tensorrt]"
            )
    return Compatibility()


def check(built: Mapping[str, str]) -> Compatibility:
    """Compares the versions that built an engine with those here.

    A release of PyTorch reads its own archives; TensorRT runs engines of exactly its version.
    """
    here = installed()
    for name in (*_NEEDED, *_TENSORRT):
        was, now = built.get(name), here.get(name)
        if was is None:
            continue
        same = release(was) == release(now) if name in _NEEDED else was == now
        if not same:
            return Compatibility(
                f"the engine was built with {name} {was} and this machine has "
                f"{now or 'none'}: install {name} {was} or build the engine again"
            )
    return Compatibility()


def torch_tensorrt() -> Any:
    """The module; BackendError where it is installed and cannot be used, say without CUDA."""
    try:
        return importlib.import_module("torch_tensorrt")
    except Exception as error:  # it loads libraries of CUDA and TensorRT, in many ways
        raise BackendError(
            f"torch_tensorrt cannot be imported ({error}): install the CUDA and TensorRT libraries "
            "that its release needs"
        ) from error

"""TensorRT and TensorRT-RTX: one API, and what differs."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from octavo.backends.base import Tested
from octavo.backends.libraries import version_of
from octavo.graphs.errors import BackendError


@dataclass(frozen=True)
class Flavour:
    """One of the libraries that build and run TensorRT engines.

    distributions            which may bring it, the one asked for first
    extra                    of Octavo, that installs it
    sets_capabilities        whether a build names the compute capabilities that it is for; else it
                             is for the device it is built on
    tested                   how far Octavo's own tests have gone with it
    """

    name: str  # of the backend
    title: str  # in sentences
    module: str
    distributions: tuple[str, ...]
    extra: str
    sets_capabilities: bool
    tested: Tested

    @property
    def version(self) -> str | None:
        """Of the installed library; None where there is none. Imports nothing."""
        return version_of(*self.distributions)

    def load(self) -> Any:
        """The library itself; raises BackendError where it cannot be imported."""
        try:
            return importlib.import_module(self.module)
        except ImportError as error:
            raise BackendError(
                f"{self.title} cannot be imported ({error}): install Octavo with its extra "
                f"[{self.extra}] again"
            ) from error

    @property
    def missing(self) -> str:
        return (
            f"{self.title} is not installed here (there is no package {self.distributions[0]}): "
            f"install Octavo with its extra [{self.extra}]"
        )


TENSORRT = Flavour(
    name="tensorrt",
    title="TensorRT",
    module="tensorrt",
    distributions=("tensorrt-cu13", "tensorrt-cu12", "tensorrt"),
    extra="tensorrt",
    sets_capabilities=False,
    tested="simulated",
)
TENSORRT_RTX = Flavour(
    name="tensorrt_rtx",
    title="TensorRT-RTX",
    module="tensorrt_rtx",
    distributions=("tensorrt-rtx-cu13", "tensorrt-rtx-cu12", "tensorrt-rtx"),
    extra="tensorrt-rtx",
    sets_capabilities=True,
    tested="built",
)
FLAVOURS = {flavour.name: flavour for flavour in (TENSORRT, TENSORRT_RTX)}

# What TensorRT-RTX offers and the attention kernel runs on: Turing (7.5) has no bfloat16.
RTX_CAPABILITIES = ("8.0", "8.6", "8.9", "12.0", "12.1")
# Two binaries of the kernel, 8.0 and 12.0, would run on all of them; each gets its own tuning.
DEFAULT_RTX_CAPABILITIES = ("8.0", "8.6", "8.9", "12.0")

"""What the plugins of one engine share. TensorRT makes them, and passes nothing of ours on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from octavo.backends.gpu_attention import AttentionShape
    from octavo.backends.gpu_attention.launch import AttentionPointers


class Attention(Protocol):
    """One compiled kernel, loaded."""

    def launch(
        self,
        pointers: AttentionPointers,
        num_tokens: int,
        num_seqs: int,
        max_blocks: int,
        stream: int,
    ) -> None: ...


class Kernels(Protocol):
    """The loaded kernels of one engine."""

    def attention(self, shape: AttentionShape) -> Attention:
        """BackendError where the engine has none of that shape."""


@dataclass(frozen=True)
class Surroundings:
    """What the plugins of an engine share: its kernels, and where they say what failed."""

    kernels: Kernels
    errors: list[str]  # TensorRT keeps what Python raises to itself


@dataclass
class _Loading:
    surroundings: Surroundings | None = None


_loading = _Loading()
_loading_lock = threading.Lock()


@contextlib.contextmanager
def surrounded(surroundings: Surroundings) -> Iterator[None]:
    """For the plugins that TensorRT makes meanwhile, which it does while it loads an engine."""
    with _loading_lock:
        _loading.surroundings = surroundings
        try:
            yield
        finally:
            _loading.surroundings = None


def surroundings_of_new_plugins() -> Surroundings | None:
    """None while an engine is built: nothing is run then."""
    return _loading.surroundings


@contextlib.contextmanager
def noted(surroundings: Surroundings) -> Iterator[None]:
    """Keeps what is raised within for the error of the step."""
    try:
        yield
    except Exception as error:
        surroundings.errors.append(str(error))
        raise

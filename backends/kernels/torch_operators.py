"""The native kernels as operators of PyTorch, in a library of their own: `octavo_native`.

`octavo::norm`, say, stays the reference that the oracle runs; `octavo_native::norm` is the kernel.
Where an operator returns a changed cache, the native one changes the cache it is given. Only CPU
tensors; `torch.ops.octavo_native` may be compiled into a model, whose calls then need no Python.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from octavo.backends import kernels
from octavo.graphs.errors import BackendError
from octavo.graphs.ops import (
    accept_torch,
    activation_torch,
    fused_paged_attention_torch,
    linear_torch,
    norm_torch,
    paged_attention_torch,
    quantization_torch,
    quantized_linear_torch,
    torch_library,
)
from octavo.graphs.ops.accept import SCHEMA as ACCEPT
from octavo.graphs.ops.activation import ACTIVATE, ACTIVATE_QUANTIZE
from octavo.graphs.ops.fused_paged_attention import INT8_SCHEMA as FUSED_ATTENTION_INT8
from octavo.graphs.ops.fused_paged_attention import SCHEMA as FUSED_ATTENTION
from octavo.graphs.ops.linear import SCHEMA as LINEAR
from octavo.graphs.ops.norm import NORM, NORM_QUANTIZE
from octavo.graphs.ops.paged_attention import SCHEMA as PAGED_ATTENTION
from octavo.graphs.ops.quantization import SCHEMA as QUANTIZE
from octavo.graphs.ops.quantized_linear import SCHEMA as QUANTIZED_LINEAR
from octavo.graphs.ops.schema import OperatorSchema

LIBRARY = "octavo_native"

SCHEMAS = (
    ACCEPT,
    ACTIVATE,
    ACTIVATE_QUANTIZE,
    FUSED_ATTENTION,
    FUSED_ATTENTION_INT8,
    LINEAR,
    NORM,
    NORM_QUANTIZE,
    PAGED_ATTENTION,
    QUANTIZE,
    QUANTIZED_LINEAR,
)
# They register the references, whose results' shapes are those of the kernels.
REFERENCES = (
    accept_torch,
    activation_torch,
    fused_paged_attention_torch,
    linear_torch,
    norm_torch,
    paged_attention_torch,
    quantization_torch,
    quantized_linear_torch,
)

_torch_library: Any = torch.library  # it has no annotations


@functools.cache
def operators() -> dict[str, Any]:
    """The native operators by the name of the reference that each stands for (`norm`, ...).

    Registered on the first call. Raises BackendError where PyTorch or the library is too old.
    """
    native = _Native()
    library = _torch_library.Library(LIBRARY, "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema.in_place_torch_schema)
        _torch_library.register_fake(
            f"{LIBRARY}::{schema.name}", torch_library.in_place_shapes(schema), lib=library
        )
        native.implement(schema)
    _KEPT.append(library)
    namespace = getattr(torch.ops, LIBRARY)
    return {schema.name: getattr(namespace, schema.name).default for schema in SCHEMAS}


_KEPT: list[Any] = []  # a torch library takes its operators with it


def take_error() -> str:
    """What the native operator that failed last in this thread said, once: PyTorch may drop it."""
    return _Native().take_error()


class _Native:
    """The library's functions for PyTorch."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(kernels.library_path()))
        for name in ("octavo_torch_open", "octavo_torch_implement", "octavo_torch_take_error"):
            getattr(library, name).restype = ctypes.c_char_p
        self._library = library

    def implement(self, schema: OperatorSchema) -> None:
        torch_file = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
        _check(self._library.octavo_torch_open(str(torch_file).encode()))
        attributes = ",".join(f"{one.name}:{one.type}" for one in schema.attributes)
        names = (schema.onnx_name, f"{LIBRARY}::{schema.name}", attributes)
        _check(self._library.octavo_torch_implement(*(name.encode() for name in names)))

    def take_error(self) -> str:
        text: bytes = self._library.octavo_torch_take_error()
        return text.decode()


def _check(sentence: bytes | None) -> None:
    if sentence is not None:
        raise BackendError(
            f"the native operators cannot be used by torch {torch.__version__}: {sentence.decode()}"
        )

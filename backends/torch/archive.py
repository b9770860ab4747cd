"""Saving and opening an exported program without traces of the build machine or pickles."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from octavo.graphs.errors import BackendError
from octavo.graphs.ops import (
    accept_torch,
    activation_torch,
    fused_paged_attention_torch,
    linear_torch,
    norm_torch,
    quantization_torch,
    quantized_linear_torch,
)
from octavo.graphs.ops.paged_attention_torch import paged_attention_

# An archive calls their operators by name: they are registered when these are imported.
REFERENCES = (
    accept_torch,
    activation_torch,
    fused_paged_attention_torch,
    linear_torch,
    norm_torch,
    quantization_torch,
    quantized_linear_torch,
)

# Where in somebody's source a node was traced: file names and stacks.
_TRACES = ("from_node", "nn_module_stack", "source_fn_stack", "stack_trace", "torch_fn")


def save(exported: ExportedProgram, path: Path) -> None:
    """Writes a `.pt2` archive; the program's traces and example inputs are dropped for good."""
    drop_traces(exported)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(exported, path)


def drop_traces(exported: ExportedProgram) -> None:
    """Lets go of where the program was traced, and of example inputs, which would be pickled."""
    for node in exported.graph.nodes:
        for trace in _TRACES:
            node.meta.pop(trace, None)
    exported.example_inputs = None


def load(path: Path) -> Callable[..., Any]:
    """The program as a callable that changes the caches it is given in place."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = torch.export.load(path).module()
    except Exception as error:
        raise BackendError(
            f"torch {torch.__version__} cannot load {path} ({error}): build the engine again"
        ) from error
    if not isinstance(module, fx.GraphModule):
        raise BackendError(f"{path} holds no graph: build the engine again")
    for node in module.graph.nodes:
        if node.target is torch.ops.octavo.paged_attention.default:
            node.target = _attend_in_place
    module.recompile()
    return module


def _attend_in_place(
    query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    return paged_attention_(query, key, value, kv_cache, *rest), kv_cache

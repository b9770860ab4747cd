"""Opening an archive of TensorRT engines as a callable that changes its caches in place."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from octavo.backends.torch_cuda import operator
from octavo.backends.torch_tensorrt import libraries
from octavo.graphs.errors import BackendError
from octavo.graphs.ops.paged_attention_torch import OPERATOR as PAGED_ATTENTION


class LoadedProgram:
    """Takes and gives every tensor for itself, the caches last."""

    def __init__(self, path: Path, num_attentions: int) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = libraries.torch_tensorrt().load(str(path)).module(check_guards=False)
        except BackendError:
            raise
        except Exception as error:
            raise BackendError(
                f"torch_tensorrt cannot load {path} ({error}): build the engine again"
            ) from error
        found = _attend_in_place(module)
        if found != num_attentions:
            raise BackendError(
                f"{path} has {found} attention layers that PyTorch runs, the model has "
                f"{num_attentions}: build the engine again"
            )
        self._module: Any = module

    def __call__(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """The outputs' tensors; of the caches, those that were given."""
        return list(self._module(*arguments))


def _attend_in_place(module: torch.nn.Module) -> int:
    """Swaps the operator in every graph of the module; how often it was there."""
    count = 0
    for part in module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        nodes = [node for node in part.graph.nodes if node.target is PAGED_ATTENTION]
        for node in nodes:
            node.target = _attend
        if nodes:
            part.recompile()
        count += len(nodes)
    return count


def _attend(
    query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """The functional operator's results, the cache being the one that was given."""
    return operator.operator()(query, key, value, kv_cache, *rest), kv_cache

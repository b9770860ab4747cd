"""`octavo_gpu::paged_attention`: the operator that changes its cache, for tensors on the device.

On CUDA it is the kernel of `octavo.backends.gpu_attention`; on a CPU the reference, which lets an
engine's graph be run there.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from octavo.graphs.ops import torch_library
from octavo.graphs.ops.paged_attention import SCHEMA
from octavo.graphs.ops.paged_attention_torch import paged_attention_ as reference

LIBRARY = "octavo_gpu"

_torch_library: Any = torch.library  # it has no annotations


@functools.cache
def operator() -> Any:
    """The operator, which is registered on the first call; attributes as in the schema."""
    library = _torch_library.Library(LIBRARY, "FRAGMENT")
    library.define(SCHEMA.in_place_torch_schema)
    shapes = torch_library.in_place_shapes(SCHEMA)
    _torch_library.register_fake(f"{LIBRARY}::{SCHEMA.name}", shapes, lib=library)
    library.impl(SCHEMA.name, reference, "CPU")
    library.impl(SCHEMA.name, _on_cuda, "CUDA")
    _KEPT.append(library)
    return getattr(getattr(torch.ops, LIBRARY), SCHEMA.name).default


_KEPT: list[Any] = []  # a torch library takes its operators with it


def _on_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    prefix_offsets: Tensor,
    sinks: Tensor,
    alibi_slopes: Tensor,
    scale: float,
    causal: int,
    sliding_window: int,
    softcap: float,
    k_transposed: int,
) -> Tensor:
    if k_transposed:
        raise ValueError("the kernel for CUDA reads keys of the reference layout only")
    shape = _shape(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_size=query.shape[2],
        value_head_size=value.shape[2],
        block_size=kv_cache.shape[3],
        scale=scale,
        causal=bool(causal),
        sliding_window=sliding_window,
        softcap=softcap,
        has_sinks=sinks.numel() > 0,
        has_alibi=alibi_slopes.numel() > 0,
        dtype=_name(query.dtype),
        cache_dtype=_name(kv_cache.dtype),
    )
    # The kernel finds rows by their size: views of a fused product are copied.
    attention: Tensor = _kernel().paged_attention_(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        kv_cache,
        slot_mapping,
        block_tables,
        query_start_loc,
        prefix_offsets,
        sinks,
        alibi_slopes,
        shape,
    )
    return attention


@functools.cache
def _kernel() -> Any:
    """Imported when it is first called: Triton comes with it."""
    return importlib.import_module("octavo.backends.gpu_attention.torch_attention")


@functools.cache
def _shape(**sizes: Any) -> Any:
    """One object for each layer's attention: kernels are kept by it."""
    return importlib.import_module("octavo.backends.gpu_attention").AttentionShape(**sizes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""The ranges of shapes that the inputs of an engine take, from the engine's profiles.

Torch-TensorRT takes one range for each input: it spans all profiles, and its typical shape is that
of the first one, decode, whose steps are the most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.backends.base import BuildOptions
from octavo.backends.manifest import Profile, Range
from octavo.graphs.bindings import CACHE_BLOCKS, LOGITS_ROWS, Binding
from octavo.graphs.program import CapturedProgram


@dataclass(frozen=True)
class InputShape:
    name: str
    dtype: torch.dtype
    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


def input_shapes(program: CapturedProgram, options: BuildOptions) -> list[InputShape]:
    """Of every input, then of every cache, in the order of the program's arguments."""
    ranges = _spanned(options.profiles)
    limits = options.limits
    # Caches go to no engine, only to attention. At most every sequence has its longest.
    most_blocks = max(2, limits.max_num_seqs * limits.max_blocks_per_seq)
    ranges[CACHE_BLOCKS] = Range(min=1, opt=2, max=most_blocks)
    caches = program.spec.kv_cache_bindings(limits.block_size, options.kv_cache_dtype)
    return [_shape(binding, ranges) for binding in (*program.inputs, *caches)]


def _spanned(profiles: tuple[Profile, ...]) -> dict[str, Range]:
    """The range of each symbolic dimension over all profiles."""
    ranges = {
        dim: Range(
            min=min(profile.dims[dim].min for profile in profiles),
            opt=profiles[0].dims[dim].opt,
            max=max(profile.dims[dim].max for profile in profiles),
        )
        for dim in profiles[0].dims
    }
    # TensorRT has no empty tensors to compute with: a step that wants no logits asks for a row.
    rows = ranges[LOGITS_ROWS]
    ranges[LOGITS_ROWS] = rows.model_copy(update={"min": max(1, rows.min)})
    return ranges


def _shape(binding: Binding, ranges: dict[str, Range]) -> InputShape:
    sizes = [
        ranges[size] if isinstance(size, str) else Range(min=size, opt=size, max=size)
        for size in binding.shape
    ]
    return InputShape(
        name=binding.name,
        dtype=getattr(torch, binding.dtype),
        min=tuple(size.min for size in sizes),
        opt=tuple(size.opt for size in sizes),
        max=tuple(size.max for size in sizes),
    )

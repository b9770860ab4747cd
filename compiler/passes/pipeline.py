"""The order of the passes, and the shape of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch.export import ExportedProgram

from octavo.compiler.passes.batch_views import remove_identity_views, split_batch_views
from octavo.compiler.passes.conv1d import conv1d
from octavo.compiler.passes.dead_code import remove_dead_code
from octavo.compiler.passes.flatten_batch import flatten_batch
from octavo.compiler.passes.functionalize import functionalize
from octavo.compiler.passes.fuse_activations import fuse_activations
from octavo.compiler.passes.fuse_attention import fuse_attention
from octavo.compiler.passes.fuse_norms import fuse_norms
from octavo.compiler.passes.fuse_quantize import fuse_quantize
from octavo.compiler.passes.fuse_residuals import fuse_residuals
from octavo.compiler.passes.merge_projections import merge_projections
from octavo.compiler.passes.quantize import quantize_weights
from octavo.compiler.passes.quantize_cache import quantize_cache
from octavo.compiler.passes.quantize_embeddings import quantize_embeddings
from octavo.compiler.passes.select_rows import select_rows
from octavo.graphs.ops.activation import ACTIVATE, ACTIVATE_QUANTIZE
from octavo.graphs.ops.fused_paged_attention import SCHEMA as FUSED_ATTENTION
from octavo.graphs.ops.linear import LINEAR_RESIDUAL
from octavo.graphs.ops.norm import NORM, NORM_QUANTIZE
from octavo.graphs.program import CapturedProgram
from octavo.graphs.spec import CacheDType, PassRecord, Quantization

if TYPE_CHECKING:
    from octavo.compiler.quantization.gguf_blocks import GgufBlocks

# A pass returns a program that computes the same, and its record.
Pass = Callable[[ExportedProgram], tuple[ExportedProgram, PassRecord]]

NORMALISE: tuple[Pass, ...] = (
    functionalize,
    remove_dead_code,
    split_batch_views,
    flatten_batch,
    remove_identity_views,
    conv1d,
)


@dataclass(frozen=True)
class Fusion:
    """A pass that writes operators of ours: run where the backend has kernels for them all."""

    name: str
    apply: Pass
    operators: frozenset[str]


FUSIONS = (
    Fusion("merge_projections", merge_projections, frozenset({FUSED_ATTENTION.name})),
    Fusion("fuse_attention", fuse_attention, frozenset({FUSED_ATTENTION.name})),
    Fusion("fuse_norms", fuse_norms, frozenset({NORM.name})),
    Fusion("fuse_activations", fuse_activations, frozenset({ACTIVATE.name})),
    Fusion("fuse_residuals", fuse_residuals, frozenset({LINEAR_RESIDUAL.name})),
    # A row's bits may not depend on how many there are, which holds for our own operators.
    Fusion("select_rows", select_rows, frozenset({LINEAR_RESIDUAL.name, NORM.name})),
)
# What reads or writes quantised activations: run after the layers are quantised.
QUANTIZED_FUSIONS = (
    Fusion("fuse_quantize", fuse_quantize, frozenset({NORM_QUANTIZE.name, ACTIVATE_QUANTIZE.name})),
)


@dataclass(frozen=True)
class PassOptions:
    """What a backend and the user ask of the graph."""

    operators: frozenset[str]  # Octavo's operators that the backend runs natively
    quantization: Quantization = "none"
    kv_cache_dtype: CacheDType = "float32"


def run_passes(program: CapturedProgram, options: PassOptions) -> CapturedProgram:
    """The passes that leave floats floats: their results differ by rounding errors only."""
    operators = options.operators
    if options.kv_cache_dtype == "int8":
        operators |= {FUSED_ATTENTION.name}  # the only attention that has an int8 form
    exported, records = program.exported, list(program.records)
    for apply in NORMALISE:
        exported, record = apply(exported)
        records.append(record)
    return _fused(replace(program, exported=exported, records=tuple(records)), FUSIONS, operators)


def run_quantization(
    program: CapturedProgram, options: PassOptions, blocks: GgufBlocks | None = None
) -> CapturedProgram:
    """Weights, activations and cache become integers, which moves results by what they round.

    `blocks`: what the weights of the checkpoint were dequantised from. Raises BuildError where the
    cache cannot be of integers.
    """
    exported, records = program.exported, list(program.records)
    if options.quantization != "none":
        exported, record = quantize_weights(exported, options.quantization, blocks)
        exported, tables = quantize_embeddings(exported, blocks)
        records += [record, tables]
        program = replace(program, exported=exported, records=tuple(records))
        program = _fused(program, QUANTIZED_FUSIONS, options.operators)
        exported, records = program.exported, list(program.records)
    if options.kv_cache_dtype == "int8":
        exported, record = quantize_cache(exported)
        records.append(record)
    return replace(program, exported=exported, records=tuple(records))


def _fused(
    program: CapturedProgram, fusions: tuple[Fusion, ...], operators: frozenset[str]
) -> CapturedProgram:
    exported, records = program.exported, list(program.records)
    for fusion in fusions:
        missing = sorted(fusion.operators - operators)
        if missing:
            reason = f"the backend has no kernel for {', '.join(missing)}"
            records.append(PassRecord(name=fusion.name, matches=0, skipped=(reason,)))
            continue
        exported, record = fusion.apply(exported)
        records.append(record)
    return replace(program, exported=exported, records=tuple(records))

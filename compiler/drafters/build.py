"""A drafter becomes a bundle of its own inside the engine's: captured, compiled, written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from octavo.backends.base import Backend, BuildOptions
from octavo.backends.bundle import MANIFEST_NAME
from octavo.backends.manifest import Manifest
from octavo.compiler.capture import capture, max_positions
from octavo.compiler.config import SpeculativeConfig
from octavo.compiler.drafters.base import DrafterCheckpoint, ModuleCheckpoint, TargetWeights
from octavo.compiler.drafters.capture import capture_drafter
from octavo.compiler.drafters.draft_model import DraftModelCheckpoint
from octavo.compiler.graph_build import compile_graph, graph_manifest
from octavo.compiler.stages import Stages
from octavo.graphs.errors import BuildError
from octavo.graphs.program import CapturedProgram
from octavo.graphs.spec import ModelSpec

FOLDER = "drafter"


@dataclass(frozen=True)
class BuiltDrafter:
    path: str  # of its folder in the bundle
    size_bytes: int


def build_drafter(
    checkpoint: DrafterCheckpoint,
    config: SpeculativeConfig,
    target: ModelSpec,
    weights: TargetWeights,
    backend: Backend,
    options: BuildOptions,
    staging: Path,
) -> BuiltDrafter:
    """Writes `drafter/<method>` into `staging`, with the limits of its target.

    Its cache has the dtype of its weights. Raises CheckpointError, UnsupportedModelError or
    BuildError.
    """
    own = replace(
        options,
        kv_cache_dtype=options.dtype,
        quantization=config.quantization or options.quantization,
    )
    dtype: torch.dtype = getattr(torch, options.dtype)
    program = _captured(checkpoint, target, weights, own, dtype)
    program = compile_graph(program, backend, own, Stages())
    folder = staging / FOLDER / config.method
    folder.mkdir(parents=True)
    built = backend.build(program, own, folder)
    manifest: Manifest = graph_manifest(program, backend, own, built)
    (folder / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return BuiltDrafter(folder.relative_to(staging).as_posix(), size)


def _captured(
    checkpoint: DrafterCheckpoint,
    target: ModelSpec,
    weights: TargetWeights,
    options: BuildOptions,
    dtype: torch.dtype,
) -> CapturedProgram:
    if isinstance(checkpoint, DraftModelCheckpoint):
        own, length = checkpoint.checkpoint, options.limits.max_model_len
        most = max_positions(own.config, length)
        if most < length:
            raise BuildError(
                f"{own.path} has {most} positions, the engine's max_model_len is {length}: build "
                f"with --max-model-len {most} or choose another draft model"
            )
        return capture(own.load_model(dtype), own.token_facts(), options.limits, dtype)
    assert isinstance(checkpoint, ModuleCheckpoint)
    module = checkpoint.load_module(weights, dtype)
    return capture_drafter(module, checkpoint.method, target, options.limits, dtype)

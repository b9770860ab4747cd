"""The pipeline: checkpoint -> capture -> passes -> proof -> backend build -> bundle."""

from __future__ import annotations

import contextlib
import importlib.metadata
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.backends import registry
from octavo.backends.base import Backend, BuildOptions, BuiltFiles, Report
from octavo.backends.manifest import BindingRecord, Manifest
from octavo.compiler import build_cache, memory
from octavo.compiler.checkpoints import Checkpoint, open_checkpoint
from octavo.compiler.config import BuildConfig
from octavo.compiler.profiles import make_profiles
from octavo.compiler.publish import (
    OutputBusyError,
    check_free_space,
    publish,
    require_replaceable,
    staging_folder,
)
from octavo.compiler.stages import StageObserver, StageRecord, Stages
from octavo.graphs import bindings
from octavo.graphs.errors import BuildError, UnsupportedModelError
from octavo.graphs.spec import ModelSpec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from octavo.compiler.quantization.gguf_blocks import GgufBlocks
    from octavo.graphs.program import CapturedProgram

_VERSIONED = ("octavo", "torch", "transformers")
# Nodes named in an error: enough to see the pattern.
_NODES_SHOWN = 3
_BUSY_WAIT_SECONDS = 0.5


@dataclass(frozen=True)
class BuildResult:
    path: Path
    manifest: Manifest
    stages: tuple[StageRecord, ...]
    from_cache: bool


def build_engine(config: BuildConfig, observer: StageObserver | None = None) -> BuildResult:
    """Builds `config.model` into an engine bundle at `config.output`.

    An engine already there is replaced at once, when the new one is whole. Raises CheckpointError,
    UnsupportedModelError or BuildError; then nothing is left behind.
    """
    stages = Stages(observer)
    output = config.output.expanduser()
    require_replaceable(output)
    backend = registry.get(config.backend)
    backend.require(config.weights_dtype, config.cache_dtype, config.block_size)
    checkpoint, key = _opened(config, stages)
    if config.use_cache:
        with stages.stage("cache") as stage:
            manifest = build_cache.materialise(key, output)
            stage.size = _size(manifest) if manifest else None
        if manifest is not None:
            return BuildResult(output, manifest, stages.records, from_cache=True)
    manifest = _build(config, checkpoint, output, stages)
    if config.use_cache:
        # The engine is built: a full cache disk is no reason to fail.
        with stages.stage("store in cache"), contextlib.suppress(BuildError):
            build_cache.store(key, output)
    return BuildResult(output, manifest, stages.records, from_cache=False)


def cached_engine(model: str, observer: StageObserver | None = None) -> Path:
    """The engine of a checkpoint with the default options, built on first use and kept.

    Waits for another process that builds the same engine.
    """
    stages = Stages(observer)
    config = BuildConfig(model=model, output=build_cache.cache_root())
    checkpoint, key = _opened(config, stages)
    while (entry := build_cache.lookup(key)) is None:
        try:
            _build(config, checkpoint, build_cache.cache_root() / key, stages)
            build_cache.evict(build_cache.max_bytes(), keep=build_cache.cache_root() / key)
        except OutputBusyError:
            time.sleep(_BUSY_WAIT_SECONDS)
    return entry


def _opened(config: BuildConfig, stages: Stages) -> tuple[Checkpoint, str]:
    """The checkpoint and the key of its engine, without importing torch or transformers."""
    with stages.stage("checkpoint"):
        checkpoint = open_checkpoint(config.model, trust_remote_code=config.trust_remote_code)
        # Limits and profiles follow from the checkpoint, these options and our own source.
        options = config.model_dump(mode="json", exclude={"model", "output", "use_cache"})
        key = build_cache.cache_key({"checkpoint": checkpoint.content_digest(), **options})
    return checkpoint, key


def _build(config: BuildConfig, checkpoint: Checkpoint, output: Path, stages: Stages) -> Manifest:
    backend = registry.get(config.backend)
    with staging_folder(output) as staging:
        with stages.stage("config"):
            import torch  # takes seconds, as does transformers for the config

            from octavo.compiler.capture import max_positions

            positions = max_positions(checkpoint.config, config.max_model_len)
            limits = config.limits(positions)
            name = config.weights_dtype
            options = BuildOptions(
                limits, make_profiles(limits), name, config.cache_dtype, config.quantization
            )
            dtype: torch.dtype = getattr(torch, name)
        with _weights_in_files(options, staging):
            program = _captured(checkpoint, options, dtype, output, stages)
            program = _compiled(program, checkpoint, backend, options, dtype, stages)
        _require_supported(program.spec, backend.name, backend.supports(program))
        with stages.stage(backend.name) as stage:
            built = backend.build(program, options, staging)
            stage.size = sum((staging / file).stat().st_size for file in built.files)
        with stages.stage("tokenizer"):
            checkpoint.write_tokenizer(staging)
        with stages.stage("publish") as stage:
            manifest = publish(staging, output, _manifest(program, backend, options, built))
            stage.size = _size(manifest)
    return manifest


def _weights_in_files(options: BuildOptions, staging: Path) -> AbstractContextManager[None]:
    """Floats that integers take the place of need no memory of their own."""
    if options.quantization == "none":
        return contextlib.nullcontext()
    return memory.weights_in_files(staging)


def _captured(
    checkpoint: Checkpoint,
    options: BuildOptions,
    dtype: torch.dtype,
    output: Path,
    stages: Stages,
) -> CapturedProgram:
    """Only the program survives: the model itself would keep weights that passes let go."""
    from octavo.compiler.capture import capture

    with stages.stage("weights") as stage:
        model = checkpoint.load_model(dtype)
        stage.size = _weight_bytes(model)
        check_free_space(output, stage.size)
    with stages.stage("capture"):
        return capture(model, checkpoint.token_facts(), options.limits, dtype)


def _compiled(
    program: CapturedProgram,
    checkpoint: Checkpoint,
    backend: Backend,
    options: BuildOptions,
    dtype: torch.dtype,
    stages: Stages,
) -> CapturedProgram:
    from octavo.compiler.passes import PassOptions, run_passes, run_quantization

    wanted = PassOptions(backend.operators, options.quantization, options.kv_cache_dtype)
    with stages.stage("passes"):
        program = run_passes(program, wanted)
        memory.release()
    with stages.stage("proof"):
        # Of floats: what is rounded to integers turns the last bit of a sum into a visible step.
        _prove(program, dtype)
        memory.release()
    if options.quantization == "none" and options.kv_cache_dtype == options.dtype:
        return program
    with stages.stage("quantize"):
        program = run_quantization(program, wanted, _blocks(checkpoint, options))
        memory.release()
    return program


def _blocks(checkpoint: Checkpoint, options: BuildOptions) -> GgufBlocks | None:
    tensors = checkpoint.gguf_tensors()
    if options.quantization == "none" or not tensors:
        return None
    from octavo.compiler.quantization.gguf_blocks import GgufBlocks

    return GgufBlocks(tensors)


def _prove(program: CapturedProgram, dtype: torch.dtype) -> None:
    from octavo.compiler.isolation import graph_tracer, prove_isolation

    prove_isolation(graph_tracer(program.exported), program.spec, program.block_size, dtype)


def _require_supported(spec: ModelSpec, backend: str, report: Report) -> None:
    if report.ok:
        return
    nodes = report.unsupported
    shown = "; ".join(f"{n.node} ({n.op}): {n.reason}" for n in nodes[:_NODES_SHOWN])
    more = f" and {len(nodes) - _NODES_SHOWN} more" if len(nodes) > _NODES_SHOWN else ""
    raise UnsupportedModelError(
        f"{spec.architecture} has {len(nodes)} nodes that the {backend} backend cannot run, "
        f"{shown}{more}: choose another backend"
    )


def _manifest(
    program: CapturedProgram,
    backend: Backend,
    options: BuildOptions,
    built: BuiltFiles,
) -> Manifest:
    spec, block_size = program.spec, options.limits.block_size
    caches = [_record(b) for b in spec.kv_cache_bindings(block_size, options.kv_cache_dtype)]
    changed = [
        cache.model_copy(update={"name": bindings.cache_output_name(cache.name)})
        for cache in caches
    ]
    versions = {name: importlib.metadata.version(name) for name in _VERSIONED}
    return Manifest(
        backend=backend.name,
        spec=spec,
        limits=options.limits,
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        kv_layout=built.kv_layout,
        quantization=options.quantization,
        inputs=(*map(_record, bindings.STEP_INPUTS), *caches),
        outputs=(_record(bindings.logits(spec.vocab_size)), *changed),
        profiles=options.profiles,
        passes=program.records,
        target=built.target,
        versions={**versions, **built.versions},
        backend_data=dict(built.backend_data),
    )


def _record(binding: bindings.Binding) -> BindingRecord:
    return BindingRecord(name=binding.name, dtype=binding.dtype, shape=binding.shape)


def _weight_bytes(model: PreTrainedModel) -> int:
    """Tied parameters count once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _size(manifest: Manifest) -> int:
    return sum(record.size for record in manifest.files)

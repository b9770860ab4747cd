"""The pipeline: checkpoint -> capture -> passes -> proof -> backend build -> bundle."""

from __future__ import annotations

import contextlib
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from octavo.backends import registry
from octavo.backends.base import BuildOptions
from octavo.backends.manifest import DrafterRecord, Manifest
from octavo.compiler import build_cache, memory
from octavo.compiler.checkpoints import Checkpoint, open_checkpoint
from octavo.compiler.config import BuildConfig, SpeculativeConfig
from octavo.compiler.drafters import DrafterCheckpoint, TargetFacts, open_drafter
from octavo.compiler.profiles import make_profiles
from octavo.compiler.publish import (
    OutputBusyError,
    check_free_space,
    publish,
    require_replaceable,
    staging_folder,
)
from octavo.compiler.stages import StageObserver, StageRecord, Stages
from octavo.graphs.errors import BuildError
from octavo.graphs.spec import ModelSpec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from octavo.compiler.drafters import TargetWeights
    from octavo.compiler.hidden_states import CaptureHidden
    from octavo.compiler.quantization.gguf_blocks import GgufBlocks
    from octavo.graphs.program import CapturedProgram

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
    kind = config.kind(backend.devices)
    backend.require(kind, config.block_size)
    ready = backend.can_build(kind)
    if not ready.ok:
        raise BuildError(f"the {backend.name} backend cannot build here: {ready.reason}")
    opened = _opened(config, stages)
    if config.use_cache:
        with stages.stage("cache") as stage:
            manifest = build_cache.materialise(opened.key, output)
            stage.size = _size(manifest) if manifest else None
        if manifest is not None:
            return BuildResult(output, manifest, stages.records, from_cache=True)
    manifest = _build(config, opened, output, stages)
    if config.use_cache:
        # The engine is built: a full cache disk is no reason to fail.
        with stages.stage("store in cache"), contextlib.suppress(BuildError):
            build_cache.store(opened.key, output)
    return BuildResult(output, manifest, stages.records, from_cache=False)


def cached_engine(model: str, observer: StageObserver | None = None) -> Path:
    """The engine of a checkpoint with the default options, built on first use and kept.

    Waits for another process that builds the same engine.
    """
    stages = Stages(observer)
    config = BuildConfig(model=model, output=build_cache.cache_root())
    opened = _opened(config, stages)
    place = build_cache.cache_root() / opened.key
    while (entry := build_cache.lookup(opened.key)) is None:
        try:
            _build(config, opened, place, stages)
            build_cache.evict(build_cache.max_bytes(), keep=place)
        except OutputBusyError:
            time.sleep(_BUSY_WAIT_SECONDS)
    return entry


@dataclass(frozen=True)
class _Drafter:
    config: SpeculativeConfig
    checkpoint: DrafterCheckpoint


@dataclass(frozen=True)
class _Opened:
    """Checked files, and the key of the engine that they make."""

    checkpoint: Checkpoint
    drafters: tuple[_Drafter, ...]  # those that are compiled
    key: str


def _opened(config: BuildConfig, stages: Stages) -> _Opened:
    """Without importing torch, or transformers unless a drafter is to be compared with its target.

    Limits and profiles follow from the checkpoints, the options and our own source.
    """
    with stages.stage("checkpoint"):
        checkpoint = open_checkpoint(config.model, trust_remote_code=config.trust_remote_code)
        drafters = _open_drafters(config, checkpoint)
        options = config.model_dump(mode="json", exclude={"model", "output", "use_cache"})
        for drafter in options["speculative"]:
            del drafter["model"]  # its content counts, not where it lies
        contents = [one.checkpoint.content_digest() for one in drafters]
        parts = {"checkpoint": checkpoint.content_digest(), "drafters": contents, **options}
        return _Opened(checkpoint, drafters, build_cache.cache_key(parts))


def _open_drafters(config: BuildConfig, checkpoint: Checkpoint) -> tuple[_Drafter, ...]:
    most = config.max_num_batched_tokens - 1
    for drafter in config.speculative:
        if drafter.num_speculative_tokens > most:
            raise BuildError(
                f"num_speculative_tokens={drafter.num_speculative_tokens} and the token before "
                f"them do not fit into a step of max_num_batched_tokens "
                f"{config.max_num_batched_tokens}: choose at most {most}"
            )
    compiled = [drafter for drafter in config.speculative if drafter.method != "ngram"]
    if not compiled:
        return ()
    text = checkpoint.config.get_text_config()
    facts = TargetFacts(
        checkpoint=checkpoint,
        hidden_size=int(text.hidden_size),
        vocab_size=int(text.vocab_size),
        num_layers=int(text.num_hidden_layers),
        model_type=str(checkpoint.config.model_type),
    )
    return tuple(_Drafter(drafter, open_drafter(drafter, facts)) for drafter in compiled)


def _wanted_hidden(drafters: tuple[_Drafter, ...]) -> CaptureHidden | None:
    """What the drafters read of their target; BuildError if they cannot share one output."""
    wanted = [(one, hidden) for one in drafters if (hidden := one.checkpoint.hidden()) is not None]
    for one, hidden in wanted[1:]:
        if hidden != wanted[0][1]:
            raise BuildError(
                f"the drafters {wanted[0][0].config.method} and {one.config.method} read different "
                "hidden states of the model, and an engine returns one kind: build with one of them"
            )
    return wanted[0][1] if wanted else None


def _build(config: BuildConfig, opened: _Opened, output: Path, stages: Stages) -> Manifest:
    checkpoint = opened.checkpoint
    backend = registry.get(config.backend)
    with staging_folder(output) as staging:
        with stages.stage("config"):
            import torch  # takes seconds, as does transformers for the config

            from octavo.compiler.capture import max_positions
            from octavo.compiler.graph_build import compile_graph, graph_manifest

            positions = max_positions(checkpoint.config, config.max_model_len)
            limits = config.limits(positions)
            options = BuildOptions(
                **vars(config.kind(backend.devices)),
                limits=limits,
                profiles=make_profiles(limits, config.max_draft_tokens),
                tensorrt=config.tensorrt.options,
            )
            dtype: torch.dtype = getattr(torch, config.weights_dtype)
        with _weights_in_files(options, staging):
            program, weights = _captured(opened, options, dtype, output, stages)
            blocks = _blocks(checkpoint, options)
            program = compile_graph(program, backend, options, stages, blocks)
            drafters = _drafters(config, opened, program.spec, weights, options, staging, stages)
            accept_file = _accept_file(opened, program.spec, config.backend, staging, stages)
        with stages.stage(backend.name) as stage:
            built = backend.build(program, options, staging)
            stage.size = sum((staging / file).stat().st_size for file in built.files)
        with stages.stage("tokenizer"):
            checkpoint.write_tokenizer(staging)
        with stages.stage("publish") as stage:
            manifest = graph_manifest(program, backend, options, built).model_copy(
                update={
                    "max_draft_tokens": config.max_draft_tokens,
                    "drafters": drafters,
                    "accept_file": accept_file,
                }
            )
            manifest = publish(staging, output, manifest)
            stage.size = _size(manifest)
    return manifest


def _drafters(
    config: BuildConfig,
    opened: _Opened,
    target: ModelSpec,
    weights: TargetWeights | None,
    options: BuildOptions,
    staging: Path,
    stages: Stages,
) -> tuple[DrafterRecord, ...]:
    """Builds those that are compiled into `staging`; records of all, in the user's order."""
    paths: dict[str, str] = {}
    if weights is not None:
        from octavo.compiler.drafters.build import build_drafter

        backend = registry.get(config.backend)
        for one in opened.drafters:
            with stages.stage(one.config.method) as stage:
                drafter = build_drafter(
                    one.checkpoint, one.config, target, weights, backend, options, staging
                )
                stage.size = drafter.size_bytes
            paths[one.config.method] = drafter.path
    return tuple(
        DrafterRecord(
            method=drafter.method,
            num_speculative_tokens=drafter.num_speculative_tokens,
            path=paths.get(drafter.method),
            prompt_lookup_min=drafter.prompt_lookup_min,
            prompt_lookup_max=drafter.prompt_lookup_max,
        )
        for drafter in config.speculative
    )


def _accept_file(
    opened: _Opened, spec: ModelSpec, backend: str, staging: Path, stages: Stages
) -> str | None:
    """The acceptance graph, for drafters that can tell how likely their drafts are."""
    if not opened.drafters:
        return None
    from octavo.graphs.accept import export_accept

    with stages.stage("accept"):
        return registry.get(backend).build_accept(export_accept(spec.sampled_vocab_size), staging)


def _weights_in_files(options: BuildOptions, staging: Path) -> AbstractContextManager[None]:
    """Floats that integers take the place of need no memory of their own."""
    if options.quantization == "none":
        return contextlib.nullcontext()
    return memory.weights_in_files(staging)


def _captured(
    opened: _Opened, options: BuildOptions, dtype: torch.dtype, output: Path, stages: Stages
) -> tuple[CapturedProgram, TargetWeights | None]:
    """Only the program survives, and what drafters share: the model itself would keep weights that
    passes let go."""
    from octavo.compiler.capture import capture
    from octavo.compiler.drafters import TargetWeights

    with stages.stage("weights") as stage:
        model = opened.checkpoint.load_model(dtype)
        stage.size = _weight_bytes(model)
        check_free_space(output, stage.size)
    weights = None
    if opened.drafters:
        whole = cast(Any, model)
        weights = TargetWeights(
            embedding=whole.get_input_embeddings().weight.detach(),
            head=whole.get_output_embeddings().weight.detach(),
        )
    with stages.stage("capture"):
        hidden = _wanted_hidden(opened.drafters)
        facts = opened.checkpoint.token_facts()
        return capture(model, facts, options.limits, dtype, hidden), weights


def _blocks(checkpoint: Checkpoint, options: BuildOptions) -> GgufBlocks | None:
    tensors = checkpoint.gguf_tensors()
    if options.quantization == "none" or not tensors:
        return None
    from octavo.compiler.quantization.gguf_blocks import GgufBlocks

    return GgufBlocks(tensors)


def _weight_bytes(model: PreTrainedModel) -> int:
    """Tied parameters count once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _size(manifest: Manifest) -> int:
    return sum(record.size for record in manifest.files)

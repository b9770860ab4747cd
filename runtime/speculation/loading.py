"""Opens the drafters of an engine bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from octavo.backends import registry
from octavo.backends.base import LoadOptions
from octavo.backends.bundle import read_manifest
from octavo.runtime.speculation.draft_controller import DraftController
from octavo.runtime.speculation.draft_sampler import DraftSampler
from octavo.runtime.speculation.heads import HeadsDrafter
from octavo.runtime.speculation.ngram import NgramDrafter
from octavo.runtime.speculation.options import NGRAM, DrafterOptions, SpeculativeOptions
from octavo.runtime.speculation.paged_drafter import DraftModelDrafter, FeatureDrafter
from octavo.runtime.speculation.speculator import Speculator

if TYPE_CHECKING:
    from octavo.backends.manifest import Manifest
    from octavo.runtime.capacity import EngineLimits
    from octavo.runtime.speculation.drafter import Drafter


def drafter_manifests(bundle: Path, options: SpeculativeOptions) -> dict[str, Manifest]:
    """The manifests of compiled drafters, by method."""
    return {
        drafter.method: read_manifest(bundle / drafter.path)
        for drafter in options.drafters
        if drafter.path is not None
    }


def load_speculator(
    bundle: Path,
    options: SpeculativeOptions,
    manifests: dict[str, Manifest],
    limits: EngineLimits,
    sampled_vocab_size: int,
    num_threads: int | None,
) -> Speculator | None:
    """None where nothing is drafted. The bundle's files were verified with the engine's.

    Raises BackendError or MemoryError; nothing stays open then.
    """
    if not options.drafters:
        return None
    drafters: list[Drafter] = []
    try:
        for one in options.drafters:
            manifest = manifests.get(one.method)
            drafters.append(
                _ngram(one, sampled_vocab_size)
                if manifest is None
                else _compiled(
                    bundle, one, manifest, options, limits, sampled_vocab_size, num_threads
                )
            )
    except BaseException:
        for drafter in drafters:
            drafter.close()
        raise
    lengths = {one.method: one.num_speculative_tokens for one in options.drafters}
    return Speculator(drafters, DraftController(lengths, adaptive=options.adaptive), limits)


def _ngram(options: DrafterOptions, sampled_vocab_size: int) -> Drafter:
    assert options.method == NGRAM
    return NgramDrafter(
        options.prompt_lookup_min, options.prompt_lookup_max, sampled_vocab_size=sampled_vocab_size
    )


def _compiled(
    bundle: Path,
    options: DrafterOptions,
    manifest: Manifest,
    speculative: SpeculativeOptions,
    limits: EngineLimits,
    sampled_vocab_size: int,
    num_threads: int | None,
) -> Drafter:
    assert options.path is not None
    backend = registry.get(manifest.backend)
    executable = backend.load(bundle / options.path, manifest, LoadOptions(num_threads=num_threads))
    sampler = DraftSampler(sampled_vocab_size, returns_probs=speculative.acceptance == "rejection")
    count = options.num_speculative_tokens
    try:
        if not manifest.spec.layers:
            return HeadsDrafter(
                options.method,
                executable,
                sampled_vocab_size=sampled_vocab_size,
                num_heads=manifest.spec.drafts_per_row,
                # Each head of an MLP speculator continues the likeliest token of the one before.
                sampler=None if options.method == "mlp_speculator" else sampler,
            )
        if options.method == "draft_model":
            return DraftModelDrafter(executable, limits, sampler, count)
        return FeatureDrafter(options.method, executable, limits, sampler, count)
    except BaseException:
        executable.close()
        raise

"""Drafters of an engine: their checkpoints, in the formats that their projects publish."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.compiler.drafters.base import (
    DrafterCheckpoint,
    ModuleCheckpoint,
    TargetFacts,
    TargetWeights,
)
from octavo.graphs.errors import BuildError

if TYPE_CHECKING:
    from octavo.compiler.config import SpeculativeConfig

__all__ = ["DrafterCheckpoint", "ModuleCheckpoint", "TargetFacts", "TargetWeights", "open_drafter"]


def open_drafter(config: SpeculativeConfig, target: TargetFacts) -> DrafterCheckpoint:
    """The checkpoint of a compiled drafter, checked against its target; no weight is loaded.

    Raises CheckpointError or BuildError, naming what does not fit.
    """
    drafter = _open(config, target)
    most = drafter.max_draft_tokens
    if most is not None and config.num_speculative_tokens > most:
        raise BuildError(
            f"{drafter.path} drafts at most {most} tokens, not {config.num_speculative_tokens}: "
            f"build with num_speculative_tokens={most}"
        )
    return drafter


def _open(config: SpeculativeConfig, target: TargetFacts) -> DrafterCheckpoint:
    # Each is imported when it is asked for: most builds need none.
    method, model = config.method, config.model
    if method == "mtp":
        from octavo.compiler.drafters.mtp import open_mtp

        return open_mtp(target)
    assert model is not None, "the config has checked that"
    if method == "draft_model":
        from octavo.compiler.drafters.draft_model import open_draft_model

        return open_draft_model(model, target)
    if method == "eagle":
        from octavo.compiler.drafters.eagle import open_eagle

        return open_eagle(model, target)
    if method == "eagle3":
        from octavo.compiler.drafters.eagle3 import open_eagle3

        return open_eagle3(model, target)
    if method == "medusa":
        from octavo.compiler.drafters.medusa import open_medusa

        return open_medusa(model, target, config.num_speculative_tokens)
    if method == "mlp_speculator":
        from octavo.compiler.drafters.mlp_speculator import open_mlp_speculator

        return open_mlp_speculator(model, target, config.num_speculative_tokens)
    raise AssertionError(f"{method} is not compiled")

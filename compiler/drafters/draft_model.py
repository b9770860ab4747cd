"""A smaller model of the same vocabulary: any checkpoint that engines are built from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.compiler.checkpoints import Checkpoint, open_checkpoint
from octavo.compiler.drafters.base import DrafterCheckpoint, TargetFacts
from octavo.graphs.errors import CheckpointError

if TYPE_CHECKING:
    from octavo.graphs.spec import SpeculativeMethod


def open_draft_model(model: str, target: TargetFacts) -> DraftModelCheckpoint:
    """Raises CheckpointError, with the first token that differs, for another vocabulary."""
    return DraftModelCheckpoint(open_checkpoint(model), target)


class DraftModelCheckpoint(DrafterCheckpoint):
    """Its `checkpoint` is captured like the target's."""

    method: SpeculativeMethod = "draft_model"

    def __init__(self, checkpoint: Checkpoint, target: TargetFacts) -> None:
        self.checkpoint = checkpoint
        self.path = checkpoint.path
        own_size = int(checkpoint.config.get_text_config().vocab_size)
        if own_size != target.vocab_size:
            raise CheckpointError(
                f"{self.path} has a vocabulary of {own_size} tokens and {target.checkpoint.path} "
                f"one of {target.vocab_size}: choose a draft model of the same family"
            )
        _compare_tokens(checkpoint, target.checkpoint)

    def content_digest(self) -> str:
        return self.checkpoint.content_digest()


def _compare_tokens(draft: Checkpoint, target: Checkpoint) -> None:
    """Where both have a tokenizer: one id must be one text in both."""
    if draft.tokenizer is None or target.tokenizer is None:
        return
    ours = {token_id: text for text, token_id in draft.tokenizer.get_vocab().items()}
    theirs = {token_id: text for text, token_id in target.tokenizer.get_vocab().items()}
    for token_id in sorted(ours.keys() & theirs.keys()):
        if ours[token_id] != theirs[token_id]:
            raise CheckpointError(
                f"token {token_id} is {ours[token_id]!r} in {draft.path} and "
                f"{theirs[token_id]!r} in {target.path}: choose a draft model with the same "
                "tokenizer"
            )

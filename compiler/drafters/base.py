"""What every kind of drafter checkpoint offers the compiler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from octavo.compiler.checkpoints import Checkpoint
    from octavo.compiler.hidden_states import CaptureHidden
    from octavo.graphs.drafters.base import HeadsDrafter, PagedDrafter
    from octavo.graphs.spec import SpeculativeMethod


@dataclass(frozen=True)
class TargetFacts:
    """Of the model whose tokens are drafted, known before any weight is loaded."""

    checkpoint: Checkpoint
    hidden_size: int
    vocab_size: int
    num_layers: int
    model_type: str


@dataclass(frozen=True)
class TargetWeights:
    """What drafters share with their target; both [V, h]."""

    embedding: torch.Tensor
    head: torch.Tensor


class DrafterCheckpoint(ABC):
    """A drafter's files, checked against the target; torch is imported on first need only.

    path              of its folder; of the target's where it lies in the same checkpoint
    max_draft_tokens  most tokens that it can draft at once, None if any number
    """

    method: SpeculativeMethod
    path: Path
    max_draft_tokens: int | None = None

    @abstractmethod
    def content_digest(self) -> str:
        """Hex SHA-256 over every file that influences the drafter."""

    def hidden(self) -> CaptureHidden | None:
        """What it reads of the target's graph; None for nothing."""
        return None


class ModuleCheckpoint(DrafterCheckpoint):
    """A drafter that is a module of ours; a draft model is a checkpoint like any other."""

    @abstractmethod
    def load_module(self, target: TargetWeights, dtype: torch.dtype) -> PagedDrafter | HeadsDrafter:
        """The drafter on the CPU, in eval mode, with every weight read."""

"""The protocol of drafters: what they see of a step, and what they propose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from octavo.backends.base import Float32Array, StepInputs

if TYPE_CHECKING:
    from octavo.runtime.request import Request


class Proposal(NamedTuple):
    """The tokens after a sequence's known ones, as far as a drafter has any.

    probs  [len(token_ids), V] over the sampled vocabulary, the distribution that each was drawn
           from; None where they were chosen with certainty
    """

    token_ids: Sequence[int] = ()
    probs: Float32Array | None = None


class DraftContext(NamedTuple):
    """A sequence whose last known token is the only one that is not computed."""

    request: Request
    num_tokens: int  # most tokens to propose, at least 1


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step after its commit; its arrays are valid until the next one is packed.

    requests       in batch order; some have finished with it
    starts         [B] the position of each one's first computed token
    logits_rows    [B] how many rows of the logits are each one's: those of its last positions
    hidden_states  [L, F] or [T, F], as the engine's spec says; drafts that were rejected included
    """

    requests: Sequence[Request]
    starts: Sequence[int]
    inputs: StepInputs
    logits_rows: Sequence[int]
    hidden_states: Float32Array | None


class Drafter(Protocol):
    """Owns what it computes itself; the engine owns the requests and verifies every draft."""

    method: str

    def propose(self, step: ComputedStep, contexts: Sequence[DraftContext]) -> list[Proposal]:
        """A proposal for each context, in order; empty where it has none.

        Called after every step, also without contexts, so that a drafter's own cache keeps up.
        """

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies cache blocks as `Executable.copy_blocks` does, before the step that needs them."""

    def close(self) -> None:
        """Frees everything; harmless when called twice."""

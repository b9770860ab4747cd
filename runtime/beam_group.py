"""The beams of one request in the engine: sequences that advance together or not at all."""

from __future__ import annotations

from typing import Protocol

from octavo.backends.base import Float32Array
from octavo.runtime.request import FinishReason, Request
from octavo.runtime.sampling.beam_search import BeamCandidates, BeamSearch, best_candidates


class SequenceLifecycle(Protocol):
    """What the engine lets a group do with its sequences between two steps."""

    def fork(self, parent: Request, child: Request) -> None:
        """Starts `child` with the parent's computed tokens."""

    def end(self, request: Request) -> None:
        """Takes a sequence out; its blocks are released."""


class BeamGroup:
    """Holds the search's state and, for each of its running beams, the sequence that computes it.

    A beam whose logits are computed waits with its candidates until those of all beams are there:
    one may have been preempted, or not fit into the step. If it is preempted meanwhile it is
    computed again.
    """

    def __init__(self, search: BeamSearch, root: Request) -> None:
        self.search = search
        self.beams = [root]
        self.root = root
        self._num_forks = 0
        root.group = self

    @property
    def width(self) -> int:
        """Most sequences that run at the same time."""
        return self.search.params.beam_width

    @property
    def done(self) -> bool:
        return not self.beams

    @property
    def finish_reason(self) -> FinishReason:
        """That of the best hypothesis, once the search is done."""
        if self.root.error is not None:
            return "error"
        return self.search.hypotheses()[0].finish_reason

    def candidates(self, logits: Float32Array) -> BeamCandidates:
        """How a beam may go on that has come to `logits` [V]; none if they are no numbers."""
        params = self.search.params
        return best_candidates(logits, self.search.num_candidates, temperature=params.temperature)

    def advance(self, lifecycle: SequenceLifecycle) -> bool:
        """Replaces the beams by those of the next token, if all are computed; True if it did.

        An error of one of them ends them all.
        """
        error = next((beam.error for beam in self.beams if beam.error is not None), None)
        if error is not None:
            self.root.error = error
            self._replace_by([], lifecycle)
            return True
        candidates = [beam.beam_candidates for beam in self.beams]
        if any(one is None for one in candidates):
            return False
        self.search.apply(self.search.advance([one for one in candidates if one is not None]))
        self._replace_by([(beam.parent, beam.token_id) for beam in self.search.beams], lifecycle)
        return True

    def _replace_by(self, chosen: list[tuple[int, int]], lifecycle: SequenceLifecycle) -> None:
        """`chosen`: the parent of each beam, as an index into the present ones, and its token."""
        parents, self.beams = self.beams, []
        unused = {parent for parent, _ in chosen}
        # Those that nothing continues make room for the others' forks.
        for index, parent in enumerate(parents):
            parent.beam_candidates = None
            if index not in unused:
                lifecycle.end(parent)
        for index, _ in chosen:
            if index in unused:
                unused.remove(index)
                self.beams.append(parents[index])
            else:
                self.beams.append(self._fork(parents[index], lifecycle))
        for beam, (_, token_id) in zip(self.beams, chosen, strict=True):
            beam.append_token(token_id)

    def _fork(self, parent: Request, lifecycle: SequenceLifecycle) -> Request:
        self._num_forks += 1
        name = f"{self.root.request_id}/beam {self._num_forks}"
        child = parent.fork(name, self._num_forks, parent.num_tokens)
        lifecycle.fork(parent, child)
        return child

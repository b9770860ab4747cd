"""Drafts of heads that read one hidden state of the target: Medusa's and the MLP speculator's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING

import numpy as np

from octavo.backends.base import Float32Array, Int32Array, StepInputs
from octavo.runtime.speculation.draft_sampler import NO_TOKEN, DraftSampler, proposals
from octavo.runtime.speculation.drafter import ComputedStep, DraftContext, Proposal

if TYPE_CHECKING:
    from octavo.backends.base import Executable

_NO_DRAFTS = Proposal()


class HeadsDrafter:
    """Runs the heads once for all sequences that want drafts.

    executable  token_ids i32 [T] and features f32 [T, F] to logits f32 [T * num_heads, V]; the row
                `s * num_heads + j` is that of draft j of sequence s
    sampler     chooses the drafts. None takes the likeliest tokens: right where each head was given
                the likeliest token of the head before it (MLP speculator).
    """

    def __init__(
        self,
        method: str,
        executable: Executable,
        *,
        sampled_vocab_size: int,
        num_heads: int,
        sampler: DraftSampler | None,
    ) -> None:
        self.method = method
        self._executable = executable
        self._vocab_size = sampled_vocab_size
        self._num_heads = num_heads
        self._sampler = sampler

    def propose(self, step: ComputedStep, contexts: Sequence[DraftContext]) -> list[Proposal]:
        """Empty for a sequence that the step did not compute up to its last token."""
        rows = _hidden_rows(step, contexts)
        wanted = [
            (context, row) for context, row in zip(contexts, rows, strict=True) if row is not None
        ]
        if not wanted:
            return [_NO_DRAFTS] * len(contexts)
        assert step.hidden_states is not None, "the engine was built with this drafter"
        last_tokens = [one.request.token(one.request.num_tokens - 1) for one, _ in wanted]
        features = step.hidden_states[[row for _, row in wanted]]  # [T, F]
        logits = self._executable.run(_inputs(last_tokens, features)).logits
        drafts = iter(self._choose([context for context, _ in wanted], logits))
        return [_NO_DRAFTS if row is None else next(drafts) for row in rows]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """There is no cache."""

    def close(self) -> None:
        self._executable.close()

    def _choose(self, contexts: Sequence[DraftContext], logits: Float32Array) -> list[Proposal]:
        """logits [T * num_heads, V] of as many contexts."""
        if self._sampler is None:
            likeliest = logits[:, : self._vocab_size].argmax(axis=1).reshape(-1, self._num_heads)
            return [
                Proposal(tokens[: context.num_tokens].tolist())
                for tokens, context in zip(likeliest, contexts, strict=True)
            ]
        requests = [context.request for context in contexts]
        most = min(self._num_heads, max(context.num_tokens for context in contexts))
        by_draft = [
            self._sampler.choose(requests, logits[draft :: self._num_heads], draft)
            for draft in range(most)
        ]
        return proposals(
            [
                list(takewhile(lambda one: one[0] != NO_TOKEN, drafts[: context.num_tokens]))
                for drafts, context in zip(zip(*by_draft, strict=True), contexts, strict=True)
            ]
        )


def _hidden_rows(step: ComputedStep, contexts: Sequence[DraftContext]) -> list[int | None]:
    """The row of the step's hidden states that each one's last token was sampled from.

    A sequence's rows are those of its last computed positions; behind that of its last token are
    those of rejected drafts. None where the step has not computed that row.
    """
    ends = np.diff(step.inputs.query_start_loc) + np.array(step.starts, dtype=np.int64)
    end_of_rows = accumulate(step.logits_rows)
    found = {
        request: (end_row, end_row - count, end)
        for request, count, end_row, end in zip(
            step.requests, step.logits_rows, end_of_rows, ends.tolist(), strict=True
        )
    }
    rows: list[int | None] = []
    for request, _ in contexts:
        end_row, first_row, end = found.get(request, (0, 0, 0))
        row = end_row - (end - (request.num_tokens - 2))
        rows.append(row if first_row <= row < end_row else None)
    return rows


def _inputs(token_ids: Sequence[int], features: Float32Array) -> StepInputs:
    """One token of each of T sequences, [T] and [T, F]; the heads read nothing else of a step."""
    count = len(token_ids)
    starts = np.arange(count + 1, dtype=np.int32)
    zeros: Int32Array = np.zeros(count, dtype=np.int32)
    return StepInputs(
        token_ids=np.array(token_ids, dtype=np.int32),
        positions=zeros,
        slot_mapping=zeros,
        block_tables=zeros[:, None],
        query_start_loc=starts,
        prefix_offsets=zeros,
        logits_indices=starts[:count],
        features=features,
    )

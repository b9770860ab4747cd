"""Drafters with a cache of their own: a draft model, and layers that read hidden states.

Their caches have the engine's blocks under the same numbers, so that prefix hits, copies and
evictions hold for both, and some more for what lies behind a sequence's own blocks: the keys and
values of drafts, which nobody reads after the proposal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from octavo.backends.base import Executable, Float32Array, Int32Array
from octavo.runtime import positions
from octavo.runtime.capacity import EngineLimits
from octavo.runtime.request import Request
from octavo.runtime.speculation.draft_batch import DraftRun, pack_runs
from octavo.runtime.speculation.draft_sampler import NO_TOKEN, DraftSampler, proposals
from octavo.runtime.speculation.drafter import ComputedStep, DraftContext, Proposal

Chosen = list[tuple[int, Float32Array | None]]


class _PagedDrafter:
    """What both kinds share: the executable, scratch blocks, and the chain of single tokens."""

    def __init__(
        self,
        executable: Executable,
        limits: EngineLimits,
        sampler: DraftSampler,
        num_speculative_tokens: int,
    ) -> None:
        self._executable = executable
        self._limits = limits
        self._sampler = sampler
        # Blocks of each sequence beyond its own.
        self._scratch = positions.blocks_for(num_speculative_tokens, limits.block_size) + 1
        executable.allocate_kv_cache(limits.num_kv_blocks + limits.max_num_seqs * self._scratch)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self._executable.copy_blocks(copies)

    def close(self) -> None:
        self._executable.close()

    def _table(self, index: int, request: Request) -> list[int]:
        """The blocks of context `index`, its own and then scratch."""
        first = self._limits.num_kv_blocks + index * self._scratch
        table = [*request.block_ids, *range(first, first + self._scratch)]
        return table[: self._limits.max_blocks_per_seq]

    def _continue(
        self,
        contexts: Sequence[DraftContext],
        tables: Sequence[list[int]],
        starts: Sequence[int],
        chosen: Sequence[Chosen],
        features: Float32Array | None,
    ) -> None:
        """Adds drafts to `chosen`, which holds one of each context, until each has all it may.

        starts    position of each one's first draft in the drafter's cache
        features  [len(contexts), F], what the first drafts were chosen with, if drafters read them
        """
        active = list(range(len(contexts)))
        rows = np.arange(len(contexts))
        for num_drafts in range(1, max(context.num_tokens for context in contexts)):
            going = [
                index for index, context_index in enumerate(active)
                if contexts[context_index].num_tokens > num_drafts
                and chosen[context_index][-1][0] != NO_TOKEN
            ]  # fmt: skip
            active, rows = [active[index] for index in going], rows[going]
            if not active:
                return
            runs = [
                DraftRun(
                    tables[index],
                    starts[index] + num_drafts - 1,
                    np.array([chosen[index][-1][0]], dtype=np.int32),
                    True,
                )
                for index in active
            ]
            given = None if features is None else features[rows]
            outputs = self._executable.run(pack_runs(runs, self._limits.block_size, given))
            requests = [contexts[index].request for index in active]
            drafts = self._sampler.choose(requests, outputs.logits, num_drafts)
            for index, draft in zip(active, drafts, strict=True):
                chosen[index].append(draft)
            if outputs.hidden_states is not None:
                features, rows = outputs.hidden_states.copy(), np.arange(len(active))


class FeatureDrafter(_PagedDrafter):
    """EAGLE, EAGLE-3 and MTP: reads the target's hidden states of every token, f32 [T, F].

    At position p it takes the token at p + 1. The last entry of a cached prefix may so have been
    made with another request's next token, which costs nothing but a worse draft.
    """

    def __init__(
        self,
        method: str,
        executable: Executable,
        limits: EngineLimits,
        sampler: DraftSampler,
        num_speculative_tokens: int,
    ) -> None:
        super().__init__(executable, limits, sampler, num_speculative_tokens)
        self.method = method

    def propose(self, step: ComputedStep, contexts: Sequence[DraftContext]) -> list[Proposal]:
        assert step.hidden_states is not None, "the engine was built without hidden states"
        drafting = {context.request: index for index, context in enumerate(contexts)}
        runs: list[DraftRun] = []
        kept: list[Int32Array] = []
        order: list[int] = []  # the contexts whose logits come back
        first_rows = step.inputs.query_start_loc.tolist()
        for row, (request, start) in enumerate(zip(step.requests, step.starts, strict=True)):
            # A finished request has given its blocks back, they still hold its prefix.
            end = request.num_tokens - 1 if request.finished else request.num_computed_tokens
            count = min(end, start + first_rows[row + 1] - first_rows[row]) - start
            if count <= 0:
                continue
            wanted = request in drafting
            tokens = request.tokens(start + 1, start + count + 1)
            runs.append(DraftRun(step.inputs.block_tables[row], start, tokens, wanted))
            kept.append(np.arange(first_rows[row], first_rows[row] + count, dtype=np.int32))
            if wanted:
                order.append(drafting[request])
        if not runs:
            return [Proposal() for _ in contexts]
        features = step.hidden_states[np.concatenate(kept)]
        outputs = self._executable.run(pack_runs(runs, self._limits.block_size, features))
        found: list[Proposal] = [Proposal() for _ in contexts]
        if order:
            started = [contexts[index] for index in order]
            drafts = self._sampler.choose([one.request for one in started], outputs.logits, 0)
            assert outputs.hidden_states is not None
            chosen: list[Chosen] = [[draft] for draft in drafts]
            tables = [self._table(i, one.request) for i, one in enumerate(started)]
            starts = [one.request.num_tokens - 1 for one in started]
            self._continue(started, tables, starts, chosen, outputs.hidden_states.copy())
            for index, proposal in zip(order, proposals(_ended(chosen)), strict=True):
                found[index] = proposal
        return found


class DraftModelDrafter(_PagedDrafter):
    """A smaller model of the same vocabulary. It computes a sequence when it is to draft for it.

    `_filled` [blocks]: how many of a block's first tokens are computed, as the engine has them.
    """

    method = "draft_model"

    def __init__(
        self,
        executable: Executable,
        limits: EngineLimits,
        sampler: DraftSampler,
        num_speculative_tokens: int,
    ) -> None:
        super().__init__(executable, limits, sampler, num_speculative_tokens)
        self._filled = np.zeros(limits.num_kv_blocks, dtype=np.int32)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        super().copy_blocks(copies)
        for source, destination in copies:
            self._filled[destination] = self._filled[source]

    def propose(self, step: ComputedStep, contexts: Sequence[DraftContext]) -> list[Proposal]:
        self._forget(step.inputs.slot_mapping)
        if not contexts:
            return []
        tables = [self._table(index, context.request) for index, context in enumerate(contexts)]
        chosen: list[Chosen] = [[] for _ in contexts]
        for runs, indices in self._catching_up(contexts, tables):
            outputs = self._executable.run(pack_runs(runs, self._limits.block_size))
            ready = [i for run, i in zip(runs, indices, strict=True) if run.wants_logits]
            if ready:
                requests = [contexts[index].request for index in ready]
                drafts = self._sampler.choose(requests, outputs.logits, 0)
                for index, draft in zip(ready, drafts, strict=True):
                    chosen[index].append(draft)
        starts = [context.request.num_tokens for context in contexts]
        self._continue(contexts, tables, starts, chosen, None)
        return proposals(_ended(chosen))

    def _forget(self, slots: Int32Array) -> None:
        """What the engine has computed since is other tokens than this cache holds there."""
        written = slots[slots >= 0]
        block_size = self._limits.block_size
        np.minimum.at(self._filled, written // block_size, written % block_size)

    def _catching_up(
        self, contexts: Sequence[DraftContext], tables: Sequence[list[int]]
    ) -> Iterator[tuple[list[DraftRun], list[int]]]:
        """Steps that compute all known tokens, and the contexts of their runs.

        No two runs of a step write the same block: of a shared prefix the first one's work serves
        the others.
        """
        waiting = list(range(len(contexts)))
        while waiting:
            left = self._limits.max_num_batched_tokens
            runs: list[DraftRun] = []
            indices: list[int] = []
            written: set[int] = set()
            for index in waiting:
                run = self._next_run(contexts[index].request, tables[index], left)
                first = run.start // self._limits.block_size
                last = positions.blocks_for(run.start + len(run.tokens), self._limits.block_size)
                blocks = set(tables[index][first:last])
                if len(run.tokens) == 0 or written & blocks:
                    continue
                written |= blocks
                left -= len(run.tokens)
                runs.append(run)
                indices.append(index)
            yield runs, indices
            for run, index in zip(runs, indices, strict=True):
                self._note(tables[index], run)
            done = {i for run, i in zip(runs, indices, strict=True) if run.wants_logits}
            waiting = [index for index in waiting if index not in done]

    def _next_run(self, request: Request, table: list[int], most: int) -> DraftRun:
        block_size = self._limits.block_size
        filled = self._filled[request.block_ids]
        partial = np.flatnonzero(filled < block_size)
        start = request.num_tokens - 1  # the last token is computed again: its logits are wanted
        if len(partial):
            index = int(partial[0])
            start = min(start, index * block_size + int(filled[index]))
        end = min(request.num_tokens, start + most)
        return DraftRun(table, start, request.tokens(start, end), end == request.num_tokens)

    def _note(self, table: list[int], run: DraftRun) -> None:
        """Takes note of the tokens that a run has added to the engine's own blocks."""
        block_size = self._limits.block_size
        end = run.start + len(run.tokens)
        for index in range(run.start // block_size, positions.blocks_for(end, block_size)):
            if table[index] < self._limits.num_kv_blocks:
                self._filled[table[index]] = min(end - index * block_size, block_size)


def _ended(chosen: Sequence[Chosen]) -> list[Chosen]:
    """Without the sign that the logits named no token."""
    return [[draft for draft in drafts if draft[0] != NO_TOKEN] for drafts in chosen]

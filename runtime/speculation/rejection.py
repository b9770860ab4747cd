"""Rejection sampling of a step's drafts, by the engine's acceptance graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import AcceptInputs, Executable, Float32Array
from octavo.runtime.request import Request

_STREAM = 2  # of random numbers; a drafter's own draws are another one


class VerifiedRows(NamedTuple):
    """A sequence's rows: of its drafts, in order, and of the token after them.

    raw, edited  [V] each, as the model gave them and as the request's processors left them
    """

    request: Request
    raw: Sequence[Float32Array]
    edited: Sequence[Float32Array]


def accept_drafts(executable: Executable, sequences: Sequence[VerifiedRows]) -> list[list[int]]:
    """The tokens of each sequence: accepted drafts and one more; none where logits are no numbers.

    At least one sequence, each with at least one row.
    """
    rows = [len(one.edited) for one in sequences]
    found = executable.accept(_pack(sequences, rows)).tolist()
    tokens: list[list[int]] = []
    start = 0
    for count in rows:
        own = found[start : start + count]
        tokens.append([token for token in own if token >= 0])
        start += count
    return tokens


def _pack(sequences: Sequence[VerifiedRows], rows: Sequence[int]) -> AcceptInputs:
    edits = [
        (row, *_edits(raw, edited))
        for row, (raw, edited) in enumerate(
            pair for one in sequences for pair in zip(one.raw, one.edited, strict=False)
        )
        if edited is not raw
    ]
    starts = np.cumsum([0, *rows[:-1]])
    params = [one.request.params for one in sequences]
    vocab_size = len(sequences[0].raw[0])
    drafts, probs, prob_rows = _drafts(sequences, rows)
    return AcceptInputs(
        logits=np.stack([row for one in sequences for row in one.raw[: len(one.edited)]]),
        edit_rows=_joined([np.full(len(ids), row) for row, ids, _ in edits], np.int32),
        edit_token_ids=_joined([ids for _, ids, _ in edits], np.int32),
        edit_values=_joined([values for _, _, values in edits], np.float32),
        first_rows=np.repeat(starts, rows).astype(np.int32),
        draft_token_ids=np.array(drafts, np.int32),
        draft_probs=probs,
        prob_rows=np.array(prob_rows, np.int32),
        temperature=np.repeat([0.0 if p.greedy else p.temperature for p in params], rows),
        # As in exact mode; a larger one need not fit an int32.
        top_k=np.repeat([min(max(p.top_k, 0), vocab_size) for p in params], rows).astype(np.int32),
        top_p=np.repeat([float(p.top_p) for p in params], rows),
        min_p=np.repeat([float(p.min_p) for p in params], rows),
        uniforms=np.concatenate([_uniforms(one.request, len(one.edited)) for one in sequences]),
    )


def _drafts(
    sequences: Sequence[VerifiedRows], rows: Sequence[int]
) -> tuple[list[int], Float32Array, list[int]]:
    """Each row's draft, -1 for a sequence's last; probabilities [P, V] and each row's place."""
    drafts: list[int] = []
    prob_rows: list[int] = []
    parts: list[Float32Array] = []
    num_probs = 0
    for one, count in zip(sequences, rows, strict=True):
        drafts += [*one.request.draft_token_ids[: count - 1], -1]
        probs = one.request.draft_probs
        if probs is None:
            prob_rows += [-1] * count
        else:
            parts.append(probs[: count - 1])
            prob_rows += [*range(num_probs, num_probs + count - 1), -1]
            num_probs += count - 1
    width = len(sequences[0].raw[0])
    joined = np.concatenate(parts) if parts else np.empty((0, width), np.float32)
    return drafts, joined, prob_rows


def _edits(raw: Float32Array, edited: Float32Array) -> tuple[NDArray[np.intp], Float32Array]:
    """The token ids whose logits were edited, and the new values."""
    changed = np.flatnonzero(raw != edited)
    return changed, edited[changed]


def _uniforms(request: Request, count: int) -> NDArray[np.float64]:
    """f64 [count, 2] in [0, 1): a function of the request's seed, choice and the positions."""
    draws = []
    for position in range(request.num_tokens, request.num_tokens + count):
        bits = np.random.Philox(key=request.seed, counter=[position, request.choice, _STREAM, 1])
        draws.append(np.random.Generator(bits).random(2))
    return np.stack(draws)


def _joined(parts: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)

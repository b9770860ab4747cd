"""Batches for `octavo::accept`, and what it has to give, worked out token by token."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.graphs.ops.accept import SCHEMA

Array = NDArray[Any]
DTYPES = {operand.name: np.dtype(operand.type_group) for operand in SCHEMA.inputs}


@dataclass
class Row:
    """One row of a verification: the last of a sequence has no draft."""

    logits: list[float]
    draft: int = -1
    probs: list[float] | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniforms: tuple[float, float] = (0.5, 0.5)
    edits: dict[int, float] = field(default_factory=dict)


def pack(sequences: list[list[Row]], vocab: int) -> dict[str, Array]:
    """The operands by name; logits have two more columns than `vocab`, large ones."""
    rows = [row for sequence in sequences for row in sequence]
    starts = [0, *itertools.accumulate(len(sequence) for sequence in sequences)]
    firsts = [start for start, s in zip(starts, sequences, strict=False) for _ in s]
    padding = [99.0, 99.0]
    probs = [row.probs for row in rows if row.probs is not None]
    numbers = iter(range(len(probs)))
    edits = [(i, t, v) for i, row in enumerate(rows) for t, v in row.edits.items()]
    values: dict[str, Any] = {
        "logits": np.array([row.logits + padding for row in rows]).reshape(-1, vocab + 2),
        "edit_rows": [edit[0] for edit in edits],
        "edit_token_ids": [edit[1] for edit in edits],
        "edit_values": [edit[2] for edit in edits],
        "first_rows": firsts,
        "draft_token_ids": [row.draft for row in rows],
        "draft_probs": np.array([[*p, 0.0, 0.0] for p in probs]).reshape(-1, vocab + 2),
        "prob_rows": [-1 if row.probs is None else next(numbers) for row in rows],
        "temperature": [row.temperature for row in rows],
        "top_k": [row.top_k for row in rows],
        "top_p": [row.top_p for row in rows],
        "min_p": [row.min_p for row in rows],
        "uniforms": np.array([row.uniforms for row in rows]).reshape(-1, 2),
    }
    return {name: np.asarray(values[name], DTYPES[name]) for name in DTYPES}


def distribution(row: Row) -> Array:
    """f64 [V]: what temperature, top-k, min-p and top-p leave of a row, one token at a time."""
    logits = np.array(row.logits, np.float32).astype(np.float64)
    for token, value in row.edits.items():
        logits[token] = np.float32(value)
    by_rank = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if row.temperature == 0.0:
        certain: Array = np.eye(len(logits))[by_rank[0]]
        return certain
    weights = np.exp((logits - logits.max()) / row.temperature)
    kept = set(by_rank)
    if 0 < row.top_k < len(logits):
        kept = {token for token in kept if logits[token] >= logits[by_rank[row.top_k - 1]]}
    kept = {token for token in kept if weights[token] >= row.min_p}
    if row.top_p < 1.0:
        goal, mass, nucleus = row.top_p * sum(weights[list(kept)]), 0.0, set()
        for token in by_rank:
            if token in kept and mass < goal:
                nucleus.add(token)
                mass += weights[token]
        kept = nucleus
    probs = np.array([weights[t] if t in kept else 0.0 for t in range(len(logits))])
    normalised: Array = probs / probs.sum()
    return normalised


def expected(sequences: list[list[Row]]) -> list[int]:
    """The tokens of every row, -1 behind a sequence's end."""
    tokens: list[int] = []
    for sequence in sequences:
        ended = False
        for row in sequence:
            tokens.append(-1 if ended else token_of(row))
            ended = ended or tokens[-1] != row.draft
    return tokens


def token_of(row: Row) -> int:
    p = distribution(row)
    q = np.zeros(len(p))
    if row.draft >= 0:
        q[row.draft] = 1.0
        if row.probs is not None:
            q = np.array(row.probs, np.float32).astype(np.float64)
        if row.uniforms[0] * q[row.draft] < p[row.draft]:
            return row.draft
    left = np.maximum(p - q, 0.0)
    if left.sum() == 0:
        left = p
    return int(np.argmax(left.cumsum() > row.uniforms[1] * left.sum()))


def is_clear(sequences: list[list[Row]]) -> bool:
    """Whether no draw lies so close to an edge that rounding may decide it."""
    for row in (row for sequence in sequences for row in sequence):
        p = distribution(row)
        q = np.zeros(len(p))
        if row.draft >= 0:
            q[row.draft] = 1.0
            if row.probs is not None:
                q = np.array(row.probs)
            if 0 < abs(row.uniforms[0] * q[row.draft] - p[row.draft]) < 1e-5:
                return False
        for left in (np.maximum(p - q, 0.0), p):
            mass = left.sum()
            edges = left.cumsum()
            if 0 < mass < 1e-4 or (np.abs(edges - row.uniforms[1] * mass) < 1e-5 * mass).any():
                return False
        weights = np.sort(p[p > 0])[::-1]
        if row.top_p < 1 and (np.abs(weights.cumsum() - row.top_p) < 1e-4).any():
            return False
    return True

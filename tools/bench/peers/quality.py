"""Perplexity of a text and agreement with float32, from what drivers answer to `score`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

TEXT = Path(__file__).parent / "text.txt"


def token_ids(checkpoint: Path) -> list[int]:
    """Of the text, by the tokenizer of a plain folder."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids
    return ids


def perplexity(log_probabilities: Sequence[float]) -> float:
    """exp of the mean negative natural log-probability (Jelinek et al., 1977)."""
    return math.exp(-math.fsum(log_probabilities) / len(log_probabilities))


def agreement(best: Sequence[int], reference: Sequence[int]) -> float:
    """Share of positions with the same best token."""
    equal = sum(ours == theirs for ours, theirs in zip(best, reference, strict=True))
    return equal / len(reference)

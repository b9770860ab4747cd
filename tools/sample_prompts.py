"""Prompts that engines are compared on, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from octavo.backends.manifest import Manifest
from octavo.graphs.errors import RequestError

# English, code, other scripts, markup; a single token and a long one.
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a land far away, there lived",
    "Q: What is the largest planet of the solar system?\nA:",
    "SELECT name, COUNT(*) FROM orders GROUP BY",
    "1, 1, 2, 3, 5, 8, 13,",
    "中国的首都是",
    "<html>\n  <head>\n    <title>",
    "The",
    " ".join(f"Chapter {number}. Nobody met the fox at the bridge." for number in range(1, 13)),
)
_RANDOM_LENGTHS = (1, 7, 31)


def tokenized(
    engine: Path, manifest: Manifest, room: int, texts: Sequence[str] | None = None
) -> dict[str, list[int]]:
    """Token ids by prompt; of PROMPTS where none are given, random ids without a tokenizer.

    What is not given is cut to `room` tokens, so that every engine has prompts that it takes.
    Raises RequestError if texts are given to an engine without a tokenizer.
    """
    room = max(room, 1)
    from octavo.runtime.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_bundle(engine, manifest.spec)
    if tokenizer is not None and texts:
        return {text: tokenizer.encode(text) for text in texts}
    if tokenizer is not None:
        return {text: tokenizer.encode(text)[:room] for text in PROMPTS}
    if texts:
        raise RequestError(
            f"{engine} has no tokenizer: leave out --prompt and random token ids are compared"
        )
    generator = np.random.default_rng(0)
    lengths = sorted({min(length, room) for length in _RANDOM_LENGTHS})
    return {
        f"{length} random tokens": generator.integers(
            manifest.spec.sampled_vocab_size, size=length
        ).tolist()
        for length in lengths
    }

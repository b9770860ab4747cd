"""Null engines that read and write words: token i is the word `wi`, so text and ids are one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.backends import null
from octavo.backends.manifest import Limits

VOCAB_SIZE = 97
LIMITS = Limits(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, block_size=16)


def write_word_engine(
    path: Path, *, chat_template: str | None = None, limits: Limits = LIMITS
) -> Path:
    """The engine has no end-of-sequence token: a request ends by its parameters alone."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece("##")
    files = {"tokenizer.json": tokenizer.to_str().encode()}
    if chat_template is not None:
        files["chat_template.jinja"] = chat_template.encode()
    return null.write_engine(path, vocab_size=VOCAB_SIZE, limits=limits, extra_files=files)


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that a null engine generates greedily after `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(null.expected_next_token(tokens, VOCAB_SIZE))
    return tokens[len(prompt) :]


def words(token_ids: Sequence[int]) -> str:
    return " ".join(f"w{token_id}" for token_id in token_ids)

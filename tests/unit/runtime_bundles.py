"""Null engine bundles that read and write text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from octavo.backends import null
from octavo.backends.manifest import Limits

VOCAB_SIZE = 257  # one token a byte, and <s>
BOS = 256
LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, block_size=4)


def byte_tokenizer() -> bytes:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    return backend.to_str().encode()


def write_text_engine(path: Path, **options: Any) -> Path:
    """A null engine with a tokenizer of one token a byte and a chat template."""
    files = {
        "tokenizer.json": byte_tokenizer(),
        "chat_template.jinja": b"{{ bos_token }}{{ messages[0].content }}!",
    }
    options = {"vocab_size": VOCAB_SIZE, "limits": LIMITS, "extra_files": files, **options}
    return null.write_engine(path, bos_token_id=BOS, **options)

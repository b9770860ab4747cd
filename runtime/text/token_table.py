"""What every token of a tokenizer adds to a text, for grammars that read texts token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TokenTable:
    """The bytes of each token, ids without a token included.

    token_bytes  by id; b"" where a token has no text. A special token has its name
    special_ids  of the tokens that are no text
    altered_ids  of the tokens that would read otherwise at the beginning of a text, as those that
                 lose their leading space there
    """

    token_bytes: Sequence[bytes]
    special_ids: Sequence[int]
    altered_ids: Sequence[int]

"""Log-probabilities in the formats of both kinds of completions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from octavo.runtime.outputs import Logprob, PositionLogprobs
from octavo.runtime.text.tokenizer import Tokenizer
from octavo.tools.server.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenLogprob,
    TopLogprob,
)

# JSON has no infinities; this is what OpenAI writes for them.
_LOWEST = -9999.0


class CompletionLogprobsWriter:
    """Those of one choice, however its tokens arrive.

    A token's `text_offset` is the length of the text that all tokens before it are certain to give:
    tokens that share a character have the offset of that character.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._skip_special_tokens = skip_special_tokens
        self._restart(0)

    def write_prompt(
        self, text: str, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]
    ) -> CompletionLogprobs:
        """Of an echoed prompt; what is written after it continues its text."""
        written = self.write(token_ids, positions)
        written["text_offset"] = [min(offset, len(text)) for offset in written["text_offset"]]
        self._restart(len(text))
        return written

    def write(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]
    ) -> CompletionLogprobs:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push([token_id]))
        return {
            "tokens": [self._tokenizer.token_text(token_id) for token_id in token_ids],
            "token_logprobs": [
                None if position is None else _finite(position[token_id].logprob)
                for token_id, position in zip(token_ids, positions, strict=True)
            ],
            "top_logprobs": [
                None if position is None else self._top(position) for position in positions
            ],
            "text_offset": offsets,
        }

    def _top(self, position: PositionLogprobs) -> dict[str, float]:
        likeliest = [entry for _, entry in top_entries(position, self._num_top)]
        own = next(iter(position.values()))
        return {_text(entry): _finite(entry.logprob) for entry in (*likeliest, own)}

    def _restart(self, offset: int) -> None:
        self._offset = offset
        self._detokenizer = self._tokenizer.detokenizer(
            skip_special_tokens=self._skip_special_tokens
        )


def chat_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs],
    num_top: int,
) -> ChatLogprobs:
    return {
        "content": [
            _token_logprob(tokenizer, token_id, position, num_top)
            for token_id, position in zip(token_ids, positions, strict=True)
        ],
        "refusal": None,
    }


def joined(parts: Iterable[CompletionLogprobs]) -> CompletionLogprobs:
    whole: CompletionLogprobs = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for part in parts:
        whole["tokens"] += part["tokens"]
        whole["token_logprobs"] += part["token_logprobs"]
        whole["top_logprobs"] += part["top_logprobs"]
        whole["text_offset"] += part["text_offset"]
    return whole


def top_entries(position: PositionLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """The `count` likeliest tokens of a position, whose own token stands first in it."""
    return sorted(position.items(), key=lambda item: item[1].rank)[:count]


def _token_logprob(
    tokenizer: Tokenizer, token_id: int, position: PositionLogprobs, num_top: int
) -> TokenLogprob:
    own = _top_logprob(tokenizer, token_id, position[token_id])
    top = [_top_logprob(tokenizer, *item) for item in top_entries(position, num_top)]
    return {**own, "top_logprobs": top}


def _top_logprob(tokenizer: Tokenizer, token_id: int, entry: Logprob) -> TopLogprob:
    return {
        "token": _text(entry),
        "logprob": _finite(entry.logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _text(entry: Logprob) -> str:
    return entry.decoded_token or ""


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST

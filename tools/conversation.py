"""A conversation with a model: what was said, and as much of it as fits the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.graphs.errors import RequestError

Message = dict[str, str]


class ChatPrompts(Protocol):
    """Renders messages, as `LLM` does."""

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str | Mapping[str, object]:
        """A mapping with the prompt's "prompt_token_ids"."""


@dataclass(frozen=True)
class Exchange:
    question: str
    answer: str


@dataclass(frozen=True)
class Turn:
    """A question ready to be asked."""

    prompt: Mapping[str, object]
    num_prompt_tokens: int
    kept: tuple[Exchange, ...]  # what the prompt holds of the conversation
    num_dropped: int  # older exchanges that it does not


class Conversation:
    """Exchanges under an optional system message.

    context_len  tokens that a prompt and its answer may have together
    reserve      tokens of it to keep free for an answer
    """

    def __init__(
        self, prompts: ChatPrompts, *, context_len: int, reserve: int, system: str | None = None
    ) -> None:
        self.system = system
        self.exchanges: tuple[Exchange, ...] = ()
        self._prompts = prompts
        self._context_len = context_len
        # An answer may be allowed to fill the context; most of it is still to be the prompt's.
        self._reserve = min(reserve, context_len // 4)

    def prepare(self, question: str) -> Turn:
        """The prompt for an answer to `question`; the conversation stays as it is.

        Where it does not fit, so many of the oldest exchanges are left out that half of the context
        is free: were it one at a time, no later turn would find its beginning in the prefix cache.
        RequestError if the question alone is too long, or the chat template refuses the messages.
        """
        kept = self.exchanges
        prompt, num_tokens = self._prompt(kept, question)
        if num_tokens > self._context_len - self._reserve:
            while kept and num_tokens > self._context_len // 2:
                kept = kept[1:]
                prompt, num_tokens = self._prompt(kept, question)
        if num_tokens >= self._context_len:
            raise RequestError(
                f"the message makes a prompt of {num_tokens} tokens, a prompt and its answer may "
                f"have {self._context_len} together: shorten it"
            )
        return Turn(prompt, num_tokens, kept, len(self.exchanges) - len(kept))

    def messages(self) -> list[Message]:
        """All of it, as `LLM.chat` takes it."""
        return self._messages(self.exchanges)

    def _messages(self, exchanges: Sequence[Exchange]) -> list[Message]:
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for exchange in exchanges:
            messages.append({"role": "user", "content": exchange.question})
            messages.append({"role": "assistant", "content": exchange.answer})
        return messages

    def _prompt(
        self, exchanges: Sequence[Exchange], question: str
    ) -> tuple[Mapping[str, object], int]:
        messages = [*self._messages(exchanges), {"role": "user", "content": question}]
        prompt = self._prompts.chat_prompt(messages)
        assert isinstance(prompt, Mapping)
        token_ids = prompt["prompt_token_ids"]
        assert isinstance(token_ids, Sequence)
        return prompt, len(token_ids)

"""The engine's tokenizer: text to token ids and back, and its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.graphs.errors import BundleError, RequestError
from octavo.runtime.text.detokenizer import Detokenizer, token_decoder
from octavo.runtime.text.token_table import TokenTable

if TYPE_CHECKING:
    import tokenizers

    from octavo.graphs.spec import ModelSpec

TOKENIZER_NAME = "tokenizer.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer`; encodes as its file says, special tokens included.

    chat_template  the source of the template of conversations, None if there is none
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.chat_template = chat_template
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        added_tokens = backend.get_added_tokens_decoder().items()
        self._special_ids = frozenset(token_id for token_id, token in added_tokens if token.special)
        self._decoder = token_decoder(backend, self._special_ids)

    @classmethod
    def from_bundle(cls, bundle: Path, spec: ModelSpec) -> Tokenizer | None:
        """The bundle's tokenizer, None if it has none; BundleError if it cannot be read."""
        path = bundle / TOKENIZER_NAME
        if not path.exists():
            return None
        import tokenizers

        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise BundleError(f"{path} cannot be read ({error}): build the engine again") from None
        template = bundle / CHAT_TEMPLATE_NAME
        return cls(
            backend,
            bos_token_id=spec.bos_token_id,
            eos_token_id=spec.eos_token_ids[0] if spec.eos_token_ids else None,
            chat_template=template.read_text(encoding="utf-8") if template.exists() else None,
        )

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, added tokens included."""
        return self._backend.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; markers such as "<s>" written in it become the tokens they name.

        `add_special_tokens` adds what the tokenizer's file says, usually BOS, but never a second
        BOS. The text of a chat template brings its own: pass False for it. RequestError if the text
        has a lone surrogate, as JSON can write it.
        """
        try:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise RequestError(_not_encodable(text)) from None
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id:
            del ids[0]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all the tokens; ids that the tokenizer does not know have no text.

        The same as the pieces of a stream, whatever the decoder, and as `tokenizers` decodes except
        where detokenizer_pieces.py and detokenizer_window.py say.
        """
        stream = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return stream.push(token_ids) + stream.flush()

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Decodes a stream of tokens; its pieces concatenate to `decode` of them all."""
        return self._decoder.detokenizer(skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of one token where it follows others: its leading space kept, special or not.

        U+FFFD stands for bytes that are no whole character; "" is the text of an unknown id.
        """
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 of `token_text`, with the bytes of a token that is a part of a character."""
        return self._decoder.token_bytes(token_id)

    def token_table(self) -> TokenTable:
        """The bytes of every token, made anew each time.

        RequestError if the text of a token depends on more than whether it begins a text.
        """
        special_ids = sorted(self._special_ids)
        ids = self._backend.get_vocab(with_added_tokens=True).values()
        token_bytes, altered_ids = [], []
        for token_id in range(max(ids, default=-1) + 1):
            own = self._decoder.settled_bytes(token_id, is_first=False)
            if own is None:
                raise RequestError(
                    "the texts of this tokenizer's tokens depend on their neighbours: no grammar "
                    "can be followed, leave structured_outputs out"
                )
            token_bytes.append(own)
            if own != self._decoder.settled_bytes(token_id, is_first=True):
                altered_ids.append(token_id)
        return TokenTable(token_bytes, special_ids, altered_ids)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **template_variables: object,
    ) -> str:
        """The prompt for a conversation, to be encoded with `add_special_tokens=False`.

        messages                mappings of "role" and "content" (a text, or a list of text parts),
                                with whatever else the template reads ("tool_calls", "name", ...)
        add_generation_prompt   end with the beginning of the assistant's answer
        continue_final_message  end within the last message, for the model to continue it; needs
                                add_generation_prompt=False
        tools, documents        JSON descriptions, for templates that know them
        template_variables      variables of this template, such as enable_thinking=False

        RequestError if there is no template, a message is malformed or the template fails.
        """
        if self.chat_template is None:
            raise RequestError("the engine has no chat template: give a plain prompt")
        from octavo.runtime.text import chat_template

        special_tokens: dict[str, object] = {
            "bos_token": self._token(self.bos_token_id),
            "eos_token": self._token(self.eos_token_id),
        }
        return chat_template.render(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            variables=special_tokens | template_variables,
        )

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> dict[str, object]:
        """The prompt for a conversation, with the options of `apply_chat_template`.

        The template writes every special token itself: the tokenizer adds none.
        """
        text = self.apply_chat_template(messages, **options)
        return {"prompt": text, "prompt_token_ids": self.encode(text, add_special_tokens=False)}

    def _token(self, token_id: int | None) -> str:
        token = None if token_id is None else self._backend.id_to_token(token_id)
        return token or ""


def _not_encodable(text: object) -> str:
    if not isinstance(text, str):
        return f"a prompt is of type {type(text).__name__}: give a text"
    position = next((at for at, char in enumerate(text) if "\ud800" <= char <= "\udfff"), 0)
    return (
        f"the text has the lone surrogate {text[position]!a} at position {position}, which is no "
        "character: remove it"
    )

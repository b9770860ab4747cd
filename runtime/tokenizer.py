"""The engine's tokenizer: text to token ids and back, and its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.graphs.errors import BundleError, RequestError
from octavo.runtime.detokenizer import Detokenizer

if TYPE_CHECKING:
    import tokenizers

    from octavo.graphs.spec import ModelSpec

TOKENIZER_NAME = "tokenizer.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer`; encodes as its file says, special tokens included."""

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
        self._chat_template = chat_template
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )

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
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        # A chat template may have written the BOS token that the tokenizer adds once more.
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id:
            del ids[0]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Decodes a stream of tokens; its pieces concatenate to `decode` of them all."""

        def decode(token_ids: Sequence[int]) -> str:
            return self.decode(token_ids, skip_special_tokens=skip_special_tokens)

        def is_visible(token_id: int) -> bool:
            if skip_special_tokens and token_id in self._special_ids:
                return False
            return self._backend.id_to_token(token_id) is not None

        return Detokenizer(decode, is_visible)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt for a conversation; RequestError if there is no template or it refuses."""
        if self._chat_template is None:
            raise RequestError("the engine has no chat template: give a plain prompt")
        from octavo.runtime import chat_template

        return chat_template.render(
            self._chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            bos_token=self._token(self.bos_token_id),
            eos_token=self._token(self.eos_token_id),
            tools=None,
            documents=None,
        )

    def _token(self, token_id: int | None) -> str:
        token = None if token_id is None else self._backend.id_to_token(token_id)
        return token or ""

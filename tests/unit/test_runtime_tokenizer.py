"""Encoding, chat templates, and text that arrives token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from octavo.backends import null
from octavo.backends.bundle import read_manifest
from octavo.backends.manifest import Limits
from octavo.graphs.errors import BundleError, RequestError
from octavo.runtime.tokenizer import Tokenizer

BOS, EOS = 256, 257


def byte_level() -> tokenizers.Tokenizer:
    """One token a byte (ids 0-255 in the order of the byte alphabet), then <s> and </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def sentence_piece() -> tokenizers.Tokenizer:
    """Metaspace pieces with byte fallback, decoded as Llama 2's tokenizer does."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab.update({f"<0x{byte:02X}>": 3 + byte for byte in range(256)})
    for piece in ("▁", "▁a", "▁b", "a", "b", "▁▁"):
        vocab[piece] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def with_bos(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return backend


def id_of(backend: tokenizers.Tokenizer, token: str) -> int:
    token_id = backend.token_to_id(token)
    assert token_id is not None
    return token_id


def pieces(tokenizer: Tokenizer, ids: list[int], step: int = 1) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    out = [detokenizer.push(ids[start : start + step]) for start in range(0, len(ids), step)]
    return [*out, detokenizer.flush()]


TEXTS = [
    "plain text, with spaces  and\nlines",
    "an emoji \U0001f600 and a family \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "안녕하세요 세계",
    "中文和 العربية",
    "def f(x):\n    return  x\t# code",
    "\ufffd a real replacement character \ufffd",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("step", [1, 2, 3, 8])
def test_pieces_concatenate_to_the_full_text(text: str, step: int) -> None:
    """D01 emoji, D03 Korean, D08 several tokens at a time."""
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert "".join(pieces(tokenizer, ids, step)) == text


def test_d01_d04_an_incomplete_character_is_held_back() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode("a\U0001f600b")
    assert pieces(tokenizer, ids) == ["a", "", "", "", "\U0001f600", "b", ""]


def test_d10_a_cut_in_the_middle_of_a_character_ends_as_the_full_decode_does() -> None:
    tokenizer = Tokenizer(byte_level())
    for cut in (1, 2, 3):
        ids = tokenizer.encode("a\U0001f600")[: 1 + cut]
        assert pieces(tokenizer, ids)[:-1] == ["a"] + [""] * cut
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == "a\ufffd"


def test_d09_invalid_bytes_are_held_for_a_bounded_time() -> None:
    tokenizer = Tokenizer(byte_level())
    byte_255 = tokenizer.encode("\xff")[0]  # one byte of a two-byte character: never valid alone
    ids = [byte_255] * 100
    out = pieces(tokenizer, ids)
    assert "".join(out) == tokenizer.decode(ids)
    assert len("".join(out[:-1])) == 97


def test_d05_d06_leading_spaces_survive() -> None:
    backend = sentence_piece()
    tokenizer = Tokenizer(backend, bos_token_id=1)
    piece = {token: id_of(backend, token) for token in ("▁", "▁a", "▁b", "b", "▁▁")}
    for tokens in (
        ["▁a", "▁b", "▁", "▁b", "▁▁", "b"],
        ["▁", "▁a", "▁▁", "▁b"],
        ["▁▁", "▁a"],
    ):
        ids = [piece[token] for token in tokens]
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)
        # D07, D18: special tokens are no text and change none.
        with_special = [1, *ids[:2], 2, *ids[2:]]
        assert tokenizer.decode(with_special) == tokenizer.decode(ids)
        assert "".join(pieces(tokenizer, with_special)) == tokenizer.decode(ids)


def test_byte_fallback_characters_are_held_back() -> None:
    backend = sentence_piece()
    tokenizer = Tokenizer(backend)
    ids = [id_of(backend, "▁a"), *(3 + byte for byte in "\U0001f600".encode()), id_of(backend, "b")]
    assert pieces(tokenizer, ids) == ["a", "", "", "", "\U0001f600", "b", ""]


def test_ids_the_tokenizer_does_not_know_have_no_text() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = [*tokenizer.encode("ab"), 5000, *tokenizer.encode("c")]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == "abc"


def test_d17_the_bos_token_is_not_doubled() -> None:
    tokenizer = Tokenizer(with_bos(byte_level()), bos_token_id=BOS)
    once = tokenizer.encode("a")
    assert once[0] == BOS
    assert tokenizer.encode("<s>a") == once
    assert tokenizer.encode("a", add_special_tokens=False) == once[1:]
    # Without a bos_token_id nothing may be guessed.
    assert Tokenizer(with_bos(byte_level())).encode("<s>a") == [BOS, *once]


def test_decode_skips_special_tokens_unless_told_not_to() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode("<s>a</s>")
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a</s>"


TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
[{{ message.role }}] {% generation %}{{ message.content | trim }}{% endgeneration %}{{ '\n' }}
{%- endfor %}

{%- if add_generation_prompt %}[assistant]{% endif %}"""


def chat(template: str | None, messages: list[dict[str, Any]], **options: Any) -> str:
    tokenizer = Tokenizer(byte_level(), bos_token_id=BOS, eos_token_id=EOS, chat_template=template)
    return tokenizer.apply_chat_template(messages, **options)


def test_a_chat_template_renders_as_hugging_face_does() -> None:
    messages = [{"role": "user", "content": " Hi & <you> "}]
    assert chat(TEMPLATE, messages) == "<s>[user] Hi & <you>\n[assistant]"
    assert chat(TEMPLATE, messages, add_generation_prompt=False) == "<s>[user] Hi & <you>\n"
    assert chat("{{ messages | tojson }}{{ eos_token }}", messages) == (
        '[{"role": "user", "content": " Hi & <you> "}]</s>'
    )


def test_a_chat_template_may_refuse() -> None:
    with pytest.raises(RequestError, match="cannot render these messages: no tools here"):
        chat(TEMPLATE, [{"role": "tool", "content": ""}])
    with pytest.raises(RequestError, match="has no chat template"):
        chat(None, [])


def test_a_chat_template_cannot_leave_its_sandbox() -> None:
    for template in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ):
        with pytest.raises(RequestError, match="cannot render"):
            chat(template, [])


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    limits = Limits(max_model_len=8, max_num_seqs=1, max_num_batched_tokens=8, block_size=4)
    bundle = null.write_engine(
        tmp_path / "engine", vocab_size=8, limits=limits, extra_files={"tokenizer.json": b"{"}
    )
    with pytest.raises(BundleError, match=r"tokenizer.json cannot be read"):
        Tokenizer.from_bundle(bundle, read_manifest(bundle).spec)

"""Small tokenizers of each kind that checkpoints have, special tokens among them."""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

# Each has its own script, so that a tokenizer trained on some sees the others as bytes.
SCRIPTS = {
    "plain": "plain text, with spaces  and\nlines, the other text and the lines",
    "emoji": "\U0001f600 and a family \U0001f468\u200d\U0001f469\u200d\U0001f467, \u2764\ufe0f",
    "korean": "안녕하세요 세계, 한국어 텍스트",
    "chinese": "中文和更多的汉字。没有空格。",
    "arabic": "العربية من اليمين إلى اليسار",
    "code": "def f(x):\n    return  x\t# code\n\n\n    if x == '\\n': pass",
    "replacement": "\ufffd a real replacement character \ufffd",
}
CORPUS = list(SCRIPTS.values())

BYTE_BOS, BYTE_EOS = 256, 257  # of byte_level()
LLAMA_BOS, LLAMA_EOS = 1, 2  # of the SentencePiece kinds
FIRST_BYTE = 3  # <0x00> of the SentencePiece kinds


def byte_level() -> tokenizers.Tokenizer:
    """One token a byte (ids 0-255 in the order of the byte alphabet), then <s> and </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def trained_byte_level() -> tokenizers.Tokenizer:
    """As GPT-2's: tokens of several bytes, parts of characters too, and added tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    # Not in the byte alphabet as a whole: "  " is text itself, "é" reads as the byte 0xE9.
    backend.add_tokens(["  ", "é", "\U0001f680 launch"])
    return backend


def sentence_piece(decoder: str = "llama") -> tokenizers.Tokenizer:
    """Pieces and byte fallback; "llama" strips the space that a text begins with, "gemma" not."""
    stages: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if decoder == "llama":
        stages.append(decoders.Strip(" ", 1, 0))
    vocab, merges = _pieces()
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), *spaces] if decoder == "llama" else spaces
    )
    backend.decoder = decoders.Sequence(stages)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def _pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary trained on plain text and code, with the 256 byte tokens of SentencePiece."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Replace(" ", "▁")
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=specials, show_progress=False)
    # The line end is no piece: as in Llama 2, it is the byte token <0x0A>.
    texts = [SCRIPTS[name].replace("\n", " ") for name in ("plain", "code")]
    backend.train_from_iterator(["▁".join(texts)], trainer)
    model = json.loads(backend.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    for piece in ("▁", "▁▁", "▁a", "▁b", "a", "b", "é"):
        vocab.setdefault(piece, len(vocab))
    return vocab, [(left, right) for left, right in model["merges"]]


def metaspace() -> tokenizers.Tokenizer:
    """As T5's: the first token loses all of its spaces."""
    return _words(
        ["▁", "▁a", "a▁b", "▁▁b", "b", "안", "<0x41>"], decoders.Metaspace(prepend_scheme="always")
    )


def word_piece() -> tokenizers.Tokenizer:
    """As BERT's: a space before every token but the first and those that continue a word."""
    return _words(["a", "##b", "##", ".", "n't", "##'s", "한", "do", "not"], decoders.WordPiece())


def plain_words() -> tokenizers.Tokenizer:
    """Without a decoder: tokens joined by spaces."""
    return _words(["a", "b", "한", " ", "<0x41>"], None)


def word_suffixes() -> tokenizers.Tokenizer:
    """As GPT-1's, which only a window decodes: a suffix is a space unless the text ends there."""
    return _words(["a", "b</w>", "한</w>", "c", "d</w>"], decoders.BPEDecoder(suffix="</w>"))


def _words(words: list[str], decoder: Any) -> tokenizers.Tokenizer:
    vocab = {word: index for index, word in enumerate(["<unk>", *words])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def id_of(backend: tokenizers.Tokenizer, token: str) -> int:
    token_id = backend.token_to_id(token)
    assert token_id is not None, token
    return token_id

"""Reads prompts beside an engine: none of its steps is waited for, nor made to wait."""

from __future__ import annotations

from pathlib import Path

from octavo.runtime.prompts import PromptReader
from octavo.runtime.text.tokenizer import Tokenizer


def prompt_reader(bundle: Path, tokenizer: Tokenizer | None) -> PromptReader:
    """`tokenizer`: the engine's own. BundleError if the bundle cannot be read."""
    from octavo.backends.bundle import read_manifest

    manifest = read_manifest(bundle)
    return PromptReader(tokenizer, manifest.spec.vocab_size, manifest.limits.max_model_len)


def load_prompt_reader(bundle: Path) -> PromptReader:
    """With a tokenizer of its own."""
    from octavo.backends.bundle import read_manifest

    return prompt_reader(bundle, Tokenizer.from_bundle(bundle, read_manifest(bundle).spec))

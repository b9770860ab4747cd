"""Writes an engine bundle for the null backend."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.backends.bundle import MANIFEST_NAME
from octavo.graphs import bindings

if TYPE_CHECKING:
    from octavo.backends.manifest import BindingRecord, Limits, Manifest, Profile

MODEL_NAME = "model.null"


def write_engine(
    path: Path,
    *,
    vocab_size: int,
    limits: Limits,
    eos_token_ids: Sequence[int] = (),
    sampled_vocab_size: int | None = None,
    bos_token_id: int | None = None,
    extra_files: Mapping[str, bytes] | None = None,
) -> Path:
    """Writes a loadable bundle to the folder `path`; `extra_files` may add a tokenizer."""
    from octavo.backends.manifest import FileRecord

    files = {MODEL_NAME: f"vocab_size {vocab_size}\n".encode(), **(extra_files or {})}
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    records = tuple(
        FileRecord(path=name, size=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in sorted(files.items())
    )
    manifest = make_manifest(
        vocab_size=vocab_size,
        limits=limits,
        eos_token_ids=eos_token_ids,
        sampled_vocab_size=sampled_vocab_size,
        bos_token_id=bos_token_id,
    ).model_copy(update={"files": records})
    (path / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=2))
    return path


def make_manifest(
    *,
    vocab_size: int,
    limits: Limits,
    eos_token_ids: Sequence[int] = (),
    sampled_vocab_size: int | None = None,
    bos_token_id: int | None = None,
) -> Manifest:
    """The manifest of a null engine without files."""
    from octavo.backends.manifest import Manifest, Target
    from octavo.graphs.spec import AttentionSpec, ModelSpec

    spec = ModelSpec(
        architecture="NullForCausalLM",
        model_type="null",
        vocab_size=vocab_size,
        hidden_size=2,
        max_position_embeddings=limits.max_model_len,
        tie_word_embeddings=False,
        # 16 bytes a token, what the null cache really stores: its id and its position.
        layers=(
            AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=2, value_head_dim=2, scale=1.0),
        ),
        bos_token_id=bos_token_id,
        eos_token_ids=tuple(eos_token_ids),
        num_parameters=0,
        sampled_vocab_size=vocab_size if sampled_vocab_size is None else sampled_vocab_size,
    )
    caches = tuple(spec.kv_cache_bindings(limits.block_size, "float32"))
    return Manifest(
        backend="null",
        spec=spec,
        limits=limits,
        dtype="float32",
        kv_cache_dtype="float32",
        inputs=tuple(_record(binding) for binding in (*bindings.STEP_INPUTS, *caches)),
        outputs=(_record(bindings.logits(spec.vocab_size)),),
        profiles=(mixed_profile(limits),),
        target=Target(architecture="any"),
        versions={},
    )


def _record(binding: bindings.Binding) -> BindingRecord:
    from octavo.backends.manifest import BindingRecord

    return BindingRecord(name=binding.name, dtype=binding.dtype, shape=binding.shape)


def mixed_profile(limits: Limits) -> Profile:
    """The one profile of a null engine: any step within its limits."""
    from octavo.backends.manifest import Profile, Range

    def up_to(largest: int, smallest: int = 1) -> Range:
        return Range(min=smallest, opt=largest, max=largest)

    return Profile(
        name="mixed",
        dims={
            bindings.TOKENS: up_to(limits.max_num_batched_tokens),
            bindings.SEQUENCES: up_to(limits.max_num_seqs),
            bindings.BLOCKS_PER_SEQUENCE: up_to(limits.max_blocks_per_seq),
            bindings.LOGITS_ROWS: up_to(limits.max_num_batched_tokens, smallest=0),
        },
    )

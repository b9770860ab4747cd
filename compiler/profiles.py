"""The step shapes that an engine serves, named, with the sizes it should be fastest at.

All of them run the same graph. Backends that choose kernels ahead of time (TensorRT) get one
optimisation profile for each; the others need only the bounds.
"""

from __future__ import annotations

from octavo.backends.manifest import DEFAULT_MAX_DRAFT_TOKENS, Limits, Profile, Range
from octavo.graphs.bindings import (
    BLOCKS_PER_SEQUENCE,
    LOGITS_ROWS,
    SEQUENCES,
    SEQUENCES_PLUS_ONE,
    TOKENS,
)


def make_profiles(
    limits: Limits, max_draft_tokens: int = DEFAULT_MAX_DRAFT_TOKENS
) -> tuple[Profile, ...]:
    """decode: one token a sequence; prefill: one long sequence; mixed: a chunk beside decodes;
    verify: a sampled token and up to `max_draft_tokens` drafts for each sequence."""
    tokens, sequences = (
        limits.max_num_batched_tokens,
        min(limits.max_num_seqs, limits.max_num_batched_tokens),
    )
    few = max(1, sequences // 4)
    verified = min(tokens, sequences * (max_draft_tokens + 1))
    typical = min(verified, few * (max_draft_tokens + 1))
    return (
        _profile(limits, "decode", (sequences, few), (sequences, few), (sequences, few)),
        _profile(limits, "prefill", (tokens, min(tokens, 512)), (sequences, 1), (sequences, 1)),
        _profile(limits, "mixed", (tokens, tokens), (sequences, few), (sequences, few)),
        _profile(limits, "verify", (verified, typical), (sequences, few), (verified, typical)),
    )


def _profile(
    limits: Limits,
    name: str,
    tokens: tuple[int, int],
    sequences: tuple[int, int],
    rows: tuple[int, int],
) -> Profile:
    """Each pair is the largest and the typical size."""
    width = limits.max_blocks_per_seq
    return Profile(
        name=name,
        dims={
            TOKENS: _range(1, tokens),
            SEQUENCES: _range(1, sequences),
            SEQUENCES_PLUS_ONE: _range(2, (sequences[0] + 1, sequences[1] + 1)),
            BLOCKS_PER_SEQUENCE: _range(1, (width, max(1, width // 4))),
            # A step whose prompts all go on in the next one wants no logits.
            LOGITS_ROWS: _range(0, rows),
        },
    )


def _range(smallest: int, largest_and_typical: tuple[int, int]) -> Range:
    largest, typical = largest_and_typical
    return Range(min=smallest, opt=typical, max=largest)

"""EAGLE-3 as it is trained: a chain from every position at once (training-time test).

Entry j of a chain that begins behind position b lies at position p = b + j. It attends to the first
entries, made with the target's features, of positions up to b, and to the chain's own entries, just
as the paged cache holds them when the drafter is run.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from octavo.graphs.drafters.eagle3 import Eagle3


def chain_hidden_states(
    drafter: Eagle3, token_ids: Tensor, features: Tensor, depth: int
) -> list[Tensor]:
    """Hidden states [B, T, h] of `depth` entries of every chain, from which drafts are chosen.

    token_ids i64 [B, T], features [B, T, h]: of position p the token at p and the target's fused
    features. In the state of entry j at p, the draft of the token at p + 2; positions below j, and
    the last one, have no meaning.
    """
    following = functional.pad(token_ids[:, 1:], (0, 1))  # the token an entry is made of
    embedded = drafter.midlayer.input_layernorm(drafter.embed_tokens(following))
    positions = torch.arange(token_ids.shape[1])[None]
    angles = drafter.rotary_emb(embedded, positions)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    states: list[Tensor] = []
    given = features
    for entry in range(depth):
        if entry:  # what the entry before, one position earlier, has returned
            given = functional.pad(states[-1][:, :-1], (0, 0, 1, 0))
        states.append(_layer(drafter, embedded, given, angles, keys, values, entry))
    return states


def _layer(
    drafter: Eagle3,
    embedded: Tensor,
    given: Tensor,
    angles: tuple[Tensor, Tensor],
    keys: list[Tensor],
    values: list[Tensor],
    entry: int,
) -> Tensor:
    layer, attention = drafter.midlayer, drafter.midlayer.self_attn
    normed = layer.hidden_norm(given)
    joined = torch.cat([embedded, normed], dim=-1)
    shape = (*joined.shape[:2], -1, attention.head_dim)
    query, key, value = (
        projection(joined).view(shape).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, *angles)
    keys.append(key)
    values.append(value)
    mixed = functional.scaled_dot_product_attention(
        query,
        torch.cat(keys, dim=2),
        torch.cat(values, dim=2),
        attn_mask=visible(joined.shape[1], entry),
        enable_gqa=True,
    )
    residual = layer.residual(given, normed)
    hidden = residual + attention.o_proj(mixed.transpose(1, 2).flatten(2))
    result: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return result


def visible(length: int, entry: int) -> Tensor:
    """bool [T, (entry + 1) T]: what entry `entry` at p sees, first entries, then second ones, ...

    A position without a chain of that length sees itself, so that no row is empty.
    """
    at = torch.arange(length)
    distance = at[:, None] - at[None]  # of the position that is seen
    blocks = [distance >= entry]
    blocks += [distance == entry - seen for seen in range(1, entry + 1)]
    blocks[-1] = blocks[-1] | (at[:, None] == at[None])
    return torch.cat(blocks, dim=1)

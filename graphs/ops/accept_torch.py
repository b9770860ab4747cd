"""The torch reference of `octavo::accept`, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.graphs.ops import torch_library
from octavo.graphs.ops.accept import NO_TOKEN, SCHEMA


def distribution(
    logits: Tensor,  # f64 [L, V]
    temperature: Tensor,  # f64 [L]
    top_k: Tensor,  # i64 [L]
    top_p: Tensor,  # f64 [L]
    min_p: Tensor,  # f64 [L]
) -> Tensor:
    """f64 [L, V]: what is left of softmax(logits / temperature), summing to 1 in each row.

    Top-k keeps all that tie with the k-th; top-p the smallest set of most likely tokens that
    reaches p of what the others left, of ties at its edge the first ids. A row with temperature 0
    has all of its weight on the first of its largest logits. Rows of no numbers give no numbers.
    """
    size = logits.shape[1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    largest = ordered[:, :1]
    k = torch.where(top_k > 0, top_k, size).clamp(max=size)
    threshold = ordered.gather(1, (k - 1)[:, None])
    heat = torch.where(temperature > 0, temperature, 1.0)[:, None]
    weights = ((ordered - largest) / heat).exp()
    weights = torch.where(ordered >= threshold, weights, 0.0)
    weights = torch.where(weights >= min_p[:, None], weights, 0.0)
    before = weights.cumsum(-1) - weights
    reached = before >= top_p[:, None] * weights.sum(-1, keepdim=True)
    weights = torch.where(reached & (top_p < 1)[:, None], 0.0, weights)
    first = torch.arange(size) == 0
    weights = torch.where((temperature > 0)[:, None], weights, first.double())
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.zeros_like(weights).scatter(1, order, weights)


def accept(
    logits: Tensor,  # f32 [L, V]
    edit_rows: Tensor,  # i32 [E]
    edit_token_ids: Tensor,  # i32 [E]
    edit_values: Tensor,  # f32 [E]
    first_rows: Tensor,  # i32 [L]
    draft_token_ids: Tensor,  # i32 [L]
    draft_probs: Tensor,  # f32 [P, V]
    prob_rows: Tensor,  # i32 [L]
    temperature: Tensor,  # f64 [L]
    top_k: Tensor,  # i32 [L]
    top_p: Tensor,  # f64 [L]
    min_p: Tensor,  # f64 [L]
    uniforms: Tensor,  # f64 [L, 2]
    vocab: int,
) -> Tensor:  # i32 [L]
    edited = logits.clone()
    edited[edit_rows.long(), edit_token_ids.long()] = edit_values
    edited = edited[:, :vocab]
    largest = edited.max(-1).values if edited.numel() else edited.sum(-1)
    is_finite = largest.isfinite()  # NaN is the largest of all
    probs = distribution(edited.double(), temperature, top_k.long(), top_p, min_p)
    drafts = draft_token_ids.long()
    has_draft = drafts >= 0
    proposed = torch.nn.functional.one_hot(drafts.clamp(min=0), vocab).double()
    drawn = (prob_rows >= 0) & has_draft
    proposed[drawn] = draft_probs[prob_rows[drawn].long(), :vocab].double()
    proposed[~has_draft] = 0.0
    at = drafts.clamp(min=0)[:, None]
    p, q = probs.gather(1, at)[:, 0], proposed.gather(1, at)[:, 0]
    # Not "u < p / q": what was never likely must not pass because u is 0.
    accepted = has_draft & is_finite & (uniforms[:, 0] * q < p)
    residual = (probs - proposed).clamp(min=0)
    is_empty = residual.sum(-1, keepdim=True) <= 0
    drawn_tokens = _draw(torch.where(is_empty, probs, residual), uniforms[:, 1])
    tokens = torch.where(accepted, drafts, drawn_tokens)
    tokens = torch.where(is_finite, tokens, NO_TOKEN)
    ends = (~accepted).long().cumsum(0)
    before = ends - (~accepted).long()  # rows before that end their sequence, of all sequences
    reached = before == before[first_rows.long()]
    return torch.where(reached, tokens, NO_TOKEN).int()


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """i64 [L]: the first token at which the cumulative weight [L, V] passes u of all."""
    cumulative = weights.cumsum(-1)
    passed = cumulative > uniforms[:, None] * cumulative[:, -1:]
    return passed.long().argmax(-1)


def _shape(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int32)


OPERATOR = torch_library.register(SCHEMA, accept, _shape)

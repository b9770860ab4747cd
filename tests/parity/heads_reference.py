"""Medusa's heads and the MLP speculator from their formulas, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = dict[str, NDArray[Any]]

_erf = np.vectorize(math.erf)


def medusa_head(
    hidden: Array,  # [T, h]
    layers: Sequence[tuple[NDArray[Any], NDArray[Any] | float]],  # weight [h, h], bias [h]
    lm_head: NDArray[Any],  # [V, h]
) -> Array:
    """x + silu(W x + b), layer after layer, then the output embedding: [T, V]."""
    for weight, bias in layers:
        inner = hidden @ weight.astype(np.float64).T + bias
        hidden = hidden + inner / (1 + np.exp(-inner))
    return hidden @ lm_head.astype(np.float64).T


def medusa(hidden: Array, weights: Weights, num_heads: int, num_layers: int) -> Array:
    """[T, num_heads, V], of weights in FasterDecoding's names."""
    heads = [
        medusa_head(
            hidden,
            [
                (weights[f"{head}.{layer}.linear.weight"], weights[f"{head}.{layer}.linear.bias"])
                for layer in range(num_layers)
            ],
            weights[f"{head}.{num_layers}.weight"],
        )
        for head in range(num_heads)
    ]
    return np.stack(heads, axis=1)


def _over_root_mean_square(x: Array) -> Array:
    result: Array = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)
    return result


def mlp_speculator(
    hidden: Array,  # [T, h]
    token_ids: NDArray[Any],  # [T], the tokens that were sampled from `hidden`
    weights: Weights,  # in IBM's names
    *,
    n_predict: int,
    is_tied: bool = False,
    scales_input: bool = False,
) -> Array:
    """[T, n_predict, V]. Each stage embeds the likeliest token of the one before it."""
    state_weight = 0.5 ** (0.5 / n_predict)
    emb_weight = math.sqrt(1 - state_weight**2)
    state, stages = hidden, []
    if scales_input:
        state = _over_root_mean_square(state) / math.sqrt(2)
    for stage in range(n_predict):
        own = 0 if is_tied else stage
        projection = weights[f"speculator.proj.{min(stage, 1) if is_tied else stage}.weight"]
        embedding = weights[f"speculator.emb.{own}.weight"].astype(np.float64)
        inner_size = embedding.shape[1]
        token = embedding[token_ids] * emb_weight * math.sqrt(inner_size / 2)
        state = state @ projection.astype(np.float64).T * state_weight + token
        state = _over_root_mean_square(state)
        state = state * weights[f"speculator.ln.{own}.weight"]
        state = state + weights[f"speculator.ln.{own}.bias"]
        state = state * (1 + _erf(state / math.sqrt(2))) / 2
        logits = state @ weights[f"speculator.head.{own}.weight"].astype(np.float64).T
        stages.append(logits)
        token_ids = logits.argmax(axis=-1)
    return np.stack(stages, axis=1)

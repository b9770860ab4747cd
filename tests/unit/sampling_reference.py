"""What sampling means, written from its definition: sorting all tokens, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import Float32Array
from octavo.runtime.sampling.sampler import Sampler, SamplingRow
from octavo.runtime.sampling.sampling_params import SamplingParams
from tests.unit.philox import uniform

Float64Array = NDArray[np.float64]
Int64Array = NDArray[np.int64]

SEED = 1234
# Of a cumulative probability: the native weights are float32, each right to about 1e-6.
TOLERANCE = 1e-6


class Distribution(NamedTuple):
    probabilities: Float64Array  # [V], 0 where a token is not kept
    margin: float  # by how much a decision on the kept set was made, in probability

    @property
    def kept(self) -> Int64Array:
        return np.flatnonzero(self.probabilities)


def distribution(logits: Float32Array, params: SamplingParams) -> Distribution:
    """Temperature, then min-p, then top-k, then top-p over what these leave."""
    scaled = logits.astype(np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.lexsort((np.arange(len(logits)), -scaled))  # most likely first, then lower ids
    likely = weights[order] >= params.min_p
    margin = float(np.abs(weights[weights > 0] - params.min_p).min())
    if 0 < params.top_k < len(logits):
        likely &= scaled[order] >= scaled[order[params.top_k - 1]]
    order = order[likely]
    cumulative = np.cumsum(weights[order]) / weights[order].sum()
    if params.top_p < 1:
        order = order[: int(np.searchsorted(cumulative, params.top_p)) + 1]
        margin = min(margin, float(np.abs(cumulative - params.top_p).min()))
    probabilities = np.zeros(len(logits))
    probabilities[order] = weights[order] / weights[order].sum()
    return Distribution(probabilities, margin)


def draw(
    sampler: Sampler, logits: Float32Array, params: SamplingParams, count: int, choice: int = 0
) -> Int64Array:
    """[count] tokens of one row at the positions 0, 1, ..."""
    rows = [SamplingRow(logits, params, SEED, position, choice) for position in range(count)]
    return np.array(sampler.sample(rows))


def assert_drawn(
    tokens: Int64Array, wanted: Distribution, uniforms: Sequence[float] | None = None
) -> None:
    """Each token is the one whose share of [0, 1), in the order of ids, holds the uniform number.

    A kept set that is wrong by one token of a probability above the tolerance moves the shares of
    others, so it shows. `uniforms` are those of `draw`, unless given.
    """
    if uniforms is None:
        uniforms = [uniform(SEED, position) for position in range(len(tokens))]
    assert (wanted.probabilities[tokens] > 0).all()
    ends = np.cumsum(wanted.probabilities)
    u = np.asarray(uniforms)
    assert (u <= ends[tokens] + TOLERANCE).all()
    assert (u >= ends[tokens] - wanted.probabilities[tokens] - TOLERANCE).all()


def chi_square_excess(counts: Int64Array, probabilities: Float64Array) -> float:
    """Standard deviations by which chi-square lies above its mean.

    By the Wilson-Hilferty transformation, which makes chi-square normal for few degrees as well.
    Neighbours share a bin that expects 8 draws or more: order both by what might go wrong.
    """
    expected = probabilities * counts.sum()
    starts, within = [0], 0.0
    for index, count in enumerate(expected.tolist()):
        if within >= 8:
            starts.append(index)
            within = 0.0
        within += count
    if within < 8 and len(starts) > 1:
        del starts[-1]
    observed = np.add.reduceat(counts, starts)
    expected = np.add.reduceat(expected, starts)
    if len(starts) == 1:
        return 0.0
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(starts) - 1
    variance = 2 / (9 * freedom)
    return float(((chi_square / freedom) ** (1 / 3) - (1 - variance)) / np.sqrt(variance))

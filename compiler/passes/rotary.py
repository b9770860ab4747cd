"""What rotary embedding a value went through, read off the terms of its elements."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.compiler.passes.elements import Terms


@dataclass(frozen=True)
class Rotation:
    """y[i] = x[i] * cos[i] - x[j] * sin[i], y[j] = x[j] * cos[j] + x[i] * sin[j] for pairs (i, j).

    `cos` and `sin` are numbers of elements, i64 [T, R]; pairs are neighbours if interleaved, else
    R / 2 apart.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def same(self, other: Rotation) -> bool:
        equal = torch.equal(self.cos, other.cos) and torch.equal(self.sin, other.sin)
        return equal and self.interleaved == other.interleaved


@dataclass(frozen=True)
class Heads:
    """What queries or keys are before they are turned."""

    numbers: Tensor  # i64 [T, H, D], of elements of leaves
    rotation: Rotation | None = None
    scale: float = 1.0


class NoRotaryError(Exception):
    """Why the terms are no rotary embedding that the operator computes."""


def read(terms: Terms) -> Heads:
    """`terms` [T, H, D]: what was turned, and by which angles."""
    coefficient, value, factor = _nonzero_first(terms)
    count = (coefficient != 0).sum(0)
    turned = count == 2
    if bool((count > 2).any()) or bool((count < 1).any()):
        raise NoRotaryError("its elements are sums of other than two products")
    scale = float(coefficient[0].abs().max())
    if bool((coefficient[:2].abs() - scale)[coefficient[:2] != 0].any()):
        raise NoRotaryError("its elements are scaled differently")
    plain = ~turned
    if bool(factor[0][plain].any()) or bool((coefficient[0][plain] < 0).any()):
        raise NoRotaryError("its elements are scaled, not turned")
    if not bool(turned.any()):
        return Heads(value[0], scale=scale)
    size = _turned_size(turned)
    parts = (x[:2, ..., :size] for x in (coefficient, value, factor))
    own, rotation = _rotation(*parts)
    return Heads(torch.cat([own, value[0][..., size:]], -1), rotation, scale)


def _nonzero_first(terms: Terms) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients, values and factors [at least 2, T, H, D], terms of coefficient 0 at the end."""
    names = ("coefficient", "value", "factor")
    stacked = [torch.stack([getattr(term, name) for term in terms]) for name in names]
    if len(terms) == 1:
        stacked = [torch.cat([x, torch.zeros_like(x)]) for x in stacked]
    order = (stacked[0] == 0).to(torch.int8).argsort(dim=0, stable=True)
    coefficient, value, factor = (x.gather(0, order) for x in stacked)
    return coefficient, value, factor


def _turned_size(turned: Tensor) -> int:
    """R, for turned elements that are the first R of every head."""
    size = int(turned[0, 0].sum())
    first = torch.arange(turned.shape[2]) < size
    if size % 2 or not bool((turned == first).all()):
        raise NoRotaryError("it does not turn the first elements of a head")
    return size


def _rotation(coefficient: Tensor, value: Tensor, factor: Tensor) -> tuple[Tensor, Rotation]:
    """[2, T, H, R] each: the elements that are turned [T, H, R], and how."""
    if bool((factor == 0).any()):
        raise NoRotaryError("its elements are added, not turned")
    minus = coefficient < 0
    negative = minus.any(0)
    if bool(minus.all(0).any()):
        raise NoRotaryError("it turns the other way")
    # The first of a pair has its partner's term negative. What is own there is foreign elsewhere.
    swapped = minus[0]
    foreign = torch.where(swapped, value[1], value[0])[negative]
    swapped = torch.where(negative, swapped, torch.isin(value[0], foreign))
    own, partner = _ordered(value, swapped)
    cosine, sine = _ordered(factor, swapped)
    if not bool((cosine == cosine[:, :1]).all() and (sine == sine[:, :1]).all()):
        raise NoRotaryError("it turns every head by other angles")
    for interleaved in (False, True):
        if _paired(own, partner, negative, interleaved):
            return own, Rotation(cosine[:, 0], sine[:, 0], interleaved)
    raise NoRotaryError("its pairs are neither neighbours nor halves")


def _ordered(pair: Tensor, swapped: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(swapped, pair[1], pair[0]), torch.where(swapped, pair[0], pair[1])


def _paired(own: Tensor, partner: Tensor, negative: Tensor, interleaved: bool) -> bool:
    half = own.shape[-1] // 2
    first, second = (
        (slice(0, None, 2), slice(1, None, 2))
        if interleaved
        else (slice(0, half), slice(half, None))
    )
    crossed = torch.equal(partner[..., first], own[..., second]) and torch.equal(
        partner[..., second], own[..., first]
    )
    signs = bool(negative[..., first].all()) and not bool(negative[..., second].any())
    return crossed and signs

"""From the manifest's profiles to the sizes TensorRT is told, and from a step to its profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.graphs import bindings
from octavo.graphs.errors import BackendError, BuildError

if TYPE_CHECKING:
    from octavo.backends.manifest import Limits, Profile
    from octavo.graphs.bindings import Binding

Shape = tuple[int, ...]
Bounds = tuple[Shape, Shape, Shape]  # smallest, typical, largest
Sizes = Mapping[str, int]  # of symbolic dimensions

# Sizes of tensors are 32-bit integers in TensorRT.
_MOST_ELEMENTS = 2**31 - 1
_DIM_NAMES = {
    bindings.TOKENS: "tokens",
    bindings.SEQUENCES: "sequences",
    bindings.BLOCKS_PER_SEQUENCE: "blocks of one sequence",
    bindings.LOGITS_ROWS: "rows of logits",
}


@dataclass(frozen=True)
class ShapeProfile:
    """An optimisation profile: the bounds of every input's shape."""

    name: str
    shapes: dict[str, Bounds]


def shape_profiles(
    profiles: Iterable[Profile],
    inputs: Sequence[Binding],
    caches: Sequence[Binding],
    limits: Limits,
) -> tuple[ShapeProfile, ...]:
    """What a build declares. No dimension may be empty: a step that wants no logits gets a row."""
    blocks = cache_blocks(caches, limits)
    made = []
    for profile in profiles:
        ranges = {
            name: (max(1, one.min), max(1, one.opt), max(1, one.max))
            for name, one in profile.dims.items()
        }
        ranges[bindings.CACHE_BLOCKS] = blocks
        shapes = {binding.name: _bounds(binding, ranges) for binding in (*inputs, *caches)}
        made.append(ShapeProfile(profile.name, shapes))
    return tuple(made)


def cache_blocks(caches: Iterable[Binding], limits: Limits) -> tuple[int, int, int]:
    """Smallest, typical and largest number of cache blocks, which a build does not know."""
    most = max_cache_blocks(caches)
    return 1, min(most, limits.max_num_seqs * limits.max_blocks_per_seq), most


def max_cache_blocks(caches: Iterable[Binding]) -> int:
    elements = [_volume(cache.shape[1:]) for cache in caches]
    return _MOST_ELEMENTS // max(elements, default=1)


def require_ordered(profile: ShapeProfile) -> None:
    """Raises BuildError naming an input whose bounds are out of order."""
    for name, (smallest, typical, largest) in profile.shapes.items():
        ordered = all(a <= b <= c for a, b, c in zip(smallest, typical, largest, strict=True))
        if not ordered or min(smallest, default=1) < 1:
            raise BuildError(
                f"the profile {profile.name} has {name} of {list(smallest)} at least, "
                f"{list(typical)} typically and {list(largest)} at most, which is no range: "
                "give sizes from 1 in this order"
            )


def choose_profile(profiles: Sequence[Profile], sizes: Sizes) -> int:
    """The first profile that admits a step of `sizes`; BackendError naming the limit it passes."""
    for index, profile in enumerate(profiles):
        if _admits(profile, sizes):
            return index
    for name, size in sizes.items():
        most = max((p.dims[name].max for p in profiles if name in p.dims), default=size)
        if size > most:
            raise BackendError(
                f"the step has {size} {_DIM_NAMES.get(name, name)} and the engine's profiles admit "
                f"{most} at most: make smaller steps or build an engine with larger limits"
            )
    raise BackendError(
        f"no profile of the engine admits a step of the sizes {dict(sizes)}, "
        f"there are {', '.join(profile.name for profile in profiles)}: "
        "make smaller steps or build an engine with larger limits"
    )


def largest(profiles: Iterable[Profile], name: str) -> int:
    """Of a symbolic dimension over all profiles, at least 1."""
    return max([1, *(p.dims[name].max for p in profiles if name in p.dims)])


def padded_width(width: int, most: int) -> int:
    """Block tables get few widths, so that few graphs are captured: powers of two."""
    return min(most, 1 << max(0, width - 1).bit_length())


def resolve(shape: Sequence[str | int], sizes: Sizes) -> Shape:
    return tuple(size if isinstance(size, int) else sizes[size] for size in shape)


def _admits(profile: Profile, sizes: Sizes) -> bool:
    return all(
        max(1, profile.dims[name].min) <= size <= max(1, profile.dims[name].max)
        for name, size in sizes.items()
        if name in profile.dims
    )


def _bounds(binding: Binding, ranges: Mapping[str, tuple[int, int, int]]) -> Bounds:
    def at(index: int) -> Shape:
        return tuple(
            size if isinstance(size, int) else ranges[size][index] for size in binding.shape
        )

    return at(0), at(1), at(2)


def _volume(shape: Iterable[str | int]) -> int:
    volume = 1
    for size in shape:
        volume *= int(size)
    return volume

"""What copies of cache blocks that follow one another come to as one step."""

from __future__ import annotations

from collections.abc import Sequence


def block_origins(copies: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Destination -> the block whose contents, before all copies, it holds after them.

    For devices, where all blocks are read before any is written. Blocks that keep what they hold
    are left out.
    """
    origins: dict[int, int] = {}
    for source, destination in copies:
        origins[destination] = origins.get(source, source)
    return {destination: source for destination, source in origins.items() if destination != source}

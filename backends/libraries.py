"""Which Python libraries are installed, without importing them."""

from __future__ import annotations

import importlib.metadata


def version_of(*distributions: str) -> str | None:
    """Of the first that is installed; None where none is, or where what is there is broken."""
    for name in distributions:
        try:
            found: str | None = importlib.metadata.version(name)
        except Exception:  # a half-removed package may raise anything, or have no version
            continue
        if found is not None:
            return found
    return None


def release(version: str | None) -> tuple[str, ...]:
    """Major and minor: "2.13.0+cpu" -> ("2", "13")"""
    return tuple((version or "").split("+")[0].split(".")[:2])

"""A drafter's folder: its config.json, read key by key, and whether it fits the target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.compiler.checkpoints.hf_folder import read_object
from octavo.graphs.errors import CheckpointError

if TYPE_CHECKING:
    from octavo.compiler.drafters.base import TargetFacts


class DrafterConfig:
    """Raises CheckpointError for a missing or damaged file, and for a value of another type.

    Several names of a key are those that different projects write; the first that is there counts.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "config.json"
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is no folder: give the one that holds the drafter")
        if not self.path.is_file():
            raise CheckpointError(f"{folder} has no config.json: give the drafter's folder")
        self._content = read_object(self.path)

    def has(self, name: str) -> bool:
        return self._content.get(name) is not None

    def text(self, name: str, default: str) -> str:
        return str(self._content.get(name, default))

    def integer(self, *names: str, least: int = 1) -> int | None:
        """None if none of the names is there."""
        for name in filter(self.has, names):
            value = self._content[name]
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise self._wrong(name, f"a whole number of at least {least}")
            return value
        return None

    def required_integer(self, *names: str, least: int = 1) -> int:
        value = self.integer(*names, least=least)
        if value is None:
            raise CheckpointError(
                f"{self.path} names no {' or '.join(names)}: get the drafter's complete config"
            )
        return value

    def number(self, name: str, default: float) -> float:
        value = self._content.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(name, "a number")
        return float(value)

    def flag(self, *names: str) -> bool:
        """False if none of the names is there."""
        for name in filter(self.has, names):
            value = self._content[name]
            if not isinstance(value, bool):
                raise self._wrong(name, "true or false")
            return value
        return False

    def _wrong(self, name: str, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} has {name} = {json.dumps(self._content[name])} where {expected} belongs: "
            "download it again"
        )


def check_fits(
    path: Path, target: TargetFacts, *, hidden_size: int | None, vocab_size: int | None
) -> None:
    """Raises CheckpointError if a drafter was made for another model; None for what is not known.

    hidden_size  of the hidden states that it reads
    """
    for what, found, wanted in (
        ("vocabulary", vocab_size, target.vocab_size),
        ("hidden size", hidden_size, target.hidden_size),
    ):
        if found not in (None, wanted):
            raise CheckpointError(
                f"{path} drafts for a model with a {what} of {found} and {target.checkpoint.path} "
                f"has one of {wanted}: get the drafter that was made for this model"
            )

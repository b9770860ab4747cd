"""What a drafter's files hold and its graph has not: ignoring it would only spoil the drafts.

No output would be wrong, since every draft is verified; so nobody would notice but by the speed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from octavo.compiler.drafters.tensors import TensorFolder, shown
from octavo.graphs.errors import CheckpointError

# Computed from the config, and of the parts that are only for training.
_NEVER_READ = ("rotary_emb.inv_freq", "t2d")


def refuse_unread_tensors(
    tensors: TensorFolder, read: Iterable[str], owner: str, *, prefix: str = ""
) -> None:
    """Raises CheckpointError for stored tensors behind `prefix` that are not among those `read`."""
    known = set(read)
    unread = [
        name
        for name in tensors.tensors
        if name.startswith(prefix) and name not in known and not name.endswith(_NEVER_READ)
    ]
    if unread:
        raise CheckpointError(
            f"{tensors.path} has {len(unread)} tensors that are not of {owner} ({shown(unread)}), "
            "so its graph is another one: choose another drafter"
        )


def refuse_other_settings(
    path: Path, content: Mapping[str, Any], known: Mapping[str, bool | float]
) -> None:
    """Raises CheckpointError for a config that has another value of a key than the one `known`."""
    for key, value in known.items():
        found = content.get(key)
        if found is not None and found != value:
            raise CheckpointError(
                f"{path} has {key} = {json.dumps(found)} in its config and only "
                f"{json.dumps(value)} is known: choose another drafter"
            )

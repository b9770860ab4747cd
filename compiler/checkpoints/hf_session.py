"""Running transformers quietly, offline and with its failures as sentences."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.graphs.errors import CheckpointError, OctavoError


@contextlib.contextmanager
def quiet_and_offline() -> Iterator[None]:
    """Silences transformers' log, bars and warnings and keeps it off the network; restores all."""
    from huggingface_hub import constants
    from transformers.utils import logging as hf_logging

    log: Any = hf_logging  # its functions are untyped
    verbosity, bars, offline = (
        log.get_verbosity(),
        log.is_progress_bar_enabled(),
        constants.HF_HUB_OFFLINE,
    )
    log.set_verbosity(logging.CRITICAL)
    log.disable_progress_bar()
    constants.HF_HUB_OFFLINE = True
    try:
        with warnings.catch_warnings():
            # The checkpoint's own files cause them (old key names and the like), not our calls.
            warnings.filterwarnings("ignore", module=r"(transformers|huggingface_hub|torch|gguf)\b")
            yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


@contextlib.contextmanager
def loading(what: str, path: Path, remedy: str = "download it again") -> Iterator[None]:
    """Runs transformers as above; any failure of it becomes a CheckpointError of one sentence."""
    try:
        with quiet_and_offline():
            yield
    except (OctavoError, MemoryError):
        raise
    except Exception as error:  # transformers raises whatever the broken file provokes
        raise CheckpointError(
            f"{what} of {path} cannot be read ({first_line(error)}): {remedy}"
        ) from error


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.:')}" if lines else type(error).__name__

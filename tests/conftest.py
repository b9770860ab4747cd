"""Fixtures that several layers share."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.backends import null
from octavo.backends.manifest import Limits


@pytest.fixture(scope="session")
def null_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of the null backend without a tokenizer, whose tokens are arithmetic."""
    limits = Limits(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, block_size=16)
    path = tmp_path_factory.mktemp("engines") / "null"
    return null.write_engine(path, vocab_size=97, limits=limits)

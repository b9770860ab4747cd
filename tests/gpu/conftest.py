"""Everything here needs a CUDA device: without one nothing is collected."""

from __future__ import annotations

import pytest

from octavo.backends import cuda_devices
from tests.backend.tiny_engines import tiny_engines

__all__ = ["tiny_engines"]

if not cuda_devices.compute_capabilities():
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)

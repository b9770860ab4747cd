"""Fixtures of the suite that every backend passes, and of the native kernels."""

from __future__ import annotations

import pytest

from octavo.backends import kernels
from tests.backend.cuda_engines import cuda_engines
from tests.backend.fused_attention_steps import Variant
from tests.backend.kernel_variants import VARIANTS, library_of
from tests.backend.tiny_engines import tiny_engines

__all__ = ["cuda_engines", "tiny_engines"]


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Variant:
    """The fused attention ops of each instruction set that runs here."""
    library_of(request.param)
    return Variant(request.param)


@pytest.fixture(scope="module")
def best() -> Variant:
    """Those that an engine would use here."""
    return Variant(kernels.instruction_set())

"""What a test needs and a machine may lack: a server, a browser."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

REQUIRE_SERVERS = "OCTAVO_REQUIRE_SERVERS"


def skip_or_fail(reason: str) -> NoReturn:
    """Skips the test, or fails it where everything must be there: OCTAVO_REQUIRE_SERVERS=1."""
    if os.environ.get(REQUIRE_SERVERS) == "1":
        pytest.fail(f"{reason}, and {REQUIRE_SERVERS} is 1", pytrace=False)
    pytest.skip(reason)

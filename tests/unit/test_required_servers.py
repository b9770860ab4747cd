"""Tests that need a server skip without it, save where it must be there."""

from __future__ import annotations

import pytest

from tests.e2e.required import REQUIRE_SERVERS, skip_or_fail


def test_what_is_missing_skips_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REQUIRE_SERVERS, raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"^no server is here$"):
        skip_or_fail("no server is here")


def test_what_must_be_there_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRE_SERVERS, "1")
    with pytest.raises(pytest.fail.Exception, match=r"^no server is here, and OCTAVO_REQUIRE_SERV"):
        skip_or_fail("no server is here")

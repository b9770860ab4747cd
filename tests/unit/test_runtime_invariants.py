"""Every invariant notices its own violation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from octavo.runtime import invariants
from octavo.runtime.engine import CHECK_INVARIANTS
from octavo.runtime.invariants import InvariantError, Snapshot
from octavo.runtime.request import RequestStatus
from tests.unit.runtime_harness import Harness, random_tokens


@pytest.fixture
def sound() -> Snapshot:
    """Two running requests that share a block, one that waits, and cached blocks without a user."""
    harness = Harness(num_kv_blocks=12, block_size=4, max_num_seqs=2)
    harness.add(random_tokens(9, seed=9), max_tokens=1)
    harness.run()
    shared = random_tokens(6)
    for seed in range(3):
        harness.add(shared + random_tokens(3, seed=seed), max_tokens=4)
        harness.step()
    return invariants.snapshot(harness.engine.scheduler)


def changed(state: Snapshot, queue: str, index: int, **values: Any) -> Snapshot:
    requests = list(getattr(state, queue))
    requests[index] = dataclasses.replace(requests[index], **values)
    replacement: dict[str, Any] = {queue: tuple(requests)}
    return dataclasses.replace(state, **replacement)


def test_a_sound_state_has_no_violation(sound: Snapshot) -> None:
    assert list(invariants.find_violations(sound)) == []
    assert (len(sound.running), len(sound.waiting)) == (2, 1)
    assert max(sound.ref_counts) == 2
    assert sound.evictable
    assert sound.free


def test_reference_counts(sound: Snapshot) -> None:
    counts = list(sound.ref_counts)
    counts[sound.free[0]] = 1
    state = dataclasses.replace(sound, ref_counts=tuple(counts))
    with pytest.raises(InvariantError, match=f"block {sound.free[0]} counts 1 users and has 0"):
        invariants.check(state)


@pytest.mark.parametrize(
    ("queue", "values", "sentence"),
    [
        ("running", {"block_ids": (0, 0, 1)}, "holds a block twice"),
        ("running", {"block_ids": ()}, "holds 0 blocks for"),
        ("running", {"status": RequestStatus.WAITING}, "is RequestStatus.WAITING"),
        ("running", {"num_computed_tokens": 99}, "has computed 99 of"),
        ("running", {"max_total_tokens": 5}, "has reached its 5 tokens"),
        ("running", {"rank": (1, 0, 0)}, "not in the order of their rank"),
        ("running", {"cache_salt": b"x"}, "holds another prefix"),
        ("waiting", {"num_computed_tokens": 1}, "holds blocks"),
        ("waiting", {"block_ids": (1,)}, "holds blocks"),
        ("waiting", {"status": RequestStatus.FINISHED}, "is RequestStatus.FINISHED"),
    ],
)
def test_requests(sound: Snapshot, queue: str, values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvariantError, match=sentence):
        invariants.check(changed(sound, queue, 0, **values))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"free": ()}, "are not the unused"),
        ({"max_num_seqs": 1}, "2 requests run, the limit is 1"),
        ({"cached": ()}, "is not in the prefix cache"),
    ],
)
def test_pool_and_queues(sound: Snapshot, values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvariantError, match=sentence):
        invariants.check(dataclasses.replace(sound, **values))


def test_free_blocks_are_not_cached(sound: Snapshot) -> None:
    moved = dataclasses.replace(sound, free=sound.free + sound.evictable, evictable=())
    with pytest.raises(InvariantError, match="is in the prefix cache"):
        invariants.check(moved)


def test_the_debug_switch_checks_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK_INVARIANTS, "1")
    harness = Harness()
    harness.add(random_tokens(5))
    harness.engine.step()
    harness.engine.pool._free.pop()
    with pytest.raises(InvariantError, match="are not the unused"):
        harness.engine.step()

"""The null backend: what it computes, and the inputs it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo.backends import registry
from octavo.backends.base import LoadOptions, StepInputs
from octavo.backends.bundle import read_manifest, verify_files
from octavo.backends.null import expected_next_token, write_engine
from octavo.backends.null.executable import NullExecutable
from octavo.graphs.errors import BackendError


@pytest.fixture
def executable(null_engine: Path) -> NullExecutable:
    manifest = read_manifest(null_engine)
    verify_files(null_engine, manifest.files)
    backend = registry.get("null")
    assert backend.check(manifest).ok
    loaded = backend.load(null_engine, manifest, LoadOptions())
    assert isinstance(loaded, NullExecutable)
    loaded.allocate_kv_cache(8)
    return loaded


def inputs() -> StepInputs:
    """Sequences of 20 and 3 tokens in the blocks 5, 2 and 7."""

    def i32(*values: int) -> np.ndarray:
        return np.array(values, dtype=np.int32)

    return StepInputs(
        token_ids=np.arange(23, dtype=np.int32),
        positions=i32(*range(20), *range(3)),
        slot_mapping=i32(*range(80, 96), *range(32, 36), *range(112, 115)),
        block_tables=np.array([[5, 2], [7, 0]], dtype=np.int32),
        query_start_loc=i32(0, 20, 23),
        prefix_offsets=i32(0, 0),
        logits_indices=i32(3, 19, 22),
    )


def test_rows_are_the_expected_tokens(executable: NullExecutable) -> None:
    logits = executable.run(inputs()).logits
    assert logits.shape == (3, 97)
    assert logits.dtype == np.float32
    assert logits.argmax(axis=1).tolist() == [
        expected_next_token(range(4), 97),
        expected_next_token(range(20), 97),
        expected_next_token([20, 21, 22], 97),
    ]
    assert all(len(set(row)) == 97 for row in logits.tolist())


def test_the_next_token_depends_on_order_and_on_every_token() -> None:
    vocab_size = 1 << 40
    base = list(range(50))
    variants = [base, base[::-1], base[1:], base[:-1], [1, 0, *base[2:]], [*base, 0], [0, *base]]
    variants += [[*base[:i], 77, *base[i + 1 :]] for i in range(50)]
    assert len({expected_next_token(tokens, vocab_size) for tokens in variants}) == len(variants)


Change = Callable[[StepInputs], dict[str, np.ndarray]]


def with_value(array: np.ndarray, index: int, value: int) -> np.ndarray:
    copy = array.copy()
    copy.reshape(-1)[index] = value
    return copy


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda s: {"positions": with_value(s.positions, 4, 9)}, "positions .* should be"),
        (lambda s: {"slot_mapping": with_value(s.slot_mapping, 4, 9)}, "slot_mapping .* should"),
        (lambda s: {"block_tables": with_value(s.block_tables, 0, 8)}, "outside the cache's 8"),
        (lambda s: {"prefix_offsets": with_value(s.prefix_offsets, 1, 5)}, "positions .* should"),
        (lambda s: {"token_ids": with_value(s.token_ids, 0, 97)}, "leave the vocabulary"),
        (lambda s: {"token_ids": s.token_ids.astype(np.int64)}, "not a contiguous int32"),
        (lambda s: {"token_ids": s.token_ids[:-1]}, "has shape"),
        (lambda s: {"positions": s.positions[::-1]}, "not a contiguous int32"),
        (lambda s: {"query_start_loc": with_value(s.query_start_loc, 2, 22)}, "does not divide"),
        (lambda s: {"query_start_loc": with_value(s.query_start_loc, 1, 0)}, "does not divide"),
        (lambda s: {"logits_indices": with_value(s.logits_indices, 0, 19)}, "do not ascend"),
        (lambda s: {"logits_indices": with_value(s.logits_indices, 2, 23)}, "are not rows of 23"),
        (lambda s: {"block_tables": s.block_tables[:, :1].copy()}, "too short"),
        (
            lambda _: {"block_tables": np.zeros((2, 17), dtype=np.int32)},
            "no profile of the engine admits",
        ),
    ],
)
def test_broken_inputs_are_refused(
    executable: NullExecutable, change: Change, sentence: str
) -> None:
    step = inputs()
    with pytest.raises(BackendError, match=sentence):
        executable.run(dataclasses.replace(step, **change(step)))


def test_sequences_may_not_write_the_same_slot(executable: NullExecutable) -> None:
    step = inputs()
    tables = with_value(step.block_tables, 2, 5)
    slots = step.slot_mapping.copy()
    slots[20:] = [80, 81, 82]
    with pytest.raises(BackendError, match="share a cache slot"):
        executable.run(dataclasses.replace(step, block_tables=tables, slot_mapping=slots))


def test_a_context_that_is_not_in_the_cache_is_noticed(executable: NullExecutable) -> None:
    step = inputs()
    executable.run(step)
    i32 = np.int32
    decode = StepInputs(
        token_ids=np.array([1], i32),
        positions=np.array([20], i32),
        slot_mapping=np.array([2 * 16 + 4], i32),
        block_tables=np.array([[5, 2]], i32),
        query_start_loc=np.array([0, 1], i32),
        prefix_offsets=np.array([20], i32),
        logits_indices=np.array([0], i32),
    )
    token = int(executable.run(decode).logits.argmax())
    assert token == expected_next_token([*range(20), 1], 97)
    wrong = dataclasses.replace(decode, block_tables=np.array([[7, 2]], i32))
    with pytest.raises(BackendError, match=r"sequence 0 finds position -1 .* position 3 should be"):
        executable.run(wrong)
    unwritten = dataclasses.replace(decode, slot_mapping=np.array([-1], i32))
    assert int(executable.run(unwritten).logits.argmax()) == token


def test_the_cache_comes_first_and_closing_twice_is_harmless(null_engine: Path) -> None:
    manifest = read_manifest(null_engine)
    loaded = registry.get("null").load(null_engine, manifest, LoadOptions())
    with pytest.raises(BackendError, match="call allocate_kv_cache first"):
        loaded.run(inputs())
    loaded.close()
    loaded.close()


def test_extra_files_are_recorded(null_engine: Path, tmp_path: Path) -> None:
    limits = read_manifest(null_engine).limits
    path = write_engine(tmp_path, vocab_size=5, limits=limits, extra_files={"tokenizer.json": b"x"})
    manifest = read_manifest(path)
    assert [(f.path, f.size) for f in manifest.files][1] == ("tokenizer.json", 1)
    verify_files(path, manifest.files)

"""The suite of tests/backend on a GPU: each backend's engines of tiny models against PyTorch."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.backends.base import Executable
from octavo.graphs.errors import BackendError, BundleError
from octavo.runtime import LLM, SamplingParams
from octavo.tools.comparison import compare
from octavo.tools.greedy import GreedyDecoder
from tests.backend.steps import Sequence, pack, run_step
from tests.backend.test_engines import (
    OTHER,
    SEQUENCE,
    THIRD,
    WRONG_STEPS,
    chunked,
    whole,
    without_logits,
)
from tests.backend.tiny_engines import NUM_BLOCKS, Logits, TinyEngine, TinyEngines
from tests.gpu.kinds import KINDS, TOLERANCES, Kind, require

MODELS = ("llama", "qwen3", "gemma2", "gpt2")
STEPS = 200
MEMORY_SLACK = 8 << 20


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    require(chosen)
    return chosen


def engine_of(tiny_engines: TinyEngines, kind: Kind, model_type: str) -> TinyEngine:
    return tiny_engines.get(kind.backend, model_type, device="cuda", dtype=kind.dtype)


@pytest.fixture
def engine(tiny_engines: TinyEngines, kind: Kind) -> TinyEngine:
    return engine_of(tiny_engines, kind, "llama")


@pytest.fixture
def executable(engine: TinyEngine) -> Iterator[Executable]:
    loaded = engine.load()
    yield loaded
    loaded.close()


def assert_near(kind: Kind, found: Logits, wanted: Logits) -> None:
    atol = TOLERANCES[kind.dtype] * float(np.abs(wanted).max())
    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("model_type", MODELS)
def test_every_schedule_gives_the_oracles_logits(
    tiny_engines: TinyEngines, kind: Kind, model_type: str
) -> None:
    """Alone, batched, in chunks beside decodes, verified, in other blocks."""
    engine = engine_of(tiny_engines, kind, model_type)
    executable = engine.load()
    wanted = [engine.expected(sequence) for sequence in (SEQUENCE, OTHER, THIRD)]
    assert_near(kind, whole(executable), wanted[0])
    executable.allocate_kv_cache(NUM_BLOCKS)
    parts = [(one, 0, len(one.tokens)) for one in (THIRD, OTHER, SEQUENCE)]
    for found, expected in zip(run_step(executable, parts), reversed(wanted), strict=True):
        assert_near(kind, found, expected)
    executable.allocate_kv_cache(NUM_BLOCKS)
    first = run_step(executable, [(OTHER, 0, 30), (SEQUENCE, 0, 17)])
    second = run_step(executable, [(THIRD, 0, 20), (SEQUENCE, 17, 49), (OTHER, 30, 31)])
    last = run_step(executable, [(OTHER, 31, 37), (SEQUENCE, 49, 50)])
    assert_near(kind, np.concatenate([first[1], second[1], last[1]]), wanted[0])
    assert_near(kind, np.concatenate([first[0], second[2], last[0]]), wanted[1])
    assert_near(kind, second[0], wanted[2])
    elsewhere = Sequence(SEQUENCE.tokens, [0, 15, 7, 10])
    for size in (1, 5, 16):
        executable.allocate_kv_cache(NUM_BLOCKS)
        assert_near(kind, chunked(executable, size, elsewhere), wanted[0])
    executable.close()


@pytest.mark.parametrize("model_type", MODELS)
def test_greedy_tokens_are_the_oracles(
    tiny_engines: TinyEngines, kind: Kind, model_type: str
) -> None:
    """Up to ties as wide as the logits may differ."""
    prompts = {str(len(s.tokens)): s.tokens.tolist() for s in (SEQUENCE, OTHER, THIRD)}
    oracle = tiny_engines.get("torch", model_type)
    path = engine_of(tiny_engines, kind, model_type).path
    scale = float(np.abs(oracle.expected(SEQUENCE)).max())
    tie = 2 * TOLERANCES[kind.dtype] * scale
    with GreedyDecoder(oracle.path) as a, GreedyDecoder(path) as b:
        for row in compare(a, b, prompts, max_tokens=16, tie=tie):
            assert row.same_tokens, row
            assert row.max_logit_difference <= tie, row


def test_a_decode_step_comes_again_bit_for_bit(executable: Executable) -> None:
    """The first run of a shape is eager, the second is captured, the third is replayed."""
    whole(executable)
    step = pack([(SEQUENCE, 49, 50)])
    rows = [executable.run(step).logits.copy() for _ in range(4)]
    for row in rows[1:]:
        np.testing.assert_array_equal(row.view(np.uint32), rows[0].view(np.uint32))


def test_a_step_that_wants_no_logits(kind: Kind, engine: TinyEngine) -> None:
    executable = engine.load()
    assert executable.run(without_logits(pack([(SEQUENCE, 0, 30)]))).logits.shape[0] == 0
    (rest,) = run_step(executable, [(SEQUENCE, 30, 50)])
    assert_near(kind, rest, engine.expected(SEQUENCE)[30:])
    executable.close()


@pytest.mark.parametrize("wrong", WRONG_STEPS)
def test_a_wrong_step_is_refused_and_the_engine_lives_on(
    kind: Kind, engine: TinyEngine, executable: Executable, wrong: str
) -> None:
    with pytest.raises(BackendError):
        executable.run(WRONG_STEPS[wrong](pack([(SEQUENCE, 0, 50)])))
    assert_near(kind, whole(executable), engine.expected(SEQUENCE))


def test_copied_blocks(kind: Kind, engine: TinyEngine, executable: Executable) -> None:
    """In order: block 7 is a destination first and a source later."""
    run_step(executable, [(SEQUENCE, 0, 49)])
    executable.copy_blocks([(5, 7), (2, 8), (7, 10), (9, 11), (4, 12)])
    moved = Sequence(SEQUENCE.tokens, [10, 8, 11, 12])
    (last,) = run_step(executable, [(moved, 49, 50)])
    assert_near(kind, last, engine.expected(SEQUENCE)[49:])


def test_a_closed_engine(executable: Executable) -> None:
    executable.close()
    executable.close()
    with pytest.raises(BackendError, match="closed or has no cache"):
        whole(executable)


def test_device_memory_does_not_grow(executable: Executable) -> None:
    steps = [pack([(SEQUENCE, at, at + 1), (OTHER, at % 37, at % 37 + 1)]) for at in range(50)]
    for step in steps:
        executable.run(step)
    free, _ = torch.cuda.mem_get_info()
    for index in range(STEPS):
        executable.run(steps[index % len(steps)])
    left, _ = torch.cuda.mem_get_info()
    assert free - left <= MEMORY_SLACK


def test_a_loaded_copy_and_a_damaged_one(kind: Kind, engine: TinyEngine, tmp_path: Path) -> None:
    path = shutil.copytree(engine.path, tmp_path / "copy")
    executable = dataclasses.replace(engine, path=path).load()
    assert_near(kind, whole(executable), engine.expected(SEQUENCE))
    executable.close()
    name = max(engine.manifest.files, key=lambda record: record.size).path
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 0x10
    (path / name).write_bytes(content)
    with pytest.raises(BundleError, match="was changed after the build"):
        LLM(path)


def test_the_runtime_serves_it(engine: TinyEngine) -> None:
    """Chunked prefill, continuous batching and a prefix hit give each request the same text."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": one.tokens.tolist()} for one in (SEQUENCE, OTHER, THIRD)]
    with LLM(engine.path, max_num_batched_tokens=32, num_kv_blocks=64) as llm:
        first = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        again = llm.generate(prompts, params)
    assert all(len(tokens) == 12 for tokens in first)
    assert [output.outputs[0].token_ids for output in again] == first
    assert again[0].num_cached_tokens >= 48

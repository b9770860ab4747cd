"""Copied cache blocks, on every backend: bare, and as completions and beams use them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.backends import registry
from octavo.backends.base import Executable, LoadOptions
from octavo.backends.bundle import read_manifest
from octavo.compiler import BuildConfig, build_engine
from octavo.runtime import LLM, RequestOutput, SamplingParams
from octavo.runtime.sampling.beam_search import BeamSearchParams
from tests.backend.steps import Sequence, run_step
from tests.parity import tiny_models

KINDS = (
    ("null", "float32"),
    ("inductor", "int8"),
    ("onnxruntime", "float32"),
    ("onnxruntime", "int8"),
    ("torch", "float32"),
    ("torch", "int8"),
)
SMALLEST_VOCABULARY = 97
NUM_BLOCKS = 16
MAX_TOKENS = 20  # from the middle of one block over a whole one into a third
Copy = tuple[int, int]  # source, destination


@dataclass(frozen=True)
class Engine:
    path: Path
    backend: str
    kv_cache_dtype: str

    def load(self) -> Executable:
        manifest = read_manifest(self.path)
        executable = registry.get(manifest.backend).load(self.path, manifest, LoadOptions(1))
        executable.allocate_kv_cache(NUM_BLOCKS)
        return executable


EngineOf = Callable[[str, str], Engine]


@pytest.fixture(scope="module")
def engine_of(null_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineOf:
    """Builds the engine of a backend and a type of cache when it is first asked for."""
    folder = tmp_path_factory.mktemp("copy-blocks")
    checkpoint, _ = tiny_models.checkpoint(folder / "model", "llama")

    @functools.cache
    def build(backend: str, kv_cache_dtype: str) -> Engine:
        if backend == "null":
            return Engine(null_engine, backend, kv_cache_dtype)
        config = BuildConfig(
            model=str(checkpoint),
            output=folder / f"{backend}-{kv_cache_dtype}",
            backend=backend,
            kv_cache_dtype="int8" if kv_cache_dtype == "int8" else "auto",
            max_model_len=128,
            use_cache=False,
        )
        return Engine(build_engine(config).path, backend, kv_cache_dtype)

    return build


@pytest.fixture(params=KINDS, ids="-".join)
def engine(request: pytest.FixtureRequest, engine_of: EngineOf) -> Engine:
    return engine_of(*request.param)


@pytest.fixture
def executable(engine: Engine) -> Iterator[Executable]:
    loaded = engine.load()
    yield loaded
    loaded.close()


@pytest.fixture
def copies(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Copy]:
    """Every copy that an executable of the engine's backend is asked for."""
    asked: list[Copy] = []
    loaded = engine.load()
    kind = type(loaded)
    loaded.close()
    copy_blocks = kind.copy_blocks

    def copy_and_remember(executable: Executable, copies: list[Copy]) -> None:
        asked.extend(copies)
        copy_blocks(executable, copies)

    monkeypatch.setattr(kind, "copy_blocks", copy_and_remember)
    return asked


def tokens_of(length: int, seed: int) -> list[int]:
    made: list[int] = np.random.default_rng(seed).integers(3, SMALLEST_VOCABULARY, length).tolist()
    return made


def sequence(tokens: list[int], blocks: Any) -> Sequence:
    return Sequence(np.array(tokens), list(blocks))


def assert_same_bits(found: Any, wanted: Any) -> None:
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


# --- the executable -------------------------------------------------------------------------------

TEXT = tokens_of(50, 0)
OTHER = tokens_of(50, 1)


def test_a_copy_goes_on_as_the_original(executable: Executable) -> None:
    """Two whole blocks and half of a third, which both go on writing."""
    original, copy = sequence(TEXT, [5, 2, 9, 4]), sequence(TEXT, [12, 0, 7, 11])
    run_step(executable, [(original, 0, 40)])
    executable.copy_blocks([(5, 12), (2, 0), (9, 7)])
    for start, end in ((40, 41), (41, 50)):
        (wanted,) = run_step(executable, [(original, start, end)])
        (found,) = run_step(executable, [(copy, start, end)])
        assert_same_bits(found, wanted)


def test_a_copy_and_its_original_part(executable: Executable) -> None:
    """What either writes after the copy is not seen by the other."""
    parted = TEXT[:40] + OTHER[40:]
    alone = []
    for tokens in (TEXT, parted):
        executable.allocate_kv_cache(NUM_BLOCKS)
        run_step(executable, [(sequence(tokens, [5, 2, 9, 4]), 0, 40)])
        alone.append(run_step(executable, [(sequence(tokens, [5, 2, 9, 4]), 40, 48)])[0])

    executable.allocate_kv_cache(NUM_BLOCKS)
    original, copy = sequence(TEXT, [5, 2, 9]), sequence(parted, [5, 2, 7])
    run_step(executable, [(original, 0, 40)])
    executable.copy_blocks([(9, 7)])
    (found,) = run_step(executable, [(copy, 40, 48)])
    assert_same_bits(found, alone[1])
    (found,) = run_step(executable, [(original, 40, 48)])
    assert_same_bits(found, alone[0])


@pytest.mark.parametrize(
    ("copies", "text_at", "other_at"),
    [
        ([(2, 9), (5, 2)], 2, 9),  # block 2 is a source first and a destination later
        ([(5, 2), (2, 9)], 9, None),  # the other way round, block 9 gets what 2 has got
        ([(5, 9), (2, 5), (9, 2)], 2, 5),  # 5 and 2 change places
        ([(5, 5), (5, 9)], 9, 2),  # a block onto itself is no change
    ],
)
def test_copies_happen_in_their_order(
    executable: Executable, copies: list[Copy], text_at: int, other_at: int | None
) -> None:
    run_step(executable, [(sequence(TEXT, [5]), 0, 16), (sequence(OTHER, [2]), 0, 16)])
    wanted = [
        run_step(executable, [(sequence(tokens, [block, 1]), 16, 24)])[0]
        for tokens, block in ((TEXT, 5), (OTHER, 2))
    ]
    executable.copy_blocks(copies)
    (found,) = run_step(executable, [(sequence(TEXT, [text_at, 1]), 16, 24)])
    assert_same_bits(found, wanted[0])
    if other_at is not None:
        (found,) = run_step(executable, [(sequence(OTHER, [other_at, 1]), 16, 24)])
        assert_same_bits(found, wanted[1])


def test_no_copies_change_nothing(executable: Executable) -> None:
    text = sequence(TEXT, [5, 2])
    run_step(executable, [(text, 0, 20)])
    (wanted,) = run_step(executable, [(text, 20, 24)])
    executable.copy_blocks([])
    (found,) = run_step(executable, [(text, 20, 24)])
    assert_same_bits(found, wanted)


# --- completions and beams ------------------------------------------------------------------------

# None fills its last block, so that whoever goes on from it needs a copy of that.
PROMPTS = [tokens_of(length, seed) for seed, length in enumerate((37, 20, 5), start=2)]
SAMPLING = [
    SamplingParams(n=n, seed=seed, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    for seed, n in enumerate((4, 2, 2))
]
# All of them do not fit a step of the null engine's 8 sequences.
BEAMS = BeamSearchParams(beam_width=4, max_tokens=MAX_TOKENS, ignore_eos=True)


def ids(tokens: list[int]) -> dict[str, object]:
    return {"prompt_token_ids": tokens}


def opened(engine: Engine, **options: Any) -> LLM:
    return LLM(engine.path, num_kv_blocks=128, max_num_batched_tokens=32, num_threads=1, **options)


def completions(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def logprobs_of(executable: Executable, prompt: list[int], output: list[int]) -> list[float]:
    """Of each output token, from a plain step that computes the whole text."""
    length = len(prompt) + len(output)
    (rows,) = run_step(executable, [(sequence(prompt + output, range(8)), 0, length)])
    logits = rows[len(prompt) - 1 : -1].astype(np.float64)
    log_normalizers = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
    found: list[float] = (logits[np.arange(len(output)), output] - log_normalizers).tolist()
    return found


def test_completions_of_one_prompt_go_on_in_copies(
    engine: Engine, executable: Executable, copies: list[Copy]
) -> None:
    """Together and one prompt at a time; each token's probability is that without any copies."""
    with opened(engine) as llm:
        together = llm.generate([ids(prompt) for prompt in PROMPTS], SAMPLING)
        # Of n completions all but one need a copy of the prompt's last block.
        assert len(copies) == sum(params.n - 1 for params in SAMPLING)
    with opened(engine, enable_prefix_caching=False) as llm:
        one_by_one = [
            llm.generate(ids(prompt), params)[0]
            for prompt, params in zip(PROMPTS, SAMPLING, strict=True)
        ]
    assert completions(together) == completions(one_by_one)
    for prompt, output in zip(PROMPTS, together, strict=True):
        assert len({tuple(completion.token_ids) for completion in output.outputs}) > 1
        for completion in output.outputs:
            assert completion.logprobs is not None
            found = [
                position[token].logprob
                for token, position in zip(completion.token_ids, completion.logprobs, strict=True)
            ]
            wanted = logprobs_of(executable, prompt, completion.token_ids)
            assert found == pytest.approx(wanted, abs=1e-4)


def test_beams_go_on_in_copies(engine: Engine, executable: Executable, copies: list[Copy]) -> None:
    with opened(engine) as llm:
        together = llm.beam_search([ids(prompt) for prompt in PROMPTS], BEAMS)
        assert copies
    with opened(engine, enable_prefix_caching=False) as llm:
        one_by_one = [llm.beam_search(ids(prompt), BEAMS)[0] for prompt in PROMPTS]
    assert completions(together) == completions(one_by_one)
    for prompt, output in zip(PROMPTS, together, strict=True):
        assert len(output.outputs) == BEAMS.beam_width
        for completion in output.outputs:
            wanted = logprobs_of(executable, prompt, completion.token_ids)
            assert completion.cumulative_logprob == pytest.approx(sum(wanted), abs=1e-3)


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "int8"])
def test_backends_agree_on_completions_and_beams(engine_of: EngineOf, kv_cache_dtype: str) -> None:
    found = []
    for backend in ("onnxruntime", "torch"):
        with opened(engine_of(backend, kv_cache_dtype)) as llm:
            prompts = [ids(prompt) for prompt in PROMPTS]
            sampled = completions(llm.generate(prompts, SAMPLING))
            found.append((sampled, completions(llm.beam_search(prompts, BEAMS))))
    assert found[0] == found[1]

"""The sampling kernels of each instruction set: against the reference, and against each other."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pytest

from octavo.backends import kernels
from octavo.backends.base import Float32Array
from octavo.backends.kernels.sampling import SamplingKernel
from octavo.graphs.errors import BackendError
from octavo.runtime.sampling.sampler import LogprobsRow, Sampler, SamplingRow
from octavo.runtime.sampling.sampling_params import SamplingParams
from tests.backend.kernel_variants import VARIANTS, library_of, selected
from tests.unit.sampling_reference import assert_drawn, distribution, draw

# About the ends of registers, blocks and lists, and what is padded by nothing.
VOCAB_SIZES = (1, 2, 15, 16, 17, 63, 255, 256, 257, 1023, 1025, 4099, 49152)
PARAMETERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.6},
    {"temperature": 3.0},
    {"top_k": 50},
    {"top_k": 700, "temperature": 2.0},
    {"top_p": 0.9},
    {"top_p": 0.99, "temperature": 2.0},
    {"min_p": 0.05},
    {"min_p": 0.0001, "top_k": 3000, "top_p": 0.95, "temperature": 2.0},
)
WITH_FMA = ("avx2", "avx512", "lanes16")


@cache
def kernel(variant: str) -> SamplingKernel:
    """Skips the test where this CPU does not run it."""
    library = library_of(variant)
    with selected(variant):
        return SamplingKernel(library)


def random_logits(*shape: int, spread: float = 2.5) -> Float32Array:
    rng = np.random.default_rng(11)
    logits: Float32Array = (rng.normal(size=shape) * spread).astype(np.float32)
    return logits


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_every_variant_follows_the_reference(variant: str, vocab_size: int) -> None:
    sampler = Sampler(vocab_size, kernel(variant))
    logits = random_logits(vocab_size)
    for values in PARAMETERS:
        params = SamplingParams(**values)
        assert_drawn(draw(sampler, logits, params, 300), distribution(logits, params))
    (greedy,) = draw(sampler, logits, SamplingParams(temperature=0), 1)
    assert greedy == logits.argmax()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_every_variant_finds_what_is_not_finite(variant: str, value: float) -> None:
    """In every lane and at every place of a block, also after numbers of any size."""
    vocab_size = 530
    rows = np.tile(random_logits(vocab_size), (vocab_size, 1))
    rows[:, ::7] = -np.inf
    rows[:, 1::7] = 3e38
    np.fill_diagonal(rows, value)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature)
        sampler = Sampler(vocab_size, kernel(variant))
        assert set(sampler.sample([SamplingRow(row, params, 1, 2) for row in rows])) == {-1}
        np.fill_diagonal(rows, -3e38)
        assert min(sampler.sample([SamplingRow(row, params, 1, 2) for row in rows])) >= 0
        np.fill_diagonal(rows, value)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_every_variant_finds_the_most_likely_tokens(variant: str, vocab_size: int) -> None:
    logits = (np.rint(random_logits(vocab_size) * 64) / 64).astype(np.float32)
    order = np.lexsort((np.arange(vocab_size), -logits))
    exact = logits.astype(np.float64)
    wanted = exact - np.log(np.exp(exact).sum())
    for count in (0, 1, 20, 300, vocab_size):
        token = vocab_size // 3
        sampler = Sampler(vocab_size, kernel(variant))
        (row,) = sampler.logprobs([LogprobsRow(logits, token, count)])
        np.testing.assert_array_equal(row.token_ids, order[:count])
        np.testing.assert_allclose(row.logprobs, wanted[row.token_ids], atol=1e-6)
        assert row.rank == 1 + int((logits > logits[token]).sum())


def test_variants_with_fused_multiply_add_agree_bit_for_bit() -> None:
    """Uniform numbers at the edges of tokens would show a weight that differs anywhere."""
    vocab_size = 6007
    logits = random_logits(4, vocab_size)
    logits[1] *= np.float32(0.3)
    logits[2] *= np.float32(4.0)
    rows = [
        SamplingRow(logits[position % 4], SamplingParams(**values), 3, position)
        for values in PARAMETERS
        for position in range(2000)
    ]
    asked = [LogprobsRow(row, token, 30) for row in logits for token in (0, 6006)]
    answers = []
    for variant in WITH_FMA:
        try:
            sampler = Sampler(vocab_size, kernel(variant))
        except pytest.skip.Exception:
            continue
        found = sampler.logprobs(asked)
        numbers = [(row.logprob, row.rank, row.logprobs.tobytes()) for row in found]
        answers.append((sampler.sample(rows), numbers))
    if len(answers) < 2:
        pytest.skip("this CPU has one variant with fused multiply-add")
    assert all(answer == answers[0] for answer in answers)


def test_threads_do_not_share_anything() -> None:
    vocab_size = 5000
    logits = random_logits(64, vocab_size)
    sampler = Sampler(vocab_size)
    rows = [
        SamplingRow(logits[i], SamplingParams(**PARAMETERS[i % len(PARAMETERS)]), i, i)
        for i in range(64)
    ]
    alone = sampler.sample(rows)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(sampler.sample, [rows] * 40))
    assert all(result == alone for result in results)


def test_an_unknown_instruction_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CPU_ISA", "mmx")
    with pytest.raises(BackendError, match=r"^OCTAVO_CPU_ISA is 'mmx' and this CPU or build "):
        SamplingKernel()


def test_the_library_is_loaded_by_the_first_sampler_and_without_onnxruntime() -> None:
    code = """
import sys
from pathlib import Path
import octavo.runtime
from octavo.runtime.sampling.sampler import Sampler, SamplingRow
def loaded(name):
    return name in Path("/proc/self/maps").read_text()
before = loaded("liboctavo_kernels")
import numpy as np
from octavo.runtime import SamplingParams
row = SamplingRow(np.zeros(4, np.float32), SamplingParams(), 1, 2)
assert Sampler(4).sample([row])[0] in range(4)
print(before, loaded("liboctavo_kernels"), loaded("onnxruntime"), "onnxruntime" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.stderr, done.stdout) == ("", "False True False False\n")


def test_a_child_process_may_sample_too() -> None:
    """Nothing of the library depends on threads that a fork would leave behind."""
    code = """
import os
import numpy as np
from octavo.runtime.sampling.sampler import Sampler, SamplingRow
from octavo.runtime.sampling.sampling_params import SamplingParams
sampler = Sampler(5000)
logits = np.random.default_rng(0).normal(size=5000).astype(np.float32)
rows = [SamplingRow(logits, SamplingParams(top_p=0.9), 1, i) for i in range(32)]
tokens = sampler.sample(rows)
child = os.fork()
if child == 0:
    os._exit(sampler.sample(rows) != tokens)
assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_best_variant_is_used() -> None:
    assert kernel(kernels.instruction_set().removesuffix("_vnni")).most_columns == 1 << 19

"""Builds of tiny checkpoints from end to end: killed, twice at once, cached, and refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.backends import registry
from octavo.backends.base import LoadOptions
from octavo.backends.bundle import read_manifest, verify_files
from octavo.compiler import BuildConfig, BuildResult, build_engine, capture
from octavo.compiler.checkpoints import open_checkpoint
from octavo.graphs.errors import BuildError, RequestError
from octavo.runtime import LLM, SamplingParams
from tests.backend.steps import Sequence, run_step
from tests.e2e.commands import THREADS, run, script
from tests.e2e.conftest import SMOLLM2
from tests.parity import tiny_models
from tests.unit.test_checkpoints import tiny_model, write_gguf

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama without a tokenizer."""
    folder, _ = tiny_models.checkpoint(tmp_path_factory.mktemp("checkpoints") / "llama", "llama")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty build cache."""
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def build(checkpoint: Path, output: Path, **options: Any) -> BuildResult:
    options = {"max_model_len": 64, "use_cache": False, **options}
    return build_engine(BuildConfig(model=str(checkpoint), output=output, **options))


def ids(*token_ids: int) -> dict[str, object]:
    return {"prompt_token_ids": list(token_ids)}


def assert_whole(engine: Path) -> None:
    """It passes its own checks and generates."""
    verify_files(engine, read_manifest(engine).files)
    with LLM(engine) as llm:
        (output,) = llm.generate(ids(5, 6, 7), GREEDY)
    assert output.finished


# --- interrupted and concurrent builds ------------------------------------------------------------


def start_build(checkpoint: Path, output: Path) -> subprocess.Popen[str]:
    command = [script("build-engine"), "--model", str(checkpoint), "--output", str(output)]
    return subprocess.Popen(
        [*command, "--no-cache"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **THREADS},
    )


def wait_for_staging(process: subprocess.Popen[str], folder: Path) -> None:
    deadline = time.monotonic() + 120
    while not list(folder.glob(".*staging*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the build never started"
        time.sleep(0.01)


def test_a_killed_build_leaves_no_engine_and_the_next_succeeds(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "engines"
    process = start_build(checkpoint, folder / "mine")
    wait_for_staging(process, folder)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (folder / "mine").exists()
    assert list(folder.glob(".*staging*"))  # what was half-made, under another name

    build(checkpoint, folder / "mine")
    assert os.listdir(folder) == ["mine"]
    assert_whole(folder / "mine")


def test_two_builds_of_one_output_at_once(checkpoint: Path, tmp_path: Path) -> None:
    """The second refuses in a sentence while the first runs; the result is one whole engine."""
    folder = tmp_path / "engines"
    first = start_build(checkpoint, folder / "mine")
    wait_for_staging(first, folder)
    second = run("build-engine", "--model", checkpoint, "--output", folder / "mine", "--no-cache")
    out, error = first.communicate()
    assert (first.returncode, error) == (0, ""), out
    assert second.returncode == 1
    assert second.stderr == (
        f"error: another build of {folder / 'mine'} is running: "
        "wait for it or choose another output\n"
    )
    assert os.listdir(folder) == ["mine"]
    assert_whole(folder / "mine")


# --- the build cache ------------------------------------------------------------------------------


def bytes_of(engine: Path) -> dict[str, bytes]:
    return {
        path.relative_to(engine).as_posix(): path.read_bytes()
        for path in engine.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_a_second_build_comes_from_the_cache(
    checkpoint: Path, tmp_path: Path, cache: Path, backend: str
) -> None:
    first = build(checkpoint, tmp_path / "one", backend=backend, use_cache=True)
    moved = shutil.copytree(checkpoint, tmp_path / "elsewhere" / "copy")
    second = build(moved, tmp_path / "two", backend=backend, use_cache=True)
    other = build(checkpoint, tmp_path / "three", backend=backend, use_cache=True, block_size=32)
    assert [result.from_cache for result in (first, second, other)] == [False, True, False]
    assert bytes_of(tmp_path / "two") == bytes_of(tmp_path / "one")
    assert len(list(cache.iterdir())) == 2
    assert second.manifest == first.manifest == read_manifest(tmp_path / "two")
    assert_whole(tmp_path / "two")


def test_builds_are_reproducible(checkpoint: Path, tmp_path: Path) -> None:
    """The same checkpoint gives the same bytes, so engines can be compared by their hashes."""
    for name in ("one", "two"):
        build(checkpoint, tmp_path / name)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")


def test_the_command_takes_an_engine_from_the_cache(
    checkpoint: Path, tmp_path: Path, cache: Path
) -> None:
    build(checkpoint, tmp_path / "one", use_cache=True)
    (entry,) = cache.iterdir()
    options = ("--model", checkpoint, "--max-model-len", "64", "--json")
    done = run("build-engine", *options, "--output", tmp_path / "two")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert result["from_cache"] is True
    assert [stage["name"] for stage in result["stages"]] == ["checkpoint", "cache"]
    assert list(cache.iterdir()) == [entry]


def test_llm_builds_a_checkpoint_on_first_use(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(checkpoint) as llm:
        (first,) = llm.generate(ids(5, 6, 7), GREEDY)
    (entry,) = cache.iterdir()

    def fail(*_: object) -> None:
        raise AssertionError("the engine is built again")

    monkeypatch.setattr(capture, "capture", fail)
    with LLM(str(checkpoint)) as llm:
        (second,) = llm.generate(ids(5, 6, 7), GREEDY)
    assert list(cache.iterdir()) == [entry]
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


# --- kinds of checkpoints -------------------------------------------------------------------------


def greedy_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """By whole forward passes, without any cache."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_without_a_tokenizer_token_ids_are_served(checkpoint: Path, tmp_path: Path) -> None:
    engine = build(checkpoint, tmp_path / "engine").path
    with LLM(engine) as llm:
        (output,) = llm.generate(ids(5, 6, 7), GREEDY)
        assert (output.text, output.prompt) == ("", None)
        with pytest.raises(RequestError, match=r"has no tokenizer and cannot read a text prompt"):
            llm.generate("Hello")
        with pytest.raises(RequestError, match="the engine has no tokenizer"):
            llm.get_tokenizer()
    model = open_checkpoint(checkpoint).load_model(torch.float32)
    assert output.outputs[0].token_ids == greedy_tokens(model, [5, 6, 7], 8)


def test_a_gguf_file_is_built_and_serves_text(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model())
    engine = build(path, tmp_path / "engine").path
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(engine) as llm:
        (output,) = llm.generate("ab cd", params)
    assert output.prompt_token_ids[0] == 1  # <s>, once (D17)
    assert output.prompt_token_ids.count(1) == 1
    model = open_checkpoint(path).load_model(torch.float32)
    wanted = greedy_tokens(model, output.prompt_token_ids, 8)
    assert output.outputs[0].token_ids == wanted


def test_the_packaged_name_and_its_file_are_one_checkpoint() -> None:
    named = open_checkpoint(SMOLLM2)
    assert named.path.suffix == ".gguf"
    assert open_checkpoint(named.path).content_digest() == named.content_digest()


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_bfloat16_weights_are_built_as_float32(tmp_path: Path, backend: str) -> None:
    """E04: cast at the build, once, and computed in float32 from there on."""
    model: Any = tiny_models.model("llama")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "checkpoint")
    model = tiny_models.model("llama")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    result = build(tmp_path / "checkpoint", tmp_path / "engine", backend=backend)
    manifest = result.manifest
    assert (manifest.dtype, manifest.kv_cache_dtype) == ("float32", "float32")
    tokens = np.arange(3, 43)
    with torch.no_grad():
        wanted = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    executable = registry.get(backend).load(result.path, manifest, LoadOptions())
    executable.allocate_kv_cache(4)
    (found,) = run_step(executable, [(Sequence(tokens, [2, 0, 3]), 0, 40)])
    executable.close()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


# --- refusals -------------------------------------------------------------------------------------

REFUSED_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "float16"}, "computes in float32 on a CPU, not in float16: build with --dtype"),
    ({"dtype": "bfloat16"}, "computes in float32 on a CPU, not in bfloat16: build with --dtype"),
    ({"max_model_len": 513}, "max_model_len 513 is more than the 512 positions of"),
    ({"block_size": 24}, "block_size 24 is not a multiple of 16"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED_OPTIONS)
def test_options_that_cannot_be_built_are_refused(
    checkpoint: Path, tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    """E04: before any work is done, and without leaving anything behind."""
    with pytest.raises(BuildError) as caught:
        build(checkpoint, tmp_path / "engine", **options)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []


# --- the limits of an engine ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def short_llm(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """An engine for 32 tokens of prompt and output."""
    engine = build(checkpoint, tmp_path_factory.mktemp("engines") / "short", max_model_len=32)
    with LLM(engine.path) as llm:
        yield llm


@pytest.mark.parametrize(("length", "num_outputs"), [(1, 31), (16, 16), (30, 2), (31, 1)])
def test_output_ends_at_the_engines_length_b02_a15(
    short_llm: LLM, checkpoint: Path, length: int, num_outputs: int
) -> None:
    prompt = list(range(3, 3 + length))
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    (output,) = short_llm.generate(ids(*prompt), params)
    (completion,) = output.outputs
    assert completion.finish_reason == "length"
    model = open_checkpoint(checkpoint).load_model(torch.float32)
    assert completion.token_ids == greedy_tokens(model, prompt, num_outputs)


@pytest.mark.parametrize("length", [32, 33, 1000])
def test_prompts_of_the_engines_length_are_refused_a02_a03(short_llm: LLM, length: int) -> None:
    with pytest.raises(RequestError) as caught:
        short_llm.generate([ids(5), ids(*[7] * length)], GREEDY)
    assert f"the prompt has {length} tokens, the engine takes at most 31" in str(caught.value)
    assert not short_llm.engine.has_unfinished_requests
    (output,) = short_llm.generate(ids(5), GREEDY)  # the engine lives on
    assert output.finished

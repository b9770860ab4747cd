"""The suite that every backend passes on engines of tiny models: same numbers, same promises."""

from __future__ import annotations

import dataclasses
import getpass
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import psutil
import pytest

from octavo.backends.base import Executable, StepInputs
from octavo.graphs.errors import BackendError, BundleError, IncompatibleEngineError
from octavo.runtime import LLM, SamplingParams
from octavo.tools.comparison import compare
from octavo.tools.greedy import GreedyDecoder
from tests.backend.steps import BLOCK_SIZE, Sequence, pack, run_step
from tests.backend.tiny_engines import NUM_BLOCKS, Logits, TinyEngine, TinyEngines
from tests.parity.tiny_models import VOCAB_SIZE

BACKENDS = ("inductor", "onnxruntime", "torch")


def random_sequence(length: int, blocks: list[int], seed: int = 0) -> Sequence:
    return Sequence(np.random.default_rng(seed).integers(3, VOCAB_SIZE, length), blocks)


SEQUENCE = random_sequence(50, [5, 2, 9, 4])
OTHER = random_sequence(37, [1, 13, 6], seed=1)
THIRD = random_sequence(20, [8, 3], seed=2)


@pytest.fixture(params=BACKENDS)
def engine(request: pytest.FixtureRequest, tiny_engines: TinyEngines) -> TinyEngine:
    return tiny_engines.get(request.param, "llama")


@pytest.fixture
def executable(engine: TinyEngine) -> Iterator[Executable]:
    loaded = engine.load()
    yield loaded
    loaded.close()


def whole(executable: Executable, sequence: Sequence = SEQUENCE) -> Logits:
    (logits,) = run_step(executable, [(sequence, 0, len(sequence.tokens))])
    return logits


def chunked(executable: Executable, size: int, sequence: Sequence = SEQUENCE) -> Logits:
    length = len(sequence.tokens)
    parts = [(at, min(at + size, length)) for at in range(0, length, size)]
    return np.concatenate([run_step(executable, [(sequence, *part)])[0] for part in parts])


def assert_equal(engine: TinyEngine, found: Logits, wanted: Logits) -> None:
    """Bit for bit; the torch backend, whose matrix products depend on their size, within 1e-5."""
    if engine.manifest.backend == "torch":
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    else:
        np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


# --- numbers --------------------------------------------------------------------------------------


def test_logits_equal_transformers(engine: TinyEngine, executable: Executable) -> None:
    expected = engine.expected(SEQUENCE)
    atol = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(whole(executable), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_chunks(engine: TinyEngine, executable: Executable, size: int) -> None:
    wanted = whole(executable)
    executable.allocate_kv_cache(NUM_BLOCKS)
    assert_equal(engine, chunked(executable, size), wanted)


def check_schedules(engine: TinyEngine) -> None:
    """Alone, in company, in chunks beside decodes, in other blocks: the same numbers."""
    executable = engine.load(num_threads=1)
    sequences = (SEQUENCE, OTHER, THIRD)
    alone = [whole(executable, sequence) for sequence in sequences]

    executable.allocate_kv_cache(NUM_BLOCKS)
    batched = run_step(executable, [(s, 0, len(s.tokens)) for s in reversed(sequences)])
    for found, wanted in zip(reversed(batched), alone, strict=True):
        assert_equal(engine, found, wanted)

    executable.allocate_kv_cache(NUM_BLOCKS)
    first = run_step(executable, [(OTHER, 0, 30), (SEQUENCE, 0, 17)])
    second = run_step(executable, [(THIRD, 0, 20), (SEQUENCE, 17, 49), (OTHER, 30, 31)])
    last = run_step(executable, [(OTHER, 31, 37), (SEQUENCE, 49, 50)])
    assert_equal(engine, np.concatenate([first[1], second[1], last[1]]), alone[0])
    assert_equal(engine, np.concatenate([first[0], second[2], last[0]]), alone[1])
    assert_equal(engine, second[0], alone[2])

    elsewhere = Sequence(SEQUENCE.tokens, [0, 15, 7, 10])
    for size in (1, 3, 16):
        executable.allocate_kv_cache(NUM_BLOCKS)
        assert_equal(engine, chunked(executable, size, elsewhere), alone[0])
    executable.close()

    executable = engine.load(num_threads=2)
    assert_equal(engine, whole(executable), alone[0])
    executable.close()


def test_every_schedule_gives_the_same(engine: TinyEngine) -> None:
    check_schedules(engine)


@pytest.mark.parametrize(
    "model_type",
    [
        "gemma2",  # windows and capped scores
        "gpt_oss",  # sinks, windows and experts
        "gpt2",  # LayerNorm and learned positions
        "deepseek_v3",  # latent attention, whose rotary embedding is not fused
    ],
)
@pytest.mark.parametrize("backend", ["inductor", "onnxruntime"])
def test_every_schedule_gives_the_same_bits(
    tiny_engines: TinyEngines, backend: str, model_type: str
) -> None:
    check_schedules(tiny_engines.get(backend, model_type))


def test_a_loaded_copy_gives_the_same(
    engine: TinyEngine, executable: Executable, tmp_path: Path
) -> None:
    moved = dataclasses.replace(engine, path=shutil.copytree(engine.path, tmp_path / "copy"))
    again = moved.load()
    np.testing.assert_array_equal(whole(again), whole(executable))
    again.close()


# --- the protocol ---------------------------------------------------------------------------------


def without_logits(inputs: StepInputs) -> StepInputs:
    return dataclasses.replace(inputs, logits_indices=np.zeros(0, np.int32))


def test_a_step_that_wants_no_logits(engine: TinyEngine, executable: Executable) -> None:
    """K05: an intermediate chunk gives nothing, and its keys and values are there for the next."""
    wanted = whole(executable)
    executable.allocate_kv_cache(NUM_BLOCKS)
    outputs = executable.run(without_logits(pack([(SEQUENCE, 0, 30)])))
    assert outputs.logits.shape == (0, VOCAB_SIZE)
    (rest,) = run_step(executable, [(SEQUENCE, 30, 50)])
    assert_equal(engine, rest, wanted[30:])


def test_logits_come_in_the_order_they_are_asked_for(
    engine: TinyEngine, executable: Executable
) -> None:
    wanted = whole(executable)
    inputs = pack([(SEQUENCE, 0, 50)])
    rows = np.array([49, 0, 7, 7], np.int32)
    found = executable.run(dataclasses.replace(inputs, logits_indices=rows)).logits
    assert_equal(engine, found, wanted[rows])


def test_one_inputs_object_may_come_again_with_other_contents(
    engine: TinyEngine, executable: Executable
) -> None:
    """As the runtime's decode steps do, with a step of another shape in between."""
    wanted = whole(executable)
    decode = pack([(SEQUENCE, 40, 41)])
    for position in (40, 41, 42):
        now = pack([(SEQUENCE, position, position + 1)])
        for field in dataclasses.fields(StepInputs):
            if field.name != "features":
                getattr(decode, field.name)[...] = getattr(now, field.name)
        assert_equal(engine, executable.run(decode).logits, wanted[position : position + 1])
        if position == 41:
            whole(executable, OTHER)


def test_a_slot_of_minus_1_writes_nothing(engine: TinyEngine, executable: Executable) -> None:
    """What block 5 holds stays, however a step without slots that reads it comes out."""
    wanted = whole(executable)
    unwritten = pack([(random_sequence(16, [5], seed=9), 0, 16)])
    slots = np.full_like(unwritten.slot_mapping, -1)
    executable.run(dataclasses.replace(unwritten, slot_mapping=slots))
    (last,) = run_step(executable, [(SEQUENCE, 49, 50)])
    assert_equal(engine, last, wanted[49:])


@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS, 10, 100])
def test_reallocating_gives_an_empty_cache(
    engine: TinyEngine, executable: Executable, num_blocks: int
) -> None:
    fresh = run_step(executable, [(SEQUENCE, 49, 50)])[0]  # reads 49 zeros
    whole(executable)
    executable.allocate_kv_cache(num_blocks)
    assert_equal(engine, run_step(executable, [(SEQUENCE, 49, 50)])[0], fresh)


def test_running_before_a_cache_is_there(engine: TinyEngine) -> None:
    executable = engine.load()
    executable.close()
    executable.close()
    with pytest.raises(BackendError, match="the engine is closed or has no cache"):
        whole(executable)


def test_memory_comes_with_the_cache_and_goes_with_it(engine: TinyEngine) -> None:
    """128 MiB of cache, twice; steps in between ask for nothing more."""
    process = psutil.Process()
    num_blocks = (128 << 20) // engine.manifest.cache_block_bytes
    executable = engine.load()
    whole(executable)
    before = process.memory_info().rss
    for _ in range(2):
        executable.allocate_kv_cache(num_blocks)
        for _ in range(3):
            whole(executable, dataclasses.replace(SEQUENCE, blocks=range(4)))
    grown = process.memory_info().rss - before
    assert grown < 160 << 20, f"two caches of 128 MiB, one after the other, took {grown} bytes"
    executable.close()
    left = process.memory_info().rss - before
    assert left < 32 << 20, f"{left} bytes are still held after close"


Change = Callable[[StepInputs], StepInputs]


def replaced(name: str, index: Any, value: int) -> Change:
    def change(inputs: StepInputs) -> StepInputs:
        array = getattr(inputs, name).copy()
        array[index] = value
        return dataclasses.replace(inputs, **{name: array})

    return change


def shortened(name: str) -> Change:
    return lambda inputs: dataclasses.replace(inputs, **{name: getattr(inputs, name)[:-1].copy()})


WRONG_STEPS: dict[str, Change] = {
    "slot behind the cache": replaced("slot_mapping", -1, NUM_BLOCKS * BLOCK_SIZE),
    "block behind the cache": replaced("block_tables", (0, 0), NUM_BLOCKS),
    "block before the cache": replaced("block_tables", (0, 0), -1),
    "slot before the cache": replaced("slot_mapping", 0, -2),
    "prefix before the sequence": replaced("prefix_offsets", 0, -1),
    "tokens of no sequence": replaced("query_start_loc", -1, 49),
    "token outside the vocabulary": replaced("token_ids", 3, VOCAB_SIZE),
    "row behind the step": replaced("logits_indices", 0, 50),
    "too few positions": shortened("positions"),
    "too few slots": shortened("slot_mapping"),
    "too few prefix offsets": shortened("prefix_offsets"),
}


@pytest.mark.parametrize("wrong", WRONG_STEPS)
def test_a_wrong_step_is_refused_and_the_engine_lives_on(
    engine: TinyEngine, executable: Executable, wrong: str
) -> None:
    wanted = whole(executable)
    with pytest.raises(BackendError):
        executable.run(WRONG_STEPS[wrong](pack([(SEQUENCE, 0, 50)])))
    assert_equal(engine, whole(executable), wanted)


# --- opening bundles ------------------------------------------------------------------------------


@pytest.fixture
def copy(engine: TinyEngine, tmp_path: Path) -> Path:
    return shutil.copytree(engine.path, tmp_path / "engine")


def refusal(bundle: Path, kind: type[BundleError] = BundleError) -> str:
    """The one sentence with which LLM refuses a bundle."""
    with pytest.raises(kind) as caught:
        LLM(bundle)
    message = str(caught.value)
    assert "\n" not in message
    return message


def files_of(engine: TinyEngine) -> list[str]:
    names = [record.path for record in engine.manifest.files]
    assert names
    return names


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_one_changed_byte_is_refused(engine: TinyEngine, copy: Path, place: float) -> None:
    for name in files_of(engine):
        path = copy / name
        content = path.read_bytes()
        changed = bytearray(content)
        changed[round(place * (len(content) - 1))] ^= 0x10
        path.write_bytes(changed)
        assert f"{path} was changed after the build" in refusal(copy)
        path.write_bytes(content)
    LLM(copy).close()


@pytest.mark.parametrize("kept", [0, 1, -1])
def test_a_truncated_file_is_refused(engine: TinyEngine, copy: Path, kept: int) -> None:
    for name in files_of(engine):
        path = copy / name
        content = path.read_bytes()
        path.write_bytes(content[:kept])
        left = len(content[:kept])
        assert f"{path} has {left} bytes, the manifest says {len(content)}" in refusal(copy)
        path.write_bytes(content)


def test_a_missing_file_is_refused(engine: TinyEngine, copy: Path) -> None:
    for name in files_of(engine):
        path = copy / name
        path.rename(copy / "away")
        assert f"{path} cannot be read (No such file or directory)" in refusal(copy)
        (copy / "away").rename(path)


def edit_manifest(bundle: Path, change: Callable[[Any], object]) -> None:
    path = bundle / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_a_newer_format_is_refused(copy: Path) -> None:
    """B03: the sentence names both versions."""
    edit_manifest(copy, lambda m: m.update(format_version=99))
    message = refusal(copy, IncompatibleEngineError)
    assert "has engine format 99, this Octavo reads format 1: upgrade Octavo" in message


def test_another_architecture_is_refused(copy: Path) -> None:
    edit_manifest(copy, lambda m: m["target"].update(architecture="s390x"))
    assert "the engine was built for s390x, this machine is" in refusal(
        copy, IncompatibleEngineError
    )


def test_a_missing_cpu_feature_is_refused(copy: Path) -> None:
    edit_manifest(copy, lambda m: m["target"].update(cpu_features=["fpu_of_tomorrow"]))
    assert "needs the CPU features fpu_of_tomorrow, which this machine lacks" in refusal(
        copy, IncompatibleEngineError
    )


@pytest.mark.parametrize(("backend", "verb"), [("torch", "built"), ("inductor", "compiled")])
def test_another_torch_is_refused(
    tiny_engines: TinyEngines, tmp_path: Path, backend: str, verb: str
) -> None:
    """B03: the sentence names both versions."""
    import torch

    path = shutil.copytree(tiny_engines.get(backend, "llama").path, tmp_path / "engine")
    edit_manifest(path, lambda m: m["versions"].update(torch="1.13.1"))
    message = refusal(path, IncompatibleEngineError)
    assert f"{verb} with torch 1.13.1" in message
    assert f"this is torch {torch.__version__}" in message


# --- what serving needs and what a bundle holds ---------------------------------------------------


def test_serving_imports_nothing_of_the_compiler(tiny_engines: TinyEngines) -> None:
    code = f"""
import sys
from octavo.runtime import LLM, SamplingParams
with LLM({str(tiny_engines.get("onnxruntime", "llama").path)!r}) as llm:
    (output,) = llm.generate([{{"prompt_token_ids": [5, 6, 7]}}], SamplingParams(max_tokens=4))
assert output.outputs[0].token_ids
heavy = {{"torch", "transformers", "onnx", "onnx_ir", "safetensors", "gguf", "octavo.compiler"}}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def contents(bundle: Path) -> Iterator[tuple[str, bytes]]:
    """Every file of a bundle, and every file within one that is an archive."""
    for path in bundle.rglob("*"):
        if not path.is_file():
            continue
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    yield f"{path.name}/{name}", name.encode() + b"\n" + archive.read(name)
        else:
            yield path.name, path.read_bytes()


def traces_of_this_machine() -> set[str]:
    traces = {
        "site-packages",
        "tests/parity",
        str(Path.cwd()),
        str(Path.home()) + "/",
        sys.prefix,
        sys.base_prefix + "/lib",
        tempfile.gettempdir() + "/",
    }
    user = getpass.getuser()
    names = {socket.gethostname(), user} - {"root"}  # which is a word of mathematics
    return traces | {name for name in names if len(name) > 3}  # others are in any machine code


def test_nothing_of_the_build_machine_is_in_a_bundle(engine: TinyEngine) -> None:
    for name, content in contents(engine.path):
        found = [trace for trace in traces_of_this_machine() if trace.encode() in content]
        assert not found, f"{name} holds {found}"


def test_no_pickle_is_in_a_bundle(engine: TinyEngine) -> None:
    for name, content in contents(engine.path):
        data = content.partition(b"\n")[2] if "/" in name else content
        assert not name.endswith((".pkl", ".pickle")), name
        # An opcode PROTO with the number of a protocol; archives of archives are opened likewise.
        assert data[:1] != b"\x80" or data[1:2] not in (b"\x02", b"\x03", b"\x04", b"\x05"), name
        assert data[:4] != b"PK\x03\x04", f"{name} is an archive within an archive"


def test_the_onnx_file_runs_without_the_kernels(tiny_engines: TinyEngines) -> None:
    """Only standard operators are left when the function body replaces the kernel."""
    engine = tiny_engines.get("onnxruntime", "llama")
    manifest = engine.manifest
    assert manifest.kv_layout == "k_transposed"
    executable = engine.load()
    parts = [(SEQUENCE, 0, 50), (OTHER, 0, 37)]
    wanted = np.concatenate(run_step(executable, parts))
    (continued,) = run_step(executable, [(SEQUENCE, 49, 50)])
    executable.close()

    session = onnxruntime.InferenceSession(
        str(engine.path / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    layers = manifest.spec.kv_cache_bindings(BLOCK_SIZE, manifest.kv_cache_dtype)
    caches = {
        layer.name: np.zeros([NUM_BLOCKS, *map(int, layer.shape[1:])], np.float32)
        for layer in layers
    }
    found, *changed = session.run(None, {**dataclasses.asdict(pack(parts)), **caches})
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
    caches = dict(zip(caches, changed, strict=True))
    step = dataclasses.asdict(pack([(SEQUENCE, 49, 50)]))
    found, *_ = session.run(None, {**step, **caches})
    np.testing.assert_allclose(found, continued, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "qwen3", "gemma2", "gpt2", "phi3", "mixtral", "gpt_oss"]
)
def test_backends_agree_on_tokens_and_logits(tiny_engines: TinyEngines, model_type: str) -> None:
    """The torch engine's greedy tokens are every other's, up to ties; logits within 1e-3."""
    prompts = {str(len(s.tokens)): s.tokens.tolist() for s in (SEQUENCE, OTHER, THIRD)}
    with GreedyDecoder(tiny_engines.get("torch", model_type).path, num_threads=1) as oracle:
        for backend in ("inductor", "onnxruntime"):
            path = tiny_engines.get(backend, model_type).path
            with GreedyDecoder(path, num_threads=1) as other:
                rows = compare(oracle, other, prompts, max_tokens=16, tie=1e-3)
            for row in rows:
                assert row.max_logit_difference <= 1e-3, (backend, row)
                assert row.same_tokens, (backend, row)


def test_backends_agree_on_greedy_tokens(tiny_engines: TinyEngines) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [{"prompt_token_ids": s.tokens.tolist()} for s in (SEQUENCE, OTHER, THIRD)]
    tokens = []
    for backend in BACKENDS:
        with LLM(tiny_engines.get(backend, "llama").path, max_num_batched_tokens=32) as llm:
            tokens.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
    assert tokens[0] == tokens[1] == tokens[2]

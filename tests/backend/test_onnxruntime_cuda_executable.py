"""The executable for CUDA, its sessions and its memory on a CPU instead."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from octavo.backends import cuda_devices, registry
from octavo.backends.base import Compatibility, Executable, LoadOptions
from octavo.backends.block_origins import block_origins
from octavo.backends.bundle import read_manifest
from octavo.backends.onnxruntime import executable_cuda, sessions
from octavo.backends.onnxruntime.device_cuda import CudaSupport
from octavo.backends.onnxruntime.executable_cuda import attention_metadata
from octavo.compiler import BuildConfig, build_engine
from octavo.compiler.config import SpeculativeConfig
from octavo.graphs.errors import BackendError
from octavo.runtime import LLM, SamplingParams
from tests.backend.cpu_stand_in import runs_on_cpu
from tests.backend.cuda_engines import NUM_BLOCKS, OTHER, SEQUENCE, CudaEngines, assert_close, steps
from tests.backend.steps import Sequence, pack, run_step
from tests.backend.test_engines import WRONG_STEPS
from tests.unit.drafter_heads_files import medusa_tensors, write

Open = Callable[[Path, int | None], onnxruntime.InferenceSession]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Sessions and caches for CUDA are the CPU's; the files that were opened."""
    names: list[str] = []

    def open_on_cpu(model: Path, num_threads: int | None) -> onnxruntime.InferenceSession:
        names.append(model.name)
        return sessions.open_on_cpu(runs_on_cpu(model, tmp_path), num_threads)

    monkeypatch.setattr(sessions, "open_on_cuda", open_on_cpu)
    monkeypatch.setattr(executable_cuda, "DEVICE", ("cpu", 0))
    return names


def loaded(path: Path) -> Executable:
    executable = registry.get("onnxruntime").load(path, read_manifest(path), LoadOptions(1))
    executable.allocate_kv_cache(NUM_BLOCKS)
    return executable


@pytest.fixture
def executable(cuda_engines: CudaEngines, opened: list[str]) -> Iterator[Executable]:
    made = loaded(cuda_engines.build("llama"))
    yield made
    made.close()


# --- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model_type", "size"), [("gemma2", 16), ("gpt_oss", 256)])
def test_steps_give_what_pytorch_does(
    cuda_engines: CudaEngines, opened: list[str], model_type: str, size: int
) -> None:
    executable = loaded(cuda_engines.build(model_type, size=size))
    oracle = cuda_engines.oracle(model_type, size)
    for parts in steps(size):
        inputs = pack(parts, size)
        assert_close(executable.run(inputs).logits, oracle.run(inputs).logits)
    executable.close()


def test_one_inputs_object_may_come_again_with_other_contents(executable: Executable) -> None:
    """ONNX Runtime copies to a device what is bound to one when it is bound: here it would not."""
    (wanted,) = run_step(executable, [(SEQUENCE, 0, 50)])
    decode, bound = pack([(SEQUENCE, 40, 41)]), []
    for position in (40, 41):
        now = pack([(SEQUENCE, position, position + 1)])
        for name in ("token_ids", "positions", "slot_mapping", "prefix_offsets"):
            getattr(decode, name)[...] = getattr(now, name)
        bound.append(executable.run(decode).logits.copy())
    assert_close(np.concatenate(bound), wanted[40:42])


def test_inputs_are_bound_in_every_step(
    executable: Executable, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    bind = onnxruntime.IOBinding.bind_input

    def recording(binding: Any, name: str, *arguments: Any) -> None:
        names.append(name)
        bind(binding, name, *arguments)

    monkeypatch.setattr(onnxruntime.IOBinding, "bind_input", recording)
    inputs = pack([(SEQUENCE, 0, 5)])
    executable.run(inputs)
    executable.run(inputs)
    assert names == 2 * [
        "token_ids",
        "positions",
        "slot_mapping",
        "block_tables",
        "query_start_loc",
        "prefix_offsets",
        "logits_indices",
    ]


def test_a_step_that_wants_no_logits(executable: Executable) -> None:
    inputs = dataclasses.replace(pack([(SEQUENCE, 0, 30)]), logits_indices=np.zeros(0, np.int32))
    assert executable.run(inputs).logits.shape == (0, 256)


def test_bounds_of_a_step() -> None:
    """Sequences of 17 new tokens after 30 and of 1 after 40."""
    inputs = pack([(SEQUENCE, 30, 47), (SEQUENCE, 40, 41)])
    assert attention_metadata(inputs) == (17, 47, 47)


def test_bounds_are_bound_where_the_graph_takes_them(
    cuda_engines: CudaEngines, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    executable = loaded(cuda_engines.build("llama", size=256))
    given: list[tuple[Any, ...]] = []
    bind = onnxruntime.IOBinding.bind_input

    def recording(binding: Any, name: str, *place: Any) -> None:
        if name == "attention_metadata":
            given.append(place[:4])
        bind(binding, name, *place)

    monkeypatch.setattr(onnxruntime.IOBinding, "bind_input", recording)
    executable.run(pack([(Sequence(SEQUENCE.tokens, [3]), 0, 9)], 256))
    assert given == [("cpu", 0, np.dtype(np.int32), (3,))]  # in host memory on every device
    executable.close()


@pytest.mark.parametrize("wrong", WRONG_STEPS)
def test_a_wrong_step_is_refused_before_it_reaches_the_device(
    executable: Executable, wrong: str
) -> None:
    (wanted,) = run_step(executable, [(SEQUENCE, 0, 50)])
    with pytest.raises(BackendError):
        executable.run(WRONG_STEPS[wrong](pack([(SEQUENCE, 0, 50)])))
    (again,) = run_step(executable, [(SEQUENCE, 0, 50)])
    np.testing.assert_array_equal(again, wanted)


def test_reallocating_gives_an_empty_cache(executable: Executable) -> None:
    (fresh,) = run_step(executable, [(SEQUENCE, 49, 50)])  # reads 49 zeros
    run_step(executable, [(SEQUENCE, 0, 50)])
    executable.allocate_kv_cache(10)
    (again,) = run_step(executable, [(SEQUENCE, 49, 50)])
    np.testing.assert_array_equal(again, fresh)


def test_a_closed_engine(executable: Executable) -> None:
    executable.close()
    executable.close()
    for use in (
        lambda: run_step(executable, [(SEQUENCE, 0, 5)]),
        lambda: executable.copy_blocks([(0, 1)]),
    ):
        with pytest.raises(BackendError, match="the engine is closed or has no cache"):
            use()


# --- copies of blocks -----------------------------------------------------------------------------


def test_copies_in_order_as_one_step() -> None:
    """Block 2 gets what 1 had from 0, and 0 gets what 3 had; 5 keeps what it has."""
    assert block_origins([(0, 1), (1, 2), (3, 0), (5, 5)]) == {1: 0, 2: 0, 0: 3}
    assert block_origins([(0, 1), (2, 1)]) == {1: 2}
    assert block_origins([]) == {}


def test_a_sequence_goes_on_in_a_copy(executable: Executable, opened: list[str]) -> None:
    """The blocks 5, 2, 9 of 48 tokens move to 7, 8, 0: first to others, then on from there."""
    (wanted,) = run_step(executable, [(SEQUENCE, 0, 50)])
    executable.copy_blocks([(5, 10), (2, 8), (9, 0), (10, 7), (1, 5), (1, 2), (1, 9), (4, 4)])
    moved = Sequence(SEQUENCE.tokens, [7, 8, 0, 4])
    (found,) = run_step(executable, [(moved, 48, 50)])
    np.testing.assert_allclose(found, wanted[48:], rtol=0, atol=2e-2 * np.abs(wanted).max())
    (lost,) = run_step(executable, [(SEQUENCE, 49, 50)])  # its blocks hold zeros now
    assert np.abs(lost - wanted[49:]).max() > 0.1 * np.abs(wanted).max()
    executable.copy_blocks([])
    executable.copy_blocks([(3, 3)])
    assert opened == ["model.onnx", "copy_blocks.onnx"]  # once, when it is first needed
    executable.allocate_kv_cache(NUM_BLOCKS)
    run_step(executable, [(OTHER, 0, 37)])
    executable.copy_blocks([(1, 7)])  # of the new cache
    assert opened[2:] == ["copy_blocks.onnx"]


def test_copies_outside_the_cache_are_refused(executable: Executable) -> None:
    for copies in ([(0, NUM_BLOCKS)], [(NUM_BLOCKS, 0)], [(-1, 0)]):
        with pytest.raises(BackendError, match="are to be copied in a cache of 16"):
            executable.copy_blocks(copies)


# --- speculation ----------------------------------------------------------------------------------


def test_heads_draft_from_hidden_states(
    cuda_engines: CudaEngines,
    opened: list[str],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Medusa engine: two graphs for CUDA, hidden states out of one and into the other."""
    folder = tmp_path_factory.mktemp("medusa")
    heads = write(
        folder / "heads",
        {"medusa_num_heads": 2, "medusa_num_layers": 1},
        medusa_tensors(2, vocab_size=256, hidden_size=64),
        "medusa_lm_head.safetensors",
    )
    config = BuildConfig(
        model=str(cuda_engines.checkpoint("llama")),
        output=folder / "engine",
        device="cuda",
        dtype="float16",
        max_model_len=128,
        speculative=(
            SpeculativeConfig(method="medusa", model=str(heads), num_speculative_tokens=2),
        ),
        use_cache=False,
    )
    path = build_engine(config).path
    monkeypatch.setattr(CudaSupport, "check", lambda self: Compatibility())
    prompts = [{"prompt_token_ids": one.tokens.tolist()} for one in (SEQUENCE, OTHER)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(path, num_kv_blocks=32, num_threads=1) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert opened == ["model.onnx", "model.onnx"]
    oracle = cuda_engines.build("llama", "torch")
    with LLM(oracle, num_kv_blocks=32) as llm:
        assert found == [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


# --- sessions and machines ------------------------------------------------------------------------


class FakeSession:
    def __init__(self, path: str, settings: Any, providers: list[Any]) -> None:
        self.arguments = (path, settings, providers)
        self.providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]

    def get_providers(self) -> list[str]:
        return self.providers


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """ONNX Runtime as it is with CUDA; `calls` are those of `preload_dlls`."""
    fake = types.SimpleNamespace(session=FakeSession, calls=[])
    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUE..."]
    )
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: fake.calls.append("preloaded"))
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *a, **k: fake.session(*a, **k))
    return fake


def test_what_onnx_runtime_is_asked_for(with_cuda: types.SimpleNamespace) -> None:
    session: Any = sessions.open_on_cuda(Path("model.onnx"), num_threads=3)
    path, settings, providers = session.arguments
    assert path == "model.onnx"
    assert settings.intra_op_num_threads == 3
    (name, options), cpu = providers
    assert (name, cpu) == ("CUDAExecutionProvider", "CPUExecutionProvider")
    assert options["device_id"] == "0"
    assert options["use_tf32"] == "0"
    assert with_cuda.calls == ["preloaded"]


def test_cuda_that_does_not_start_is_refused(with_cuda: types.SimpleNamespace) -> None:
    class WithoutCuda(FakeSession):
        def get_providers(self) -> list[str]:
            return ["CPUExecutionProvider"]

    with_cuda.session = WithoutCuda
    with pytest.raises(BackendError, match="could not start CUDA, it printed why: install"):
        sessions.open_on_cuda(Path("model.onnx"), None)


def test_a_build_of_onnx_runtime_without_cuda_is_refused(cuda_engines: CudaEngines) -> None:
    path = cuda_engines.build("llama")
    backend = registry.get("onnxruntime")
    with pytest.raises(BackendError, match=r"has no CUDA here.*extra \[cuda\]"):
        backend.load(path, read_manifest(path), LoadOptions())


@pytest.mark.parametrize(
    ("versions", "devices", "sentence"),
    [
        ({"onnxruntime": "1.32.0"}, ("9.0",), "onnxruntime-gpu is not installed: install Octavo"),
        ({"onnxruntime-gpu": "1.31.0"}, ("9.0",), "onnxruntime-gpu 1.31.0 is older than 1.32"),
        ({"onnxruntime-gpu": "1.32.0"}, (), "no CUDA device is visible here"),
        ({"onnxruntime-gpu": "1.32.0"}, ("9.0",), None),
    ],
)
def test_what_a_machine_needs(
    cuda_engines: CudaEngines,
    monkeypatch: pytest.MonkeyPatch,
    versions: dict[str, str],
    devices: tuple[str, ...],
    sentence: str | None,
) -> None:
    from importlib import metadata

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(cuda_devices, "compute_capabilities", lambda: devices)
    manifest = read_manifest(cuda_engines.build("llama"))
    reason = registry.get("onnxruntime").check(manifest).reason
    assert (reason is None) is (sentence is None)
    assert sentence is None or sentence in str(reason)


def test_a_machine_without_a_driver_has_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_devices, "_LIBRARY", "libnvidia-ml-of-nobody.so.1")
    assert cuda_devices.compute_capabilities() == ()
    assert "build an engine for the CPU" in str(cuda_devices.check_device().reason)

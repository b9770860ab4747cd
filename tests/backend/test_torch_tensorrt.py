"""Torch-TensorRT engines, with a stand-in for the library and the CPU for the device."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from octavo.backends import cuda_devices, registry
from octavo.backends.base import EngineKind, Executable, LoadOptions
from octavo.backends.bundle import read_manifest
from octavo.backends.torch_cuda import executable, operator
from octavo.backends.torch_tensorrt import compiling, libraries
from octavo.compiler import BuildConfig, build_engine
from octavo.compiler.config import SpeculativeConfig
from octavo.graphs.errors import BackendError, BuildError
from octavo.graphs.ops.paged_attention_torch import paged_attention_
from octavo.runtime import LLM, SamplingParams
from tests.backend.fake_torch_tensorrt import FakeTorchTensorRT
from tests.backend.steps import Sequence, pack, run_step
from tests.parity import tiny_models
from tests.parity.tiny_models import VOCAB_SIZE
from tests.unit.drafter_heads_files import medusa_tensors, write

NUM_BLOCKS = 16
VERSIONS = {"torch": "2.13.0+cu130", "torch-tensorrt": "2.13.0", "tensorrt": "11.4.1"}
SEQUENCE = Sequence(np.random.default_rng(0).integers(3, VOCAB_SIZE, 50), [5, 2, 9, 4])
OTHER = Sequence(np.random.default_rng(1).integers(3, VOCAB_SIZE, 37), [1, 13, 6])


class Machine:
    """What is installed, and the devices that are there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.versions = dict(VERSIONS)
        self.devices: tuple[str, ...] = ("9.0",)
        self.library = FakeTorchTensorRT()
        real = metadata.version
        known = {*VERSIONS, "tensorrt-cu12", "tensorrt-cu13"}

        def version(name: str) -> str:
            if name not in known:
                return real(name)
            if name not in self.versions:
                raise metadata.PackageNotFoundError(name)
            return self.versions[name]

        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(cuda_devices, "compute_capabilities", lambda: self.devices)
        monkeypatch.setattr(libraries, "torch_tensorrt", lambda: self.library)
        monkeypatch.setattr(compiling, "DEVICE", "cpu")
        monkeypatch.setattr(executable, "DEVICE", "cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


class Engines:
    """Built anew for each test, since what is asked for is what is tested."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def build(self, backend: str = "torch_tensorrt", **options: Any) -> Path:
        checkpoint, _ = tiny_models.checkpoint(self._folder / "llama", "llama")
        config = BuildConfig(
            model=str(checkpoint),
            output=self._folder / backend,
            backend=backend,
            max_model_len=128,
            max_num_seqs=8,
            max_num_batched_tokens=96,
            use_cache=False,
            **options,
        )
        return build_engine(config).path


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    return Engines(tmp_path)


def loaded(path: Path) -> Executable:
    manifest = read_manifest(path)
    made = registry.get(manifest.backend).load(path, manifest, LoadOptions(1))
    made.allocate_kv_cache(NUM_BLOCKS)
    return made


@pytest.fixture
def loaded_engine(machine: Machine, engines: Engines) -> Iterator[Executable]:
    made = loaded(engines.build())
    yield made
    made.close()


# --- what is built --------------------------------------------------------------------------------


def test_what_torch_tensorrt_is_asked_for(machine: Machine, engines: Engines) -> None:
    manifest = read_manifest(engines.build(dtype="float16"))
    (asked,) = machine.library.compiled
    operators = {torch.ops.octavo.paged_attention.default}
    assert asked.settings == {
        "torch_executed_ops": operators,
        "workspace_size": 1 << 30,
        "min_block_size": 5,
        "use_fast_partitioner": False,
        "require_full_compilation": False,
        "truncate_double": True,
        "immutable_weights": True,
        "disable_tf32": True,
        "use_fp32_acc": True,
        "use_explicit_typing": True,
    }
    called = [node.target for node in asked.program.graph.nodes]
    assert sum(target in operators for target in called) == 2
    assert machine.library.saved == [{"output_format": "exported_program", "retrace": False}]

    assert manifest.target.device == "cuda"
    assert manifest.target.compute_capabilities == ("9.0",)
    assert manifest.kv_layout == "reference"
    assert VERSIONS.items() <= manifest.versions.items()
    # The stand-in leaves all to PyTorch, so every operator is named.
    assert manifest.backend_data["left_to_pytorch"]["octavo.paged_attention.default"] == 2


def test_ranges_of_shapes_are_those_of_the_profiles(machine: Machine, engines: Engines) -> None:
    """8 sequences of up to 128 tokens in blocks of 16, 96 tokens a step."""
    engines.build()
    (asked,) = machine.library.compiled
    inputs, caches = asked.arg_inputs[:7], asked.arg_inputs[7:]
    assert len(caches) == 2
    ranges = {
        one.given["name"]: tuple(one.given[f"{bound}_shape"] for bound in ("min", "opt", "max"))
        for one in inputs
    }
    # A decode has 2 of 8 sequences as its typical size, and a quarter of the table's 8 blocks.
    tokens = ((1,), (2,), (96,))
    assert ranges == {
        "token_ids": tokens,
        "positions": tokens,
        "slot_mapping": tokens,
        "block_tables": ((1, 1), (2, 2), (8, 8)),
        "query_start_loc": ((2,), (3,), (9,)),
        "prefix_offsets": ((1,), (2,), (8,)),
        "logits_indices": ((1,), (2,), (96,)),
    }
    assert {one.given["dtype"] for one in inputs} == {torch.int32}
    for layer, cache in enumerate(caches):
        assert cache.given == {
            "name": f"kv_cache.{layer}",
            "dtype": torch.float32,
            "min_shape": (1, 2, 2, 16, 16),
            "opt_shape": (2, 2, 2, 16, 16),
            "max_shape": (64, 2, 2, 16, 16),
        }


def test_typing_is_asked_for_only_where_it_can_be() -> None:
    def newest(program: Any, arg_inputs: Any = None, **settings: Any) -> None: ...

    options: Any = SimpleNamespace(dtype="bfloat16")
    asked = compiling.settings(newest, options)
    assert "use_explicit_typing" not in asked
    assert asked["use_fp32_acc"] is False


def test_a_failed_build_is_one_sentence(
    machine: Machine, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel fits")

    monkeypatch.setattr(machine.library.dynamo, "compile", fail)
    with pytest.raises(BuildError, match="cannot compile LlamaForCausalLM: no kernel fits"):
        engines.build()


# --- what it computes -----------------------------------------------------------------------------


def test_steps_give_what_pytorch_does(machine: Machine, engines: Engines) -> None:
    made, oracle = loaded(engines.build()), loaded(engines.build("torch"))
    for parts in (
        [(SEQUENCE, 0, 30)],
        [(SEQUENCE, 30, 47), (OTHER, 0, 31)],
        [(OTHER, 31, 32), (SEQUENCE, 47, 48)],
        [(SEQUENCE, 48, 50), (OTHER, 32, 37)],
    ):
        for found, wanted in zip(run_step(made, parts), run_step(oracle, parts), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    made.close()


def test_caches_are_changed_where_they_are(loaded_engine: Any) -> None:
    before = [cache.data_ptr() for cache in loaded_engine._caches]
    run_step(loaded_engine, [(SEQUENCE, 0, 20)])
    assert [cache.data_ptr() for cache in loaded_engine._caches] == before
    for cache in loaded_engine._caches:  # blocks 5 and 2 hold 20 tokens, all others nothing
        used = cache.abs().amax(dim=(1, 2, 4)) > 0  # [N, block_size]
        assert used.sum(1).nonzero().flatten().tolist() == [2, 5]
        assert (int(used[5].sum()), int(used[2].sum())) == (16, 4)


def test_a_step_that_wants_no_logits(loaded_engine: Executable) -> None:
    (wanted,) = run_step(loaded_engine, [(SEQUENCE, 0, 50)])
    loaded_engine.allocate_kv_cache(NUM_BLOCKS)
    inputs = dataclasses.replace(pack([(SEQUENCE, 0, 30)]), logits_indices=np.zeros(0, np.int32))
    assert loaded_engine.run(inputs).logits.shape == (0, VOCAB_SIZE)
    (rest,) = run_step(loaded_engine, [(SEQUENCE, 30, 50)])
    np.testing.assert_allclose(rest, wanted[30:], rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_copies_follow_one_another(loaded_engine: Any) -> None:
    for cache in loaded_engine._caches:
        cache += torch.arange(NUM_BLOCKS)[:, None, None, None, None]
    loaded_engine.copy_blocks([(1, 2), (2, 3), (4, 1)])
    loaded_engine.copy_blocks([(7, 7)])
    for cache in loaded_engine._caches:
        assert cache[:5, 0, 0, 0, 0].tolist() == [0, 4, 1, 1, 4]


def test_a_wrong_step_is_refused_before_it_reaches_the_device(loaded_engine: Executable) -> None:
    step = pack([(SEQUENCE, 0, 30)])
    step.block_tables[0, 0] = NUM_BLOCKS
    with pytest.raises(BackendError, match="block_tables name blocks outside the cache's 16"):
        loaded_engine.run(step)


def test_a_closed_engine(loaded_engine: Executable) -> None:
    loaded_engine.close()
    loaded_engine.close()
    for use in (
        lambda: run_step(loaded_engine, [(SEQUENCE, 0, 5)]),
        lambda: loaded_engine.copy_blocks([(0, 1)]),
        lambda: loaded_engine.allocate_kv_cache(4),
    ):
        with pytest.raises(BackendError, match="the engine is closed"):
            use()


def test_an_archive_without_its_attention_is_refused(machine: Machine, engines: Engines) -> None:
    path = engines.build()
    manifest = read_manifest(path)
    deeper = manifest.spec.model_copy(update={"layers": manifest.spec.layers * 2})
    with pytest.raises(BackendError, match="has 2 attention layers that PyTorch runs"):
        registry.get("torch_tensorrt").load(
            path, manifest.model_copy(update={"spec": deeper}), LoadOptions()
        )


def test_heads_draft_from_hidden_states(machine: Machine, engines: Engines, tmp_path: Path) -> None:
    """A Medusa engine: two archives, hidden states out of one and into the other."""
    heads = write(
        tmp_path / "heads",
        {"medusa_num_heads": 2, "medusa_num_layers": 1},
        medusa_tensors(2, vocab_size=VOCAB_SIZE, hidden_size=64),
        "medusa_lm_head.safetensors",
    )
    drafter = SpeculativeConfig(method="medusa", model=str(heads), num_speculative_tokens=2)
    prompts = [{"prompt_token_ids": one.tokens.tolist()} for one in (SEQUENCE, OTHER)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    found = []
    for path in (engines.build(speculative=(drafter,)), engines.build("torch")):
        with LLM(path, num_kv_blocks=32) as llm:
            found.append([one.outputs[0].token_ids for one in llm.generate(prompts, params)])
    assert len(machine.library.loaded) == 2
    assert found[0] == found[1]


# --- the operator ---------------------------------------------------------------------------------


def attention_operands(dtype: torch.dtype) -> list[Any]:
    """One sequence of 3 tokens, 4 heads over 2, keys of 8 elements; query, keys and values are
    views of one product."""
    product = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    return [
        product[:, :4],
        product[:, 4:6],
        product[:, 6:],
        torch.zeros(2, 2, 2, 16, 8, dtype=dtype),
        torch.tensor([16, 17, 18], dtype=torch.int32),
        torch.tensor([[1]], dtype=torch.int32),
        torch.tensor([0, 3], dtype=torch.int32),
        torch.tensor([0], dtype=torch.int32),
        torch.zeros(0),
        torch.zeros(0),
    ]


def test_the_operator_changes_its_cache() -> None:
    operands = attention_operands(torch.float32)
    expected_cache = operands[3].clone()
    arguments = [*operands[:3], expected_cache, *operands[4:], 0.5, 1, 0, 0.0, 0]
    expected = paged_attention_(*arguments)
    found = operator.operator()(*operands, 0.5, 1, 0, 0.0, 0)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(operands[3], expected_cache)
    schema = operator.operator()._schema
    assert [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write] == [
        "kv_cache"
    ]


def test_the_kernel_for_cuda_gets_tensors_and_their_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    modules: dict[str, Any] = {
        "octavo.backends.gpu_attention": SimpleNamespace(AttentionShape=SimpleNamespace),
        "octavo.backends.gpu_attention.torch_attention": SimpleNamespace(
            paged_attention_=lambda *given: calls.append(given)
        ),
    }
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: modules.get(name) or real(name))
    operator._kernel.cache_clear()
    operator._shape.cache_clear()
    operands = attention_operands(torch.bfloat16)
    for _ in range(2):
        operator._on_cuda(*[*operands, 0.5, 1, 24, 2.0, 0])
    operator._kernel.cache_clear()
    operator._shape.cache_clear()
    *tensors, shape = calls[0]
    assert vars(shape) == {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "value_head_size": 8,
        "block_size": 16,
        "scale": 0.5,
        "causal": True,
        "sliding_window": 24,
        "softcap": 2.0,
        "has_sinks": False,
        "has_alibi": False,
        "dtype": "bfloat16",
        "cache_dtype": "bfloat16",
    }
    assert calls[1][-1] is shape
    assert tensors[3] is operands[3]  # the cache itself
    for given, wanted in zip(tensors, operands, strict=True):
        assert given.is_contiguous()
        torch.testing.assert_close(given, wanted)
    with pytest.raises(ValueError, match="reference layout only"):
        operator._on_cuda(*[*operands, 0.5, 1, 0, 0.0, 1])


# --- what a machine needs -------------------------------------------------------------------------


def refusal(**changes: Any) -> str:
    """Of the backend itself, or of this machine."""
    kind: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "float32", "device": "cuda"}
    backend, asked = registry.get("torch_tensorrt"), EngineKind(**kind | changes)
    try:
        backend.require(asked, 16)
    except BuildError as error:
        return str(error)
    return str(backend.can_build(asked).reason)


def test_what_cannot_be_built(machine: Machine) -> None:
    assert "--quantization int8 has no kernels" in refusal(quantization="int8")
    assert "--kv-cache-dtype int8 has no kernel" in refusal(kv_cache_dtype="int8")
    message = refusal(compute_capabilities=("8.9",))
    assert "--compute-capability 8.9 is not that of this machine's device, 9.0" in message
    machine.devices = ()
    assert "no CUDA device is visible here" in refusal()
    del machine.versions["torch-tensorrt"]
    assert "torch-tensorrt is not installed: install Octavo with its extra [tenso" in refusal()


def test_engines_run_where_they_were_built(machine: Machine, engines: Engines) -> None:
    manifest = read_manifest(engines.build())
    check = registry.get("torch_tensorrt").check
    assert check(manifest).ok
    machine.versions["torch"] = "2.13.1"
    assert check(manifest).ok  # of the same release
    for name, version, sentence in (
        ("torch", "2.14.0", "built with torch 2.13.0+cu130 and this machine has 2.14.0: install"),
        ("torch-tensorrt", "2.12.1", "built with torch-tensorrt 2.13.0 and this machine has 2.12"),
        ("tensorrt", "11.4.0", "built with tensorrt 11.4.1 and this machine has 11.4.0: install"),
    ):
        machine.versions = {**VERSIONS, name: version}
        assert sentence in str(check(manifest).reason)
    machine.versions = {**VERSIONS}
    del machine.versions["tensorrt"]
    assert "this machine has none: install tensorrt 11.4.1" in str(check(manifest).reason)
    del machine.versions["torch-tensorrt"]
    assert "torch-tensorrt is not installed" in str(check(manifest).reason)
    machine.versions, machine.devices = {**VERSIONS}, ("8.9",)
    assert "of compute capability 9.0, this machine's has 8.9" in str(check(manifest).reason)
    machine.devices = ()
    assert "no CUDA device is visible here" in str(check(manifest).reason)


def test_a_library_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise OSError("libnvinfer.so.11: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(BackendError, match=r"cannot be imported \(libnvinfer.so.11: cannot open"):
        libraries.torch_tensorrt()


def test_choosing_the_backend_imports_nothing_heavy() -> None:
    code = """
import sys
from octavo.backends import registry
backend = registry.get("torch_tensorrt")
assert backend.devices == ("cuda",)
print(sorted({"torch", "torch_tensorrt", "triton", "onnxruntime"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")

"""The run time of TensorRT engines, on fakes that compute in host memory.

The code under test cannot know: it sees cuda-python and TensorRT, whose memory, streams and graphs
behave as the real ones do as far as these tests look.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.backends import cuda_devices
from octavo.backends.base import AcceptInputs, LoadOptions, StepInputs
from octavo.backends.gpu_attention import AttentionShape
from octavo.backends.manifest import BindingRecord, Limits, Manifest, Target
from octavo.backends.tensorrt.backend import TensorRtBackend
from octavo.backends.tensorrt.decode_graphs import DecodeGraphs
from octavo.backends.tensorrt.executable import TensorRtExecutable
from octavo.backends.tensorrt.flavour import Flavour
from octavo.compiler.profiles import make_profiles
from octavo.graphs import bindings
from octavo.graphs.errors import BackendError
from octavo.graphs.spec import AttentionSpec, ModelSpec
from tests.backend import fake_cuda, fake_gpu_attention, fake_tensorrt
from tests.backend.fake_cuda import CudaError, FakeCuda
from tests.backend.fake_tensorrt import FakeTensorRt
from tests.backend.steps import Sequence, pack, run_step

FLAVOUR = Flavour(
    name="fake",
    title="FakeRT",
    module=fake_tensorrt.NAME,
    distributions=("numpy",),
    extra="fake",
    sets_capabilities=True,
    tested="simulated",
)
VOCAB = 64
NUM_BLOCKS = 12
LIMITS = Limits(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=48, block_size=16)
LAYER = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, value_head_dim=8, scale=0.1)
SPEC = ModelSpec(
    architecture="FakeForCausalLM",
    model_type="fake",
    vocab_size=VOCAB,
    hidden_size=32,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    layers=(LAYER, LAYER),
    num_parameters=1,
    sampled_vocab_size=VOCAB,
)
ATTRIBUTES = {"scale": 0.1, "causal": 1, "sliding_window": 0, "softcap": 0.0, "k_transposed": 0}
SHAPE = AttentionShape(
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    value_head_size=8,
    block_size=16,
    scale=float(np.float32(0.1)),
    causal=True,
    sliding_window=0,
    softcap=0.0,
    has_sinks=False,
    has_alibi=False,
    dtype="float32",
    cache_dtype="float32",
)


def manifest_of(spec: ModelSpec, inputs: tuple[bindings.Binding, ...]) -> Manifest:
    caches = tuple(spec.kv_cache_bindings(LIMITS.block_size, "float32"))
    records = [BindingRecord(name=b.name, dtype=b.dtype, shape=b.shape) for b in (*inputs, *caches)]
    return Manifest(
        backend="fake",
        spec=spec,
        limits=LIMITS,
        dtype="float32",
        kv_cache_dtype="float32",
        inputs=tuple(records),
        outputs=(),
        profiles=make_profiles(LIMITS, max_draft_tokens=16),
        target=Target(architecture="any", device="cuda", compute_capabilities=("8.9",)),
        versions={fake_tensorrt.NAME: np.__version__},
        backend_data={
            "model": "model.engine",
            "kernels": {"8.9": ["kernels/8.9/0.bin"]} if spec.layers else {},
        },
    )


MANIFEST = manifest_of(SPEC, bindings.STEP_INPUTS)
HEADS = SPEC.model_copy(update={"layers": (), "feature_size": 4, "drafts_per_row": 3})
HEADS_MANIFEST = manifest_of(HEADS, (bindings.TOKEN_IDS, bindings.features(4)))


@dataclass
class Machine:
    """A machine with a fake GPU and a bundle."""

    bundle: Path
    cuda: FakeCuda
    trt: FakeTensorRt

    def write(self, manifest: Manifest = MANIFEST, **changes: Any) -> None:
        caches = [one.name for one in manifest.inputs if one.name.startswith("kv_cache")]
        content = {
            "num_profiles": 4,
            "inputs": [one.name for one in manifest.inputs],
            "outputs": ["logits", *(bindings.cache_output_name(name) for name in caches)],
            "layers": [ATTRIBUTES for _ in manifest.spec.layers],
            "heads": [4, 2, 8, 8],
            "dtype": "FLOAT",
            "vocab": VOCAB,
            "drafts": manifest.spec.drafts_per_row,
            **changes,
        }
        (self.bundle / "model.engine").write_text(json.dumps(content))
        folder = self.bundle / "kernels/8.9"
        folder.mkdir(parents=True, exist_ok=True)
        image = fake_gpu_attention.KernelImage("8.9", SHAPE)
        (folder / "0.bin").write_bytes(image.to_bytes())

    def load(self, manifest: Manifest = MANIFEST, **changes: Any) -> TensorRtExecutable:
        self.write(manifest, **changes)
        return TensorRtBackend(FLAVOUR).load(self.bundle, manifest, LoadOptions())

    @property
    def engine(self) -> fake_tensorrt.Engine:
        return self.trt.engines[-1]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    fake_gpu_attention.install(monkeypatch)
    monkeypatch.setattr(cuda_devices, "compute_capabilities", lambda: ("8.9", "8.0"))
    cuda = fake_cuda.install(monkeypatch)
    return Machine(tmp_path, cuda, fake_tensorrt.install(monkeypatch, cuda))


@pytest.fixture
def executable(machine: Machine) -> Iterator[TensorRtExecutable]:
    loaded = machine.load()
    loaded.allocate_kv_cache(NUM_BLOCKS)
    yield loaded
    loaded.close()
    assert (machine.cuda.device, machine.cuda.host) == ({}, {})


def sequence(length: int, blocks: list[int], seed: int = 0) -> Sequence:
    return Sequence(np.random.default_rng(seed).integers(1, VOCAB, length), blocks)


def expected(one: Sequence) -> Any:
    """The logits [len, V]: sums of the tokens up to each row, and the column."""
    return one.tokens.cumsum()[:, None] + np.arange(VOCAB, dtype=np.float32) / 1024


ONE = sequence(40, [5, 2, 9])
OTHER = sequence(20, [7, 3], seed=1)
THIRD = sequence(70, [0, 1, 4, 6, 8], seed=2)

# --- steps ----------------------------------------------------------------------------------------


def test_a_whole_prompt(executable: TensorRtExecutable) -> None:
    (logits,) = run_step(executable, [(ONE, 0, 40)])
    np.testing.assert_array_equal(logits, expected(ONE))


@pytest.mark.parametrize("size", [1, 7, 16])
def test_chunks_read_what_earlier_steps_wrote(executable: TensorRtExecutable, size: int) -> None:
    parts = [(at, min(at + size, 40)) for at in range(0, 40, size)]
    found = [run_step(executable, [(ONE, *part)])[0] for part in parts]
    np.testing.assert_array_equal(np.concatenate(found), expected(ONE))


def test_sequences_of_a_batch_keep_apart(executable: TensorRtExecutable) -> None:
    first = run_step(executable, [(ONE, 0, 30), (OTHER, 0, 18)])
    second = run_step(executable, [(OTHER, 18, 20), (ONE, 30, 40)])
    np.testing.assert_array_equal(np.concatenate([first[0], second[1]]), expected(ONE))
    np.testing.assert_array_equal(np.concatenate([first[1], second[0]]), expected(OTHER))


def test_a_step_that_wants_no_logits_writes_the_cache(executable: TensorRtExecutable) -> None:
    wanted = replace(pack([(ONE, 0, 30)]), logits_indices=np.zeros(0, np.int32))
    outputs = executable.run(wanted)
    assert outputs.logits.shape == (0, VOCAB)
    (logits,) = run_step(executable, [(ONE, 30, 40)])
    np.testing.assert_array_equal(logits, expected(ONE)[30:])


def test_only_the_rows_asked_for_come_back(executable: TensorRtExecutable) -> None:
    wanted = replace(pack([(ONE, 0, 40)]), logits_indices=np.array([39, 3], np.int32))
    np.testing.assert_array_equal(executable.run(wanted).logits, expected(ONE)[[39, 3]])


def test_each_step_uses_the_first_profile_that_admits_it(
    machine: Machine, executable: TensorRtExecutable
) -> None:
    run_step(executable, [(OTHER, 0, 3)])  # three tokens could be three sequences'
    run_step(executable, [(ONE, 0, 40)])  # 40 rows: more than sequences, as in a verification
    prompt = replace(pack([(THIRD, 0, 48)]), logits_indices=np.array([47], np.int32))
    executable.run(prompt)
    run_step(executable, [(THIRD, 48, 49)])
    assert machine.engine.executed == [0, 3, 1, 0]


def test_a_drafter_of_heads_reads_features_and_has_no_cache(machine: Machine) -> None:
    loaded = machine.load(HEADS_MANIFEST)
    tokens = np.array([3, 5], np.int32)
    features = np.arange(8, dtype=np.float32).reshape(2, 4)
    empty = np.zeros(0, np.int32)
    step = StepInputs(tokens, empty, empty, empty, empty, empty, empty, features)
    logits = loaded.run(step).logits
    assert logits.shape == (6, VOCAB)  # three heads for each of two tokens
    assert logits[:, 0].tolist() == [3 + 6, 3 + 6, 3 + 6, 5 + 22, 5 + 22, 5 + 22]
    loaded.close()
    assert machine.cuda.device == {}


# --- graphs ---------------------------------------------------------------------------------------


def test_a_decode_step_that_comes_again_is_recorded(
    machine: Machine, executable: TensorRtExecutable
) -> None:
    found = [run_step(executable, [(ONE, at, at + 1)])[0] for at in range(40)]
    np.testing.assert_array_equal(np.concatenate(found), expected(ONE))
    # The first step runs plainly, the second runs and is recorded: 38 are left.
    assert len(machine.engine.executed) == 3
    assert machine.cuda.calls.count("cudaGraphLaunch") == 38
    assert len(machine.cuda.graphs) == 1


def test_widths_share_graphs(machine: Machine, executable: TensorRtExecutable) -> None:
    for blocks in ([0, 1, 2], [3, 4, 5, 6], [7, 8, 9]):
        one = sequence(1, blocks, seed=len(blocks))
        np.testing.assert_array_equal(run_step(executable, [(one, 0, 1)])[0], expected(one))
    assert machine.cuda.calls.count("cudaGraphLaunch") == 1


def test_each_graph_has_a_context_that_nothing_else_changes(
    machine: Machine, executable: TensorRtExecutable
) -> None:
    for _ in range(2):
        run_step(executable, [(OTHER, 0, 1)])
    own = machine.engine.contexts[-1]
    before = dict(own.shapes), dict(own.addresses)
    run_step(executable, [(ONE, 0, 40)])
    run_step(executable, [(OTHER, 1, 2), (ONE, 39, 40)])
    assert own not in machine.engine.contexts[:4]
    assert (own.shapes, own.addresses) == before


def test_prompts_are_not_recorded(machine: Machine, executable: TensorRtExecutable) -> None:
    for _ in range(4):
        run_step(executable, [(OTHER, 0, 20)])
    assert machine.cuda.graphs == {}


def test_a_context_that_cannot_be_captured_runs_plainly(
    machine: Machine, executable: TensorRtExecutable
) -> None:
    machine.trt.capturable = False
    found = [run_step(executable, [(OTHER, at, at + 1)])[0] for at in range(5)]
    np.testing.assert_array_equal(np.concatenate(found), expected(OTHER)[:5])
    assert len(machine.engine.executed) == 5
    assert "cudaStreamBeginCapture" not in machine.cuda.calls


def test_what_fails_while_it_is_recorded_ends_the_recording(
    machine: Machine, executable: TensorRtExecutable
) -> None:
    run_step(executable, [(OTHER, 0, 1)])
    machine.cuda.fails["cudaStreamEndCapture"] = CudaError.cudaErrorInvalidValue
    with pytest.raises(BackendError, match=r"cudaStreamEndCapture .*cudaErrorInvalidValue"):
        run_step(executable, [(OTHER, 1, 2)])
    machine.cuda.recording = None  # what the call that was made to fail would have done
    (logits,) = run_step(executable, [(OTHER, 1, 2)])
    np.testing.assert_array_equal(logits, expected(OTHER)[1:2])


def test_graphs_used_longest_ago_are_dropped(machine: Machine) -> None:
    loaded = machine.load()
    loaded._graphs = DecodeGraphs(loaded._cuda, most=2)
    loaded.allocate_kv_cache(NUM_BLOCKS)
    widths = {size: sequence(1, list(range(size)), seed=size) for size in (1, 2, 4)}
    for size in (1, 1, 2, 2, 1, 4, 4):  # 2 is the oldest when 4 is recorded
        run_step(loaded, [(widths[size], 0, 1)])
    assert len(machine.cuda.graphs) == 2
    launched = machine.cuda.calls.count("cudaGraphLaunch")
    run_step(loaded, [(widths[1], 0, 1)])
    assert machine.cuda.calls.count("cudaGraphLaunch") == launched + 1
    run_step(loaded, [(widths[2], 0, 1)])  # recorded again
    assert machine.cuda.calls.count("cudaGraphLaunch") == launched + 1
    loaded.close()
    assert machine.cuda.graphs == {}


# --- the plugin -----------------------------------------------------------------------------------


def test_the_plugin_launches_the_kernel_of_its_shape(
    machine: Machine, executable: TensorRtExecutable
) -> None:
    run_step(executable, [(ONE, 0, 30), (OTHER, 0, 18)])
    loaded: Any = executable._kernels.attention(SHAPE)
    assert len(loaded.launches) == 2  # layers
    addresses = machine.engine.contexts[3].addresses
    for layer, (pointers, num_tokens, num_seqs, max_blocks, stream) in enumerate(loaded.launches):
        assert (num_tokens, num_seqs, max_blocks, stream) == (48, 2, 3, 7)
        assert (pointers.query, pointers.output, pointers.alibi_slopes) == (1, 10, 9)
        assert pointers.kv_cache == addresses[f"kv_cache.{layer}"]
        assert pointers.kv_cache == addresses[f"kv_cache_out.{layer}"]
        assert pointers.block_tables == addresses["block_tables"]
    assert loaded.launches[0][0].kv_cache != loaded.launches[1][0].kv_cache


def test_an_engine_without_a_kernel_for_a_layer_says_so(machine: Machine) -> None:
    loaded = machine.load(heads=[8, 2, 8, 8])
    loaded.allocate_kv_cache(NUM_BLOCKS)
    with pytest.raises(
        BackendError, match=r"in a step: the engine has no attention kernel .*heads=8"
    ):
        run_step(loaded, [(ONE, 0, 3)])
    loaded.close()


def test_two_engines_use_each_its_own_kernels(machine: Machine) -> None:
    """The plugin is registered once in a process."""
    first, second = machine.load(), machine.load()
    for loaded in (first, second):
        loaded.allocate_kv_cache(NUM_BLOCKS)
    run_step(second, [(OTHER, 0, 20)])
    counts = []
    for loaded in (first, second):
        kernel: Any = loaded._kernels.attention(SHAPE)
        counts.append(len(kernel.launches))
        loaded.close()
    assert counts == [0, 2]
    assert len(machine.trt.registry.creators) == 1


# --- what is refused ------------------------------------------------------------------------------


def test_a_step_larger_than_every_profile_names_the_limit(
    machine: Machine, executable: TensorRtExecutable
) -> None:
    many = [(sequence(1, [block], seed=block), 0, 1) for block in range(5)]
    with pytest.raises(BackendError, match="has 5 sequences and the engine's profiles admit 4 at"):
        run_step(executable, many)
    with pytest.raises(BackendError, match="has 49 tokens and the engine's profiles admit 48 at"):
        run_step(executable, [(THIRD, 0, 49)])
    wide = Sequence(np.ones(3, np.int64), list(range(9)))
    with pytest.raises(BackendError, match=r"has 9 blocks of one sequence and .* admit 8 at most"):
        run_step(executable, [(wide, 0, 3)])
    assert machine.engine.executed == []


@pytest.mark.parametrize(
    ("name", "index", "value", "sentence"),
    [
        ("token_ids", 3, VOCAB, r"token_ids has values from \d+ to 64, they must be from 0 to 63"),
        ("token_ids", 3, -1, "token_ids has values from -1"),
        ("positions", 3, 128, "positions has values from 0 to 128, they must be from 0 to 127"),
        ("slot_mapping", 3, 192, "slot_mapping has .* to 192, they must be from -1 to 191"),
        ("slot_mapping", 3, -2, "slot_mapping has values from -2"),
        ("block_tables", (0, 1), 12, "block_tables has .* to 12, they must be from 0 to 11"),
        ("logits_indices", 3, 40, "logits_indices has .* to 40, they must be from 0 to 39"),
        ("query_start_loc", 0, 1, r"query_start_loc \[1, 40\] does not divide 40 tokens"),
        ("query_start_loc", 1, 39, r"query_start_loc \[0, 39\] does not divide 40 tokens"),
        ("prefix_offsets", 0, -1, "prefix_offsets has values from -1"),
        ("prefix_offsets", 0, 9, "a sequence of 49 tokens does not fit into a block table of 3"),
    ],
)
def test_what_would_leave_its_memory_is_refused(
    machine: Machine,
    executable: TensorRtExecutable,
    name: str,
    index: Any,
    value: int,
    sentence: str,
) -> None:
    step = pack([(ONE, 0, 40)])
    getattr(step, name)[index] = value
    with pytest.raises(BackendError, match=sentence):
        executable.run(step)
    assert machine.engine.executed == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"positions": np.zeros(39, np.int32)}, r"positions has shape \(39,\), .* T should be 40"),
        ({"token_ids": np.zeros(40, np.int64)}, r"token_ids is not an array int32 \['T'\]"),
        ({"block_tables": np.zeros(3, np.int32)}, r"block_tables is not an array int32"),
        ({"query_start_loc": np.zeros(3, np.int32)}, "has 3 elements for 1 sequences"),
    ],
)
def test_arrays_that_do_not_agree_are_refused(
    executable: TensorRtExecutable, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(BackendError, match=sentence):
        executable.run(replace(pack([(ONE, 0, 40)]), **changes))


def test_there_is_no_acceptance_graph(executable: TensorRtExecutable) -> None:
    none: Any = None
    with pytest.raises(BackendError, match='acceptance="exact"'):
        executable.accept(AcceptInputs(*[none] * 13))


def test_what_tensorrt_says_of_a_failed_step_is_passed_on(
    machine: Machine, executable: TensorRtExecutable
) -> None:
    machine.trt.fails = "the plugin\n  failed"
    with pytest.raises(BackendError, match="TensorRT failed in a step: the plugin failed"):
        run_step(executable, [(ONE, 0, 40)])
    (logits,) = run_step(executable, [(ONE, 0, 40)])
    np.testing.assert_array_equal(logits, expected(ONE))


def test_an_error_of_the_device_is_named(machine: Machine, executable: TensorRtExecutable) -> None:
    machine.cuda.fails["cudaStreamSynchronize"] = CudaError.cudaErrorIllegalAddress
    with pytest.raises(BackendError, match=r"\(error 700, cudaErrorIllegalAddress\): load"):
        run_step(executable, [(ONE, 0, 40)])


# --- memory ---------------------------------------------------------------------------------------


def test_a_cache_allocated_again_is_empty_and_the_old_one_gone(
    machine: Machine, executable: TensorRtExecutable
) -> None:
    for at in range(3):
        run_step(executable, [(OTHER, at, at + 1)])
    taken = sum(memory.size for memory in machine.cuda.device.values())
    executable.allocate_kv_cache(NUM_BLOCKS)
    assert machine.cuda.graphs == {}  # which had the old addresses
    assert sum(memory.size for memory in machine.cuda.device.values()) == taken
    (logits,) = run_step(executable, [(OTHER, 3, 4)])
    assert logits[0, 0] == OTHER.tokens[3]  # no token before it


def test_blocks_are_copied_in_order(machine: Machine, executable: TensorRtExecutable) -> None:
    one, two = sequence(16, [0], seed=3), sequence(16, [1], seed=4)
    run_step(executable, [(one, 0, 16), (two, 0, 16)])
    executable.copy_blocks([(0, 2), (1, 0), (2, 1), (0, 11)])  # two is in 0 and 11, one in 1 and 2
    for block, source in ((0, two), (1, one), (2, one), (11, two)):
        longer = Sequence(np.append(source.tokens, 1), [block, 5])
        (logits,) = run_step(executable, [(longer, 16, 17)])
        assert logits[0, 0] == source.tokens.sum() + 1


@pytest.mark.parametrize("num_blocks", [0, -1, 4194304])
def test_a_cache_of_a_size_that_the_engine_does_not_take(
    executable: TensorRtExecutable, num_blocks: int
) -> None:
    # 2**31 - 1 elements in blocks of 2 x 2 x 16 x 8 of them
    with pytest.raises(BackendError, match=f"a cache of {num_blocks} blocks .* takes 1 to 4194303"):
        executable.allocate_kv_cache(num_blocks)


def test_a_gpu_that_is_too_small_for_the_cache(machine: Machine) -> None:
    loaded = machine.load()
    before = dict(machine.cuda.device)
    machine.cuda.fails["cudaMalloc"] = CudaError.cudaErrorMemoryAllocation
    with pytest.raises(BackendError, match=r"the GPU has [\d,]+ of 4,294,967,296 bytes free and"):
        loaded.allocate_kv_cache(NUM_BLOCKS)
    assert machine.cuda.device == before
    with pytest.raises(BackendError, match="has no cache: call allocate_kv_cache"):
        run_step(loaded, [(ONE, 0, 3)])
    loaded.allocate_kv_cache(NUM_BLOCKS)
    (logits,) = run_step(loaded, [(ONE, 0, 3)])
    np.testing.assert_array_equal(logits, expected(ONE)[:3])
    loaded.close()


def test_contexts_compute_in_one_memory(machine: Machine, executable: TensorRtExecutable) -> None:
    contexts = machine.engine.contexts
    assert [context.profile for context in contexts] == [0, 1, 2, 3]
    assert {context.memory for context in contexts} == {(executable._work, 4000)}
    assert all(c.config.strategy == fake_tensorrt.Strategy.USER_MANAGED for c in contexts)
    # Kernels specialised meanwhile would change a request's numbers.
    strategies = {c.config.dynamic_shapes_kernel_specialization_strategy for c in contexts}
    assert strategies == {fake_tensorrt.Specialization.NONE}


def test_weights_are_streamed_by_a_budget_set_before_the_contexts(machine: Machine) -> None:
    loaded = machine.load(streamable=99999)
    assert {context.budget for context in machine.engine.contexts} == {12345}
    loaded.close()


def test_closing_frees_everything_and_may_be_repeated(machine: Machine) -> None:
    loaded = machine.load()
    loaded.allocate_kv_cache(NUM_BLOCKS)
    for at in range(3):
        run_step(loaded, [(ONE, at, at + 1)])
    kernel: Any = loaded._kernels.attention(SHAPE)
    loaded.close()
    loaded.close()
    assert kernel.closed
    cuda = machine.cuda
    assert (cuda.device, cuda.host, cuda.graphs, cuda.streams) == ({}, {}, {}, 0)
    with pytest.raises(BackendError, match="closed"):
        run_step(loaded, [(ONE, 0, 1)])
    with pytest.raises(BackendError, match="closed"):
        loaded.allocate_kv_cache(NUM_BLOCKS)


# --- loading --------------------------------------------------------------------------------------


def test_an_engine_that_tensorrt_does_not_read(machine: Machine) -> None:
    machine.write()
    (machine.bundle / "model.engine").write_text("no engine")
    backend = TensorRtBackend(FLAVOUR)
    with pytest.raises(BackendError, match=r"FakeRT 1\.2\.3 cannot load .*: Magic tag"):
        backend.load(machine.bundle, MANIFEST, LoadOptions())
    assert (machine.cuda.device, machine.cuda.streams) == ({}, 0)


def test_an_engine_of_other_profiles(machine: Machine) -> None:
    with pytest.raises(BackendError, match="has 3 profiles and the manifest names 4: copy"):
        machine.load(num_profiles=3)
    assert machine.cuda.streams == 0


def test_a_bundle_without_its_engine(machine: Machine) -> None:
    with pytest.raises(BackendError, match=r"model\.engine is missing"):
        TensorRtBackend(FLAVOUR).load(machine.bundle, MANIFEST, LoadOptions())


def test_a_gpu_without_kernels_in_the_bundle(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_devices, "compute_capabilities", lambda: ("9.0",))
    with pytest.raises(BackendError, match=r"kernels for compute capability 8\.9 and this GPU has"):
        machine.load()
    assert machine.cuda.streams == 0


def test_memory_that_cannot_be_had_while_loading_leaves_nothing(machine: Machine) -> None:
    machine.cuda.fails["cudaMallocHost"] = CudaError.cudaErrorMemoryAllocation
    with pytest.raises(BackendError, match="cudaMallocHost"):
        machine.load()
    assert (machine.cuda.device, machine.cuda.host, machine.cuda.streams) == ({}, {}, 0)

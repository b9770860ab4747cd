"""`python -m octavo.tools.bench.roofline`: its steps and its arithmetic, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from octavo.backends.base import EngineKind, Executable, StepInputs, StepOutputs
from octavo.backends.manifest import Limits
from octavo.graphs.spec import AttentionSpec, ModelSpec
from octavo.tools.bench import roofline
from octavo.tools.bench.roofline import DeviceLimits, Measured
from octavo.tools.bench.step_costs import Model, Step

LAYER = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, value_head_dim=8, scale=1.0)
LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, block_size=16)
KIND = EngineKind(dtype="bfloat16", kv_cache_dtype="bfloat16", device="cuda")
DECODE = Step("decode", sequences=2, prefix=19, tokens=1)
PREFILL = Step("prefill", sequences=1, prefix=0, tokens=3)


def spec(tied: bool) -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM",
        model_type="llama",
        vocab_size=100,
        hidden_size=32,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        layers=(LAYER, LAYER),
        num_parameters=10_000 + (1 if tied else 2) * 3200,
        sampled_vocab_size=90,
    )


def test_a_step_of_two_sequences() -> None:
    inputs = DECODE.inputs(vocab_size=90, block_size=16)
    assert inputs.positions.tolist() == [19, 19]
    assert inputs.block_tables.tolist() == [[0, 1], [2, 3]]
    assert inputs.slot_mapping.tolist() == [16 + 3, 48 + 3]
    assert inputs.query_start_loc.tolist() == [0, 1, 2]
    assert inputs.prefix_offsets.tolist() == [19, 19]
    assert inputs.logits_indices.tolist() == [0, 1]
    assert inputs.token_ids.shape == (2,)
    assert inputs.token_ids.dtype == np.int32


@pytest.mark.parametrize("tied", [True, False])
def test_what_a_step_reads_and_multiplies(tied: bool) -> None:
    """The input embedding is looked up: only the output embedding is read whole."""
    model = Model.of(spec(tied), "bfloat16")
    cached = 2 * 2 * 2 * 8 * 2  # layers, keys and values, heads, elements, bytes
    assert DECODE.bytes_read(model) == 2 * (10_000 + 3200) + 2 * 20 * cached
    attention = 2 * 4 * (8 + 8)  # layers, heads, elements of a key and of a value
    assert DECODE.flops(model) == 2 * (2 * 13_200 + 2 * 20 * attention)
    assert PREFILL.flops(model) == 2 * (3 * 10_000 + 3200 + (1 + 2 + 3) * attention)


class Fake:
    """Takes its time as the clock below counts it."""

    def __init__(self) -> None:
        self.blocks = 0
        self.steps: list[StepInputs] = []

    def allocate_kv_cache(self, num_blocks: int) -> None:
        self.blocks = num_blocks

    def run(self, inputs: StepInputs) -> StepOutputs:
        self.steps.append(inputs)
        return StepOutputs(np.zeros((len(inputs.logits_indices), 100), np.float32))


def test_shares_of_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds_of(function: Any, runs: int) -> list[float]:
        for _ in range(runs):
            function()
        return [0.5, 0.001, 0.002]

    monkeypatch.setattr(roofline, "seconds_of", seconds_of)
    fake: Any = Fake()
    executable: Executable = fake
    limits = DeviceLimits(bytes_per_second=63.36e6, flops_per_second=1e9)
    found = roofline.measure_step("x", executable, spec(True), LIMITS, KIND, DECODE, limits, 3)
    assert (found.backend, found.step) == ("x", "decode")
    assert (found.milliseconds, found.tokens_per_second) == (2.0, 1000.0)
    # 31,520 bytes and 63,040 floating point operations in 2 ms.
    assert found.bandwidth_share == pytest.approx(31_520 / 2e-3 / 63.36e6)
    assert found.product_share == pytest.approx(63_040 / 2e-3 / 1e9)
    assert fake.blocks == 4
    assert len(fake.steps) == roofline.WARM_UP + 3


def test_the_report() -> None:
    facts = {
        "device": "NVIDIA X",
        "checkpoint": "llama",
        "dtype": "bfloat16",
        "measured": "today",
        "copy_gb_per_second": 4021.7,
        "product_tflops": 789.2,
    }
    text = roofline.markdown(facts, [Measured("inductor", "decode", 1.234, 810.4, 0.62, 0.009)])
    assert "| inductor | decode | 1.23 | 810 | 62% | 1% |" in text
    assert "4022 GB/s" in text
    assert "789 TFLOP/s" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "tpu"], "'tpu' is not one of cpu, cuda"),
        (["--dtype", "int8"], "'int8' is not one of float32, float16, bfloat16"),
        (["--device", "cpu", "--backend", "nope"], "no backend builds and runs such engines"),
        (["--device", "cpu", "--dtype", "float16", "--backend", "onnxruntime"], "no backend"),
    ],
)
def test_what_cannot_be_measured(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(roofline.app, arguments)
    assert result.exit_code != 0
    assert sentence in " ".join(result.stderr.replace("│", " ").split())

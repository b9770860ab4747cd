"""Graph passes never change results: every pass is run on captured models, before and after."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.export import ExportedProgram

from octavo.backends.manifest import Limits
from octavo.compiler.capture import capture
from octavo.compiler.checkpoints import TokenFacts
from octavo.compiler.passes.dead_code import remove_dead_code
from octavo.compiler.passes.flatten_batch import flatten_batch
from octavo.compiler.passes.functionalize import functionalize
from octavo.graphs.program import CapturedProgram
from octavo.graphs.spec import PassRecord
from tests.parity import tiny_models

LIMITS = Limits(max_model_len=128, max_num_seqs=8, max_num_batched_tokens=64, block_size=16)
FACTS = TokenFacts(1, (2,), 0, tiny_models.VOCAB_SIZE)

Pass = Callable[[ExportedProgram], tuple[ExportedProgram, PassRecord]]


def captured(model_type: str) -> CapturedProgram:
    return capture(tiny_models.model(model_type), FACTS, LIMITS, torch.float32)


def step_inputs(exported: ExportedProgram) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A step of sequences of 5 and 9 tokens, the second with 7 cached ones; the caches."""
    generator = torch.Generator().manual_seed(1)
    caches = [
        torch.randn(6, *node.meta["val"].shape[1:], generator=generator)
        for node in exported.graph.nodes
        if node.op == "placeholder" and node.name.startswith("kv_caches")
    ]
    positions = torch.cat([torch.arange(5), torch.arange(7, 16)])
    block = torch.tensor([1] * 5 + [2] * 9)
    indices = (
        torch.randint(0, tiny_models.VOCAB_SIZE, (14,), generator=generator),
        positions,
        block * 16 + positions % 16,
        torch.tensor([[1], [2]]),
        torch.tensor([0, 5, 14]),
        torch.tensor([0, 7]),
        torch.tensor([4, 9, 13]),
    )
    return [x.to(torch.int32) for x in indices], caches


def results(exported: ExportedProgram) -> list[torch.Tensor]:
    """Logits and changed caches of that step."""
    indices, caches = step_inputs(exported)
    with torch.no_grad():
        logits, changed = exported.module()(*indices, caches)
    return [logits, *changed]


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_oss", "deepseek_v3"])
def test_no_pass_changes_results(model_type: str) -> None:
    exported = captured(model_type).exported
    expected = results(exported)
    passes: tuple[Pass, ...] = (functionalize, remove_dead_code, flatten_batch)
    for apply in passes:
        exported, record = apply(exported)
        for value, wanted in zip(results(exported), expected, strict=True):
            torch.testing.assert_close(value, wanted, msg=f"after {record.name}")


def count(exported: ExportedProgram, name: str) -> int:
    return sum(name in str(node.target) for node in exported.graph.nodes)


def test_in_place_operators_become_functional() -> None:
    exported = captured("gpt_oss").exported
    assert count(exported, "add_.Tensor") > 0
    exported, record = functionalize(exported)
    assert count(exported, "add_.Tensor") == 0
    assert record.matches > 0


def test_packed_sequence_detection_is_dead() -> None:
    exported = captured("llama").exported
    assert count(exported, "cumsum") > 0
    exported, record = remove_dead_code(exported)
    assert count(exported, "cumsum") == 0
    assert count(exported, "_assert_tensor_metadata") == 0
    assert record.matches > 0


def test_the_batch_axis_is_gone() -> None:
    exported, _ = remove_dead_code(captured("llama").exported)
    exported, record = flatten_batch(exported)
    assert record.skipped == ()
    linears = [node for node in exported.graph.nodes if str(node.target) == "aten.linear.default"]
    assert len(linears) == 2 * 7 + 1
    assert all(node.meta["val"].dim() == 2 for node in linears)
    assert count(exported, "select.int") == 0

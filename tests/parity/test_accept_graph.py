"""The acceptance graph as both backends compile it, and how exact the operator is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from octavo.backends import registry
from octavo.backends.inductor.executable import CompiledPackage
from octavo.backends.onnxruntime.sessions import open_on_cpu
from octavo.backends.torch import archive
from octavo.graphs.accept import export_accept
from octavo.graphs.ops.accept import SCHEMA
from tests.backend.acceptance_steps import Row, distribution, expected, is_clear, pack
from tests.backend.test_accept import IMPLEMENTATIONS, VOCAB, P, run

SIZE = 50
LENGTHS = [[], [1], [2], [1, 1], [3], [5, 1, 2], [9] * 8]
Q = [0.125, 0.375, 0.3125, 0.0, 0.1875]  # exact in float32: they sum to 1
CERTAIN_ENOUGH = 1 - 2.0**-53  # the largest uniform


def sequences(lengths: list[int], *, has_probs: bool, seed: int) -> list[list[Row]]:
    generator = np.random.default_rng(seed)
    made = []
    for length in lengths:
        rows = []
        for index in range(length):
            is_last = index == length - 1
            probs = None
            if has_probs and not is_last:
                probs = generator.dirichlet(np.ones(SIZE)).tolist()
            rows.append(
                Row(
                    generator.normal(0, 2, SIZE).tolist(),
                    -1 if is_last else int(generator.integers(SIZE)),
                    probs,
                    temperature=float(generator.choice([0.0, 0.7, 1.5])),
                    top_k=int(generator.choice([0, 5, 20])),
                    top_p=float(generator.choice([1.0, 0.8])),
                    uniforms=(0.2 * generator.random(), generator.random()),
                    edits={int(generator.integers(SIZE)): 2.0} if seed % 2 else {},
                )
            )
        made.append(rows)
    return made


def test_every_backend_equals_the_oracle_for_any_number_of_rows(tmp_path: Path) -> None:
    """None and one of rows, edits and probabilities as well: torch.export specialises on those."""
    exported = export_accept(SIZE)
    onnx_file = registry.get("onnxruntime").build_accept(exported, tmp_path)
    torch_file = registry.get("torch").build_accept(exported, tmp_path)
    (tmp_path / "inductor").mkdir()
    inductor_file = registry.get("inductor").build_accept(exported, tmp_path / "inductor")
    assert onnx_file is not None
    assert torch_file is not None
    assert inductor_file is not None
    session: onnxruntime.InferenceSession = open_on_cpu(tmp_path / onnx_file, 1)
    module = archive.load(tmp_path / torch_file)
    package = CompiledPackage(tmp_path / "inductor" / inductor_file, {})
    compared = 0
    for lengths in LENGTHS:
        for seed in range(8):
            batch = sequences(lengths, has_probs=seed % 4 > 1, seed=seed)
            if not is_clear(batch):
                continue
            operands = pack(batch, SIZE)
            for name in ("logits", "draft_probs"):
                operands[name] = np.ascontiguousarray(operands[name][:, :SIZE])
            wanted = expected(batch)
            assert session.run(None, operands)[0].tolist() == wanted
            tensors = [torch.from_numpy(operands[operand.name]) for operand in SCHEMA.inputs]
            assert module(*tensors).tolist() == wanted
            assert package.run(tensors)[0].tolist() == wanted
            compared += 1
    assert compared > 40


def tokens(name: str, rows: list[Row]) -> NDArray[np.int64]:
    """[len(rows), 2]: of each, and of a row after it: -1 if it was no accepted draft."""
    return np.array(run(name, pack([[row, Row(P)] for row in rows], VOCAB))).reshape(-1, 2)


def outcomes(name: str, draft: int, probs: list[float] | None, params: dict[str, Any]) -> Any:
    """f64 [V]: how likely each token is at a row, from where its uniforms change the outcome."""

    def at(accept: float, draw: float) -> Row:
        return Row(P, draft, probs, uniforms=(accept, draw), **params)

    found = np.zeros(VOCAB)
    low, high = 0.0, 1.0
    if tokens(name, [at(0.0, 0.5)])[0, 1] < 0:
        low = high = 0.0
    elif tokens(name, [at(CERTAIN_ENOUGH, 0.5)])[0, 1] >= 0:
        low = high = 1.0
    while high - low > 2.0**-48:
        middle = (low + high) / 2
        is_accepted = tokens(name, [at(middle, 0.5)])[0, 1] >= 0
        low, high = (middle, high) if is_accepted else (low, middle)
    found[draft] = high
    if high == 1.0:
        return found
    lows, highs = np.zeros(VOCAB - 1), np.ones(VOCAB - 1)
    for _ in range(48):
        middles = (lows + highs) / 2
        drawn = tokens(name, [at(CERTAIN_ENOUGH, middle) for middle in middles])[:, 0]
        is_below = drawn <= np.arange(VOCAB - 1)
        lows, highs = np.where(is_below, middles, lows), np.where(is_below, highs, middles)
    return found + (1 - high) * np.diff([0.0, *highs, 1.0])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("is_certain", [True, False])
@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.75}, {"min_p": 0.3}, {"edits": {0: -1.0}}],
)
def test_all_drafts_together_give_the_targets_distribution(
    name: str, is_certain: bool, params: dict[str, Any]
) -> None:
    """Summed over every draft with its probability: no draws, the edges of the uniforms."""
    probs = None if is_certain else Q
    found = sum(q * outcomes(name, draft, probs, params) for draft, q in enumerate(Q) if q)
    # Kernels weigh in float32.
    tolerance = 1e-12 if name in ("torch", "body") else 1e-7
    np.testing.assert_allclose(found, distribution(Row(P, **params)), rtol=0, atol=tolerance)

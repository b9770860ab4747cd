"""Engines with compiled heads: their graphs, what they read of the target, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from octavo.backends import registry
from octavo.backends.base import Float32Array, LoadOptions, StepInputs
from octavo.backends.bundle import read_manifest
from octavo.compiler import BuildConfig, build_engine
from octavo.compiler.config import SpeculativeConfig
from octavo.runtime import LLM, SamplingParams
from octavo.runtime.speculation.drafter import ComputedStep, DraftContext, Proposal
from tests.parity import heads_reference, tiny_models
from tests.unit.drafter_heads_files import (
    Tensors,
    medusa_tensors,
    speculator_config,
    speculator_tensors,
    write,
)

MAX_TOKENS = 16
NUM_HEADS = 3
VOCAB_SIZE, HIDDEN_SIZE = tiny_models.VOCAB_SIZE, 64
GENERATOR = np.random.default_rng(2)
PROMPTS = tuple(GENERATOR.integers(3, VOCAB_SIZE, n).tolist() for n in (1, 45, 9))
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.9, seed=3, ignore_eos=True)


@dataclass(frozen=True)
class Model:
    """A tiny llama with a Medusa checkpoint fitted to its greedy outputs and a random speculator.

    outputs  of PROMPTS, by Hugging Face
    """

    model: Any
    paths: dict[str, Path]  # by "model" and method
    tensors: dict[str, Tensors]  # by method
    outputs: list[list[int]]

    def hidden_states(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """[len(tokens), h], after the final norm."""
        return hidden_states(self.model, tokens)


def hidden_states(model: Any, tokens: Sequence[int]) -> NDArray[np.float64]:
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1]
    result: NDArray[np.float64] = states[0].double().numpy()
    return result


def greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def fitted(model: Any, outputs: Sequence[Sequence[int]]) -> Tensors:
    """Heads that know the outputs by heart: of fewer states than dimensions any map is linear."""
    states, following = [], []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        hidden = hidden_states(model, [*prompt, *output])
        last = len(prompt) + MAX_TOKENS
        for position in range(len(prompt) - 1, last):  # the first output token comes from there
            states.append(hidden[position])
            index = position + 1 - len(prompt)
            following.append(output[index + 1 : index + 1 + NUM_HEADS])
    assert len(states) <= HIDDEN_SIZE
    tensors = medusa_tensors(NUM_HEADS, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE)
    for head in range(NUM_HEADS):
        wanted = np.zeros((len(states), VOCAB_SIZE))
        wanted[np.arange(len(states)), [tokens[head] for tokens in following]] = 1
        read = np.array(states)
        weight, bias = (tensors[f"{head}.0.linear.{part}"] for part in ("weight", "bias"))
        inner = read @ weight.astype(np.float64).T + bias
        read = read + inner / (1 + np.exp(-inner))
        tensors[f"{head}.1.weight"] = np.linalg.lstsq(read, wanted)[0].T.astype(np.float32).copy()
    return tensors


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("heads")
    path, made = tiny_models.checkpoint(folder / "llama", "llama", tie_word_embeddings=False)
    outputs = [greedy(made, prompt, MAX_TOKENS + NUM_HEADS + 1) for prompt in PROMPTS]
    tensors = {
        "medusa": fitted(made, outputs),
        "mlp_speculator": speculator_tensors(
            NUM_HEADS, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE
        ),
    }
    config = {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 1}
    speculator = speculator_config(NUM_HEADS, emb_dim=HIDDEN_SIZE, vocab_size=VOCAB_SIZE)
    paths = {
        "model": path,
        "medusa": write(folder / "m", config, tensors["medusa"], "medusa_lm_head.safetensors"),
        "mlp_speculator": write(folder / "s", speculator, tensors["mlp_speculator"]),
    }
    return Model(made, paths, tensors, [output[:MAX_TOKENS] for output in outputs])


@pytest.fixture(scope="module", params=["inductor", "onnxruntime", "torch"])
def engine(
    model: Model, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    output: Path = tmp_path_factory.mktemp("engines") / request.param
    build_engine(
        BuildConfig(
            model=str(model.paths["model"]),
            output=output,
            backend=request.param,
            max_num_seqs=4,
            max_num_batched_tokens=32,  # the longest prompt is computed in two chunks
            speculative=tuple(
                SpeculativeConfig(
                    method=method, model=str(model.paths[method]), num_speculative_tokens=NUM_HEADS
                )
                for method in ("medusa", "mlp_speculator")
            ),
            use_cache=False,
        )
    )
    return output


def reference(model: Model, method: str, features: Any, token_ids: Any) -> NDArray[np.float64]:
    """[T, NUM_HEADS, V]."""
    hidden = np.asarray(features, dtype=np.float64)
    if method == "medusa":
        return heads_reference.medusa(hidden, model.tensors[method], NUM_HEADS, 1)
    return heads_reference.mlp_speculator(
        hidden, np.asarray(token_ids), model.tensors[method], n_predict=NUM_HEADS
    )


def heads_inputs(token_ids: NDArray[np.int32], features: Float32Array) -> StepInputs:
    unused = np.zeros(len(token_ids), dtype=np.int32)
    return StepInputs(
        token_ids, unused, unused, unused[:, None], np.append(unused, 0), unused, unused, features
    )


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator"])
def test_compiled_heads_equal_their_formulas(engine: Path, model: Model, method: str) -> None:
    folder = engine / "drafter" / method
    manifest = read_manifest(folder)
    assert manifest.spec.drafts_per_row == NUM_HEADS
    assert manifest.spec.feature_size == HIDDEN_SIZE
    assert [record.name for record in manifest.inputs] == ["token_ids", "features"]
    executable = registry.get(manifest.backend).load(folder, manifest, LoadOptions(num_threads=1))
    try:
        for count in (1, 4, 2):
            features = GENERATOR.normal(size=(count, HIDDEN_SIZE)).astype(np.float32)
            token_ids = GENERATOR.integers(VOCAB_SIZE, size=count).astype(np.int32)
            logits = executable.run(heads_inputs(token_ids, features)).logits
            expected = reference(model, method, features, token_ids)
            assert logits.shape == (count * NUM_HEADS, VOCAB_SIZE)
            np.testing.assert_allclose(
                logits.reshape(expected.shape), expected, rtol=2e-4, atol=2e-4
            )
    finally:
        executable.close()


def generate(llm: LLM, params: Sequence[SamplingParams]) -> list[list[int]]:
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, list(params))
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_heads_that_know_the_outputs_are_always_accepted(engine: Path, model: Model) -> None:
    """Every draft comes from the hidden state of the right token, whatever was accepted before."""
    with LLM(engine, speculative={"method": "medusa", "adaptive": False}, num_threads=1) as llm:
        assert generate(llm, [GREEDY] * 3) == model.outputs
        assert llm.engine.speculator is not None
        counts = llm.engine.speculator.counts
        # 16 tokens: one from the prompt, then four a step, and the last three from two drafts.
        assert counts.accepted_per_position == [12, 12, 9]
        assert counts.num_draft_tokens == counts.num_accepted_tokens == 33
        assert counts.num_failures == 0


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator"])
def test_drafts_are_those_of_the_targets_hidden_states(
    engine: Path, model: Model, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random sampling and greedy requests in one batch, with and without: the same tokens."""
    params = [GREEDY, SAMPLED, SAMPLED]
    with LLM(engine, speculative=False, num_threads=1) as llm:
        plain = generate(llm, params)
    seen: list[tuple[list[int], int, list[int]]] = []
    with LLM(engine, speculative={"method": method, "adaptive": False}, num_threads=1) as llm:
        assert llm.engine.speculator is not None
        (drafter,) = llm.engine.speculator._drafters
        propose = drafter.propose

        def recorded(step: ComputedStep, contexts: Sequence[DraftContext]) -> list[Proposal]:
            found = propose(step, contexts)
            for (request, most), proposal in zip(contexts, found, strict=True):
                if method != "medusa" or request.params.greedy:  # else drafts are sampled too
                    tokens = request.tokens(0, request.num_tokens).tolist()
                    seen.append((tokens, most, list(proposal.token_ids)))
            return found

        monkeypatch.setattr(drafter, "propose", recorded)
        assert generate(llm, params) == plain
    assert len(seen) >= (10 if method == "mlp_speculator" else 4)
    for tokens, most, drafts in seen:
        feature = model.hidden_states(tokens[:-1])[-1:]
        expected = reference(model, method, feature, tokens[-1:])[0].argmax(axis=-1)
        assert drafts == expected[:most].tolist()

"""Training an EAGLE-3 drafter: what it computes, that it learns, and that the engine takes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from typer.testing import CliRunner

from octavo.compiler import BuildConfig, build_engine
from octavo.compiler.config import SpeculativeConfig
from octavo.compiler.training.eagle3_folder import Eagle3Student, draft_vocabulary
from octavo.compiler.training.eagle3_trainer import Eagle3Trainer, Evaluation, TrainingOptions
from octavo.compiler.training.unrolled import chain_hidden_states, visible
from octavo.graphs.errors import BuildError
from octavo.runtime import LLM, SamplingParams
from octavo.tools.main import app
from tests.parity import feature_drafters as made
from tests.parity import tiny_models

OPTIONS = TrainingOptions(
    draft_vocab_size=128,
    batch_tokens=256,
    max_steps=60,
    evaluate_every=20,
    held_out=0.25,
    learning_rate=3e-3,
    deep_from=0.3,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("target") / "llama"
    return tiny_models.checkpoint(folder, "llama", num_hidden_layers=6)


@pytest.fixture(scope="module")
def sequences(checkpoint: tuple[Path, PreTrainedModel]) -> list[list[int]]:
    """What the model says after a few beginnings; small models soon go in circles."""
    _, model = checkpoint
    prompts = torch.arange(3, 27).view(12, 2)
    generate: Any = model.generate
    tokens = generate(prompts, do_sample=False, max_new_tokens=40, eos_token_id=None)
    return [list(map(int, row)) for row in tokens]


def test_a_chain_sees_what_it_will_see_in_the_cache() -> None:
    """The third entry at position 4: first entries up to 2, then the chain's own at 3 and 4."""
    assert visible(5, 0)[3].tolist() == [True, True, True, True, False]
    third = visible(5, 2)[4].tolist()
    assert third == [
        *[True, True, True, False, False],  # first entries, with the target's features
        *[False, False, False, True, False],  # second entries
        *[False, False, False, False, True],  # third entries: its own
    ]


def test_unrolled_chains_equal_the_drafter_run_step_by_step(
    checkpoint: tuple[Path, PreTrainedModel],
) -> None:
    _, model = checkpoint
    student = Eagle3Student(model, torch.arange(64), torch.ones(3 * made.HIDDEN))
    generator = torch.Generator().manual_seed(0)
    for parameter in student.drafter.midlayer.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    token_ids = torch.randint(0, tiny_models.VOCAB_SIZE, (1, 9), generator=generator)
    features = torch.randn(1, 9, student.drafter.hidden_size, generator=generator)
    with torch.no_grad():
        states = chain_hidden_states(student.drafter, token_ids, features, depth=3)
        config: Any = student.drafter.config
        config._attn_implementation = "sdpa"
        for last in (2, 5):  # the chain begins behind this position
            given = features[0, : last + 1]
            for entry in range(3):
                end = last + entry
                _, hidden = student.drafter(
                    token_ids[0, 1 : end + 2],
                    torch.arange(end + 1),
                    given,
                    torch.tensor([end]),
                )
                torch.testing.assert_close(states[entry][0, end], hidden[0], rtol=1e-4, atol=1e-5)
                given = torch.cat([given, hidden])


def trained(
    model: PreTrainedModel, sequences: list[list[int]], folder: Path, steps: int, **more: Any
) -> tuple[Eagle3Trainer, list[float], Evaluation]:
    losses: list[float] = []
    options = replace(OPTIONS, max_steps=steps)
    trainer = Eagle3Trainer(model, sequences, folder, options, **more)
    evaluation = trainer.run(lambda progress: losses.append(progress.loss))
    return trainer, losses, evaluation


def test_it_learns_what_its_target_says_and_the_engine_takes_it(
    checkpoint: tuple[Path, PreTrainedModel], sequences: list[list[int]], tmp_path: Path
) -> None:
    path, model = checkpoint
    untrained = Eagle3Trainer(model, sequences, tmp_path / "new", OPTIONS).evaluate()
    # Held out and trained on are alike here: circles that the model falls into.
    _, losses, evaluation = trained(model, sequences * 2, tmp_path / "head", 60)
    assert len(losses) == 60
    assert evaluation.tokens_per_step > untrained.tokens_per_step + 0.5
    assert list(evaluation.acceptance) == sorted(evaluation.acceptance, reverse=True)

    drafter = SpeculativeConfig(
        method="eagle3", model=str(tmp_path / "head"), num_speculative_tokens=3
    )
    config = BuildConfig(
        model=str(path), output=tmp_path / "engine", use_cache=False, speculative=(drafter,)
    )
    build_engine(config)
    prompts = [{"prompt_token_ids": one[:6]} for one in sequences]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    found = []
    for speculative in (False, {"adaptive": False}):
        with LLM(tmp_path / "engine", speculative=speculative) as llm:
            found.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
            metrics = llm.metrics()
    assert found[0] == found[1]
    accepted = metrics["spec_decode_num_accepted_tokens"] / metrics["spec_decode_num_drafts"]
    assert accepted > 0.5 * sum(evaluation.acceptance)


def test_a_resumed_training_comes_to_the_same_weights(
    checkpoint: tuple[Path, PreTrainedModel], sequences: list[list[int]], tmp_path: Path
) -> None:
    _, model = checkpoint
    whole, _, _ = trained(model, sequences, tmp_path / "whole", 8)
    options = replace(OPTIONS, max_steps=8)
    first = Eagle3Trainer(model, sequences, tmp_path / "parts", options)

    class Interrupted(Exception):  # noqa: N818
        pass

    def interrupt(progress: Any) -> None:
        if progress.step == 5:
            raise Interrupted

    with pytest.raises(Interrupted):
        first.run(interrupt)
    second = Eagle3Trainer(model, sequences, tmp_path / "parts", options, resume=True)
    second.run(lambda progress: None)
    for name, weight in whole.student.state_dict().items():
        assert torch.equal(weight, second.student.state_dict()[name]), name
    files = {path.name for path in (tmp_path / "parts").iterdir()}
    assert files == {"config.json", "model.safetensors", "training-state.pt"}


def test_a_training_is_not_resumed_with_another_draft_vocabulary(
    checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    """The rows of its output embedding would stand for other tokens, and nothing would say so."""
    _, model = checkpoint
    options = replace(OPTIONS, draft_vocab_size=4)
    Eagle3Trainer(model, [[1, 2, 3, 4] * 3] * 4, tmp_path, options).save()
    message = "drafts other tokens than these texts and --draft-vocab-size give"
    with pytest.raises(BuildError, match=message):
        Eagle3Trainer(model, [[5, 6, 7, 8] * 3] * 4, tmp_path, options, resume=True)
    with pytest.raises(BuildError, match=message):
        Eagle3Trainer(model, [[1, 2, 3, 4] * 3] * 4, tmp_path, OPTIONS, resume=True)


def test_the_draft_vocabulary_is_the_most_frequent_tokens() -> None:
    assert draft_vocabulary([[5, 5, 2], [2, 9, 5]], 2, 12).tolist() == [2, 5]
    assert draft_vocabulary([[1]], 99, 4).tolist() == [0, 1, 2, 3]


def test_too_little_text_and_too_few_layers_are_refused(
    checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    _, model = checkpoint
    with pytest.raises(BuildError, match="1 texts are longer than 5 tokens, at least 2"):
        Eagle3Trainer(model, [[1] * 9, [1, 2]], tmp_path, OPTIONS)
    with pytest.raises(BuildError, match=r"holds no training-state\.pt to resume from"):
        Eagle3Trainer(model, [[1] * 9] * 2, tmp_path / "none", OPTIONS, resume=True)
    _, shallow = tiny_models.checkpoint(tmp_path / "shallow", "llama", num_hidden_layers=2)
    with pytest.raises(BuildError, match="has 2 layers and EAGLE-3 reads three of them"):
        Eagle3Trainer(shallow, [[1] * 9] * 2, tmp_path, OPTIONS)


def train(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["train-drafter", "--model", "m", *arguments])
    return result.exit_code, result.stderr


def test_the_command_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    text = tmp_path / "prompts.txt"
    text.write_text("\n\n")
    output = tmp_path / "out"
    assert train("--text", str(text), "--output", str(output)) == (
        1,
        f"error: {text} holds no prompts: give one a line\n",
    )
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    assert train("--text", str(lines), "--output", str(output)) == (
        1,
        f'error: {lines} line 2 has neither "prompt" nor "messages"\n',
    )
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    code, message = train("--text", str(text), "--output", str(tmp_path / "full"))
    assert code == 1
    assert "is not empty: give --resume to go on, or another output" in message


def test_the_command_trains_on_answers_and_keeps_them(
    checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    """A model without a tokenizer reads no prompts: its answers are in the folder already."""
    path, _ = checkpoint
    output = tmp_path / "out"
    output.mkdir()
    known = [[i, i + 1, i + 2, i + 3, i, i + 1, i + 2] for i in range(20)]
    lines = "".join(json.dumps(one) + "\n" for one in known)
    (output / "sequences.jsonl").write_text(lines + "[7, 8, ")  # it was killed while it wrote
    text = tmp_path / "prompts.txt"
    text.write_text("a prompt\n" * 20)
    arguments = ["train-drafter", "--model", str(path), "--text", str(text), "--resume"]
    arguments += ["--output", str(output), "--max-minutes", "0.01", "--draft-vocab-size", "64"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    assert "tokens a step on held-out texts" in result.stdout
    assert (output / "model.safetensors").is_file()
    assert (output / "sequences.jsonl").read_text() == lines

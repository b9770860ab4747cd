"""`octavo train-drafter`: an EAGLE-3 drafter for a model, trained on what the model says itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.graphs.errors import BuildError, RequestError
from octavo.tools import console

if TYPE_CHECKING:
    from octavo.compiler.training.eagle3_trainer import Progress
    from octavo.runtime import LLM
    from octavo.runtime.prompts import Prompt

SEQUENCES = "sequences.jsonl"
_BATCH = 64  # prompts that are answered before they are written down


@console.reports_errors
def train_drafter(
    model: Annotated[str, typer.Option(help="The checkpoint whose tokens are to be drafted.")],
    output: Annotated[Path, typer.Option(help="Folder of the drafter's checkpoint.")],
    text: Annotated[
        list[Path],
        typer.Option(
            exists=True,
            dir_okay=False,
            help='Prompts: a .txt file, one a line, or .jsonl with "prompt" or "messages".',
        ),
    ],
    engine: Annotated[
        str | None, typer.Option(help="Engine that answers them.  [default: built from the model]")
    ] = None,
    max_minutes: Annotated[
        float, typer.Option(min=0.01, help="Of training, answers not included.")
    ] = 30.0,
    max_prompts: Annotated[int | None, typer.Option(min=2, help="Use this many at most.")] = None,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens of an answer at most.")] = 160,
    draft_vocab_size: Annotated[
        int, typer.Option(min=16, help="Most frequent tokens that may be drafted.")
    ] = 4096,
    learning_rate: Annotated[float, typer.Option(min=1e-6, help="Its largest value.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Makes a training repeatable.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where an interrupted training ended.")
    ] = False,
) -> None:
    """Train a drafter on the model's own answers; Ctrl-C keeps what was learnt."""
    if output.exists() and any(output.iterdir()) and not resume:
        raise BuildError(f"{output} is not empty: give --resume to go on, or another output")
    prompts = list(_prompts(text))[:max_prompts]
    output.mkdir(parents=True, exist_ok=True)
    sequences = _answers(engine or model, prompts, output / SEQUENCES, max_tokens, seed)

    import torch

    from octavo.compiler.checkpoints import open_checkpoint
    from octavo.compiler.training.eagle3_trainer import STATE, Eagle3Trainer, TrainingOptions

    options = TrainingOptions(
        draft_vocab_size=draft_vocab_size,
        learning_rate=learning_rate,
        max_seconds=60 * max_minutes,
        seed=seed,
    )
    target = open_checkpoint(model).load_model(torch.float32)
    # It may have been interrupted while the prompts were answered.
    has_begun = resume and (output / STATE).exists()
    trainer = Eagle3Trainer(target, sequences, output, options, resume=has_begun)
    with TrainingProgress() as progress:
        try:
            trainer.run(progress.report)
        except KeyboardInterrupt:
            typer.echo("interrupted: what was learnt is kept, --resume goes on", err=True)
        evaluation = trainer.evaluate()
    accepted = ", ".join(f"{share:.2f}" for share in evaluation.acceptance)
    typer.echo(
        f"{output}: {evaluation.tokens_per_step:.2f} tokens a step on held-out texts, drafts "
        f"accepted {accepted}\nbuild-engine --speculative method=eagle3,model={output},"
        f"num_speculative_tokens={len(evaluation.acceptance)}"
    )


def _prompts(files: list[Path]) -> Iterator[str | list[dict[str, Any]]]:
    """Texts, or lists of messages; BuildError for a line that is neither."""
    found = False
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            found = True
            yield _parsed(file, number, line) if file.suffix == ".jsonl" else line.strip()
    if not found:
        raise BuildError(f"{files[0]} holds no prompts: give one a line")


def _parsed(file: Path, number: int, line: str) -> str | list[dict[str, Any]]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BuildError(f"{file} line {number} is no JSON ({error})") from None
    prompt = value.get("messages", value.get("prompt")) if isinstance(value, dict) else None
    if not isinstance(prompt, str | list):
        raise BuildError(f'{file} line {number} has neither "prompt" nor "messages"')
    return prompt


def _answers(
    engine: str,
    prompts: list[str | list[dict[str, Any]]],
    path: Path,
    max_tokens: int,
    seed: int,
) -> list[list[int]]:
    """Prompts with the model's answers, as token ids; those already in the file are kept."""
    sequences = _known_answers(path)
    if len(sequences) >= len(prompts):
        return sequences

    from octavo.runtime import LLM, SamplingParams

    with LLM(engine, speculative=False) as llm, path.open("a", encoding="utf-8") as file:
        encoded = [_encoded(llm, prompt) for prompt in prompts]
        for start in range(len(sequences), len(prompts), _BATCH):
            batch = encoded[start : start + _BATCH]
            # Every other answer is sampled: a drafter also meets texts off the likeliest path.
            params = [
                SamplingParams(
                    temperature=0.7 if index % 2 else 0.0,
                    max_tokens=max_tokens,
                    seed=seed + index,
                    detokenize=False,
                )
                for index in range(start, start + len(batch))
            ]
            for output in llm.generate(batch, params):
                sequence = [*output.prompt_token_ids, *output.outputs[0].token_ids]
                sequences.append(sequence)
                file.write(json.dumps(sequence) + "\n")
            file.flush()
            typer.echo(f"answered {len(sequences)} of {len(prompts)} prompts", err=True)
    return sequences


def _known_answers(path: Path) -> list[list[int]]:
    """Those of an interrupted command; half a line at the end is taken away."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith("\n"):
        del lines[-1]
        path.write_text("".join(lines), encoding="utf-8")
    return [json.loads(line) for line in lines]


def _encoded(llm: LLM, prompt: str | list[dict[str, Any]]) -> Prompt:
    """Through the chat template if the model has one."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        return llm.chat_prompt(messages)
    except RequestError:
        if isinstance(prompt, str):
            return prompt
        raise


class TrainingProgress:
    """A bar on stderr while that is a terminal, and a line for each evaluation."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        terminal = Console(stderr=True, highlight=False, markup=False)
        self._terminal = terminal
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=40),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(),
            console=terminal,
            disable=not terminal.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("", total=1.0)

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def report(self, progress: Progress) -> None:
        self._bar.update(self._task, completed=progress.share)
        if progress.evaluation is not None:
            self._terminal.print(
                f"step {progress.step}, {progress.share:.0%}: loss {progress.loss:.3f}, "
                f"{progress.evaluation.tokens_per_step:.2f} tokens a step on held-out texts"
            )

"""Measures engines in alternation: each loaded in its own process, all but one of them stopped."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer

from octavo.graphs.errors import OctavoError
from octavo.tools.bench.peers import quality
from octavo.tools.bench.peers import scenario as scenarios
from octavo.tools.bench.peers.catalog import OCTAVO, PEERS, Engine, Model
from octavo.tools.bench.peers.process import DriverProcess, PeerError
from octavo.tools.bench.peers.results import Measurement, Quality, Results
from octavo.tools.bench.peers.scenario import Scenario

FIRST_TOKEN_ID = 100  # below it lie tokens with a meaning of their own
WAKE = (16, 4)  # tokens of prompt and output of the run that wakes an engine up


@dataclass(frozen=True)
class Workspace:
    """Where things lie; everything below `root` can be made again."""

    root: Path
    num_threads: int
    run: str

    @property
    def results(self) -> Path:
        return self.root / "results.json"

    def environment(self, peer: str) -> Path:
        return self.root / peer

    def checkpoint(self, model: Model) -> Path:
        return self.root / "models" / model.name

    def artefact(self, model: Model, engine: Engine) -> Path:
        name = engine.name + (".gguf" if engine.peer == "llamacpp" else "")
        return self.root / "artefacts" / model.name / name

    def claim(self) -> None:
        """Keeps other runs out until this process ends; OctavoError if one is in."""
        self.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.root / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise OctavoError(
                f"another run measures in {self.root}: wait for it, or give another --root"
            ) from None

    def process(self, peer: str, name: str) -> DriverProcess:
        log = self.root / "logs" / f"{name}.log"
        return DriverProcess(PEERS[peer], self.environment(peer), self.num_threads, log)


def prompts(seed: str, model: Model, num_seqs: int, length: int) -> list[list[int]]:
    """Random token ids, the same for every engine and never the same in two runs."""
    generator = random.Random(seed)
    low, high = FIRST_TOKEN_ID, model.vocab_size
    return [[generator.randrange(low, high) for _ in range(length)] for _ in range(num_seqs)]


def prepare(workspace: Workspace, model: Model, engine: Engine, *, reuse_octavo: bool) -> None:
    """Converts the checkpoint unless that was done; Octavo's engines are built by today's code."""
    artefact = workspace.artefact(model, engine)
    stale = engine.peer == OCTAVO and not reuse_octavo
    if artefact.exists() and not stale:
        return
    artefact.parent.mkdir(parents=True, exist_ok=True)
    partial = artefact.with_name("partial-" + artefact.name)
    _remove(partial)
    with workspace.process(engine.peer, f"prepare-{engine.name}") as process:
        checkpoint = str(workspace.checkpoint(model))
        arguments = {"model": checkpoint, "output": str(partial), "options": engine.options}
        process.request("prepare", timeout=3600, **arguments)
    _remove(artefact)
    partial.rename(artefact)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Field:
    """The loaded engines of one model; a context manager that ends their processes."""

    def __init__(self, workspace: Workspace, model: Model, results: Results) -> None:
        self._workspace = workspace
        self._model = model
        self._results = results
        self._stack = ExitStack()
        self._loaded: dict[str, DriverProcess] = {}

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def load(self, engine: Engine) -> None:
        """Starts a process for the engine and leaves it stopped."""
        artefact = self._workspace.artefact(self._model, engine)
        name = f"{self._model.name}-{engine.name}"
        process = self._workspace.process(engine.peer, name)
        try:
            process.request(
                "load",
                artefact=str(artefact),
                num_threads=self._workspace.num_threads,
                options=engine.options,
            )
        except PeerError:
            process.close()
            raise
        process.pause()
        self._stack.callback(process.close)
        self._loaded[engine.name] = process

    def measure(self, scenario: Scenario, rounds: int) -> None:
        """Every engine runs the scenario once unmeasured, then once a round."""
        values: dict[str, list[float]] = {name: [] for name in self._loaded}
        for number in range(rounds + 1):
            for name in list(self._loaded):
                try:
                    seconds = self._run(name, scenario, number)
                except PeerError as error:
                    self._give_up(name, error)
                    continue
                if number:
                    values[name].append(scenarios.value(scenario, seconds))
                    _say(f"  round {number}: {name} {values[name][-1]:.1f}")
        for name in self._loaded:
            self._add(name, scenario, values[name])

    def score(self, token_ids: list[int]) -> None:
        """Perplexity of each engine, and its agreement with transformers in float32."""
        reference = self._reference(token_ids)
        for name in list(self._loaded):
            try:
                with self._awake(name) as process:
                    answer = process.request("score", token_ids=token_ids)
            except PeerError as error:
                _say(f"  {name}: {error}")
                continue
            self._add_quality(name, answer["log_probabilities"], answer["best"], reference)

    def _reference(self, token_ids: list[int]) -> list[int]:
        with self._workspace.process("reference", "reference") as process:
            checkpoint = str(self._workspace.checkpoint(self._model))
            threads = self._workspace.num_threads
            process.request("load", artefact=checkpoint, num_threads=threads, options={})
            answer = process.request("score", token_ids=token_ids)
        best: list[int] = answer["best"]
        self._add_quality("reference", answer["log_probabilities"], best, best)
        return best

    def _add_quality(
        self, name: str, log_probabilities: list[float], best: list[int], reference: list[int]
    ) -> None:
        measured = Quality(
            model=self._model.name,
            engine=name,
            run=self._workspace.run,
            num_predictions=len(best),
            perplexity=quality.perplexity(log_probabilities),
            agreement=quality.agreement(best, reference),
        )
        _say(f"  {name}: perplexity {measured.perplexity:.3f}, agreement {measured.agreement:.1%}")
        self._results.add_quality(measured)
        self._results.write(self._workspace.results)

    def _run(self, name: str, scenario: Scenario, number: int) -> float:
        num_seqs, prompt_tokens, output_tokens = scenarios.sizes(scenario)
        seed = f"{self._workspace.run} {scenario.name} {number}"
        ids = prompts(seed, self._model, num_seqs, prompt_tokens)
        wake = prompts(seed + " wake", self._model, 1, WAKE[0])
        with self._awake(name) as process:
            process.request("generate", prompts=wake, max_tokens=WAKE[1])
            answer = process.request("generate", prompts=ids, max_tokens=output_tokens)
        lengths = [len(row) for row in answer["token_ids"]]
        if lengths != [output_tokens] * num_seqs:
            raise PeerError(
                f"{name} generated {lengths} tokens in {scenario.name}, not {output_tokens} each"
            )
        seconds: float = answer["seconds"]
        return seconds

    @contextmanager
    def _awake(self, name: str) -> Iterator[DriverProcess]:
        process = self._loaded[name]
        process.resume()
        try:
            yield process
        finally:
            process.pause()

    def _give_up(self, name: str, error: PeerError) -> None:
        _say(f"  {name}: {error}")
        self._results.unavailable[f"{self._model.name}/{name}"] = str(error)
        self._loaded.pop(name).close()

    def _add(self, name: str, scenario: Scenario, values: list[float]) -> None:
        measured = Measurement(
            model=self._model.name,
            engine=name,
            scenario=scenario.name,
            run=self._workspace.run,
            threads=self._workspace.num_threads,
            values=tuple(values),
        )
        self._results.add(measured)
        self._results.write(self._workspace.results)


def _say(message: str) -> None:
    typer.echo(message, err=True)

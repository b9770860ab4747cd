"""The training loop: hidden states of the target, chains of the drafter, a loss for each entry."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from octavo.compiler.training.eagle3_folder import (
    Eagle3Student,
    draft_vocabulary,
    fused_layers,
)
from octavo.compiler.training.target_states import TargetStates, padded
from octavo.compiler.training.unrolled import chain_hidden_states
from octavo.graphs.errors import BuildError

STATE = "training-state.pt"
_ENTRY_DECAY = 0.8  # a later draft is verified less often
_CLIP = 1.0


@dataclass(frozen=True)
class TrainingOptions:
    """max_seconds and max_steps end the training, whichever comes first.

    deep_from  share of the training after which chains have all their entries: first entries are
               made oftenest, learn fastest alone, and the others build on them
    """

    draft_vocab_size: int = 4096
    depth: int = 3  # entries of a chain
    deep_from: float = 0.5
    max_length: int = 256  # tokens of a sequence; longer ones are cut
    batch_tokens: int = 768
    learning_rate: float = 1e-3
    warmup: float = 0.05  # share of the training
    max_seconds: float = 1800.0
    max_steps: int | None = None
    evaluate_every: int = 100  # steps
    held_out: float = 0.05  # share of the sequences
    cache_bytes: int = 4 << 30  # of the target's hidden states
    seed: int = 0


@dataclass(frozen=True)
class Evaluation:
    """On sequences that were not trained on, if the drafts of every position were verified.

    acceptance  [depth]: how often all drafts up to this one are the target's tokens
    """

    acceptance: tuple[float, ...]

    @property
    def tokens_per_step(self) -> float:
        return 1.0 + sum(self.acceptance)


@dataclass(frozen=True)
class Progress:
    step: int
    share: float  # of the training that is done
    loss: float
    evaluation: Evaluation | None


Sequences = Sequence[Sequence[int]]


class Eagle3Trainer:
    """Trains a drafter for `model` on token sequences that it has made itself.

    Every checkpoint in `folder` is whole. With `resume` the training goes on from the last one, and
    comes to the same weights as one that was never interrupted, if steps and not time end it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sequences: Sequences,
        folder: Path,
        options: TrainingOptions,
        *,
        resume: bool = False,
    ) -> None:
        self._options = options
        self._folder = folder
        kept = [
            list(one)[: options.max_length] for one in sequences if len(one) > options.depth + 2
        ]
        num_held = max(1, int(len(kept) * options.held_out))
        if len(kept) < 2:
            raise BuildError(
                f"{len(kept)} texts are longer than {options.depth + 2} tokens, at least 2 are "
                "needed to train on one and evaluate on the other: give more text"
            )
        self._sequences = kept
        self._held_out, self._trained_on = range(num_held), range(num_held, len(kept))
        target: Any = model.requires_grad_(False)
        vocab_size = int(target.config.get_text_config().vocab_size)
        torch.manual_seed(options.seed)
        self._epochs: dict[int, list[list[int]]] = {}
        token_ids = draft_vocabulary(kept[num_held:], options.draft_vocab_size, vocab_size)
        self._held_out_batches = self._cut(list(self._held_out))
        groups = [*self._held_out_batches, *self._epoch(0)]
        layers = fused_layers(model)
        self._states = TargetStates(model, layers, kept, groups, options.cache_bytes)
        self.student = Eagle3Student(model, token_ids, self._sizes(groups[-1]))
        self._columns = self.student.columns(vocab_size)
        self._head = target.get_output_embeddings().weight[token_ids]
        self._optimizer = torch.optim.AdamW(
            self.student.trained(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._step = 0
        self._seconds = 0.0
        folder.mkdir(parents=True, exist_ok=True)
        if resume:
            self._resume()

    @property
    def share(self) -> float:
        """How much of the training is done."""
        steps = self._options.max_steps
        by_steps = 0.0 if steps is None else self._step / max(steps, 1)
        return max(by_steps, self._seconds / self._options.max_seconds)

    def run(self, report: Callable[[Progress], None]) -> Evaluation:
        """Trains to the end; the last weights are in the folder, whatever ends it."""
        try:
            while self.share < 1.0:
                started = time.monotonic()
                loss = self._train_step()
                evaluation = None
                if self._step % self._options.evaluate_every == 0:
                    self.save()
                    evaluation = self.evaluate()
                self._seconds += time.monotonic() - started
                report(Progress(self._step, min(self.share, 1.0), loss, evaluation))
        finally:
            self.save()
        return self.evaluate()

    def save(self) -> None:
        """Writes the drafter, then what a resumed training needs."""
        self.student.save(self._folder)
        partial = self._folder / f".{STATE}.partial"
        state = {
            "step": self._step,
            "seconds": self._seconds,
            "student": self.student.state(),
            "optimizer": self._optimizer.state_dict(),
        }
        torch.save(state, partial)
        partial.replace(self._folder / STATE)

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        depth = self._options.depth
        hits, count = torch.zeros(depth), 0
        for batch in self._held_out_batches:
            token_ids, lengths, states, _ = self._forward(batch, depth)
            good = torch.ones_like(token_ids, dtype=torch.bool)
            rows = _has_label(lengths, token_ids.shape[1], 2 + depth - 1)
            for entry, hidden in enumerate(states):
                # The chain that began behind position b has its entry at b + entry.
                logits = self.student.drafter.lm_head(self.student.drafter.norm(hidden))
                drafts = self.student.get_buffer("token_ids")[logits.argmax(-1)]
                right = drafts[:, :-2] == token_ids[:, 2:]
                right = functional.pad(right, (0, 2))[:, entry:]
                good = good & functional.pad(right, (0, entry))
                hits[entry] += float((good & rows).sum())
            count += int(rows.sum())
        return Evaluation(tuple((hits / max(count, 1)).tolist()))

    def _train_step(self) -> float:
        depth = self._options.depth if self.share >= self._options.deep_from else 1
        token_ids, lengths, states, last = self._forward(self._batch(self._step), depth)
        loss = self._loss(token_ids, lengths, states, last)
        for group in self._optimizer.param_groups:
            group["lr"] = self._options.learning_rate * self._schedule()
        self._optimizer.zero_grad()
        cast(Any, loss).backward()
        torch.nn.utils.clip_grad_norm_(self.student.trained(), _CLIP)
        self._optimizer.step()
        self._step += 1
        return float(loss.detach())

    def _sizes(self, batch: Sequence[int]) -> Tensor:
        """f32 [layers * h]: root mean squares of the target's states, without the first tokens'."""
        lengths = [len(self._sequences[index]) for index in batch]
        hidden, _ = self._states.of(batch)
        rows = [row[1:length] for row, length in zip(hidden, lengths, strict=True)]
        return torch.cat(rows).square().mean(0).sqrt()

    def _schedule(self) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        share, warmup = self.share, self._options.warmup
        if share < warmup:
            return (share + 1e-3) / warmup
        angle = torch.tensor((share - warmup) / (1 - warmup) * torch.pi)
        return float(0.55 + 0.45 * torch.cos(angle))

    def _forward(
        self, batch: Sequence[int], depth: int
    ) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
        """token_ids i64 [B, T], lengths i64 [B], the states of `depth` entries, [B, T, h] each, and
        the target's last hidden states [B, T, h]."""
        token_ids, lengths = padded([self._sequences[index] for index in batch])
        hidden, last = self._states.of(batch)
        features = self.student.fused(hidden)
        states = chain_hidden_states(self.student.drafter, token_ids, features, depth)
        return token_ids, lengths, states, last

    def _loss(
        self, token_ids: Tensor, lengths: Tensor, states: list[Tensor], last: Tensor
    ) -> Tensor:
        """Cross entropy with the target's distribution over the draft vocabulary, where its own
        token lies in it."""
        with torch.no_grad():
            target = functional.pad(last[:, 1:], (0, 0, 0, 1)) @ self._head.T
            target = target.softmax(-1)
        labels = functional.pad(self._columns[token_ids][:, 2:], (0, 2), value=-1)
        total = torch.zeros(())
        for entry, hidden in enumerate(states):
            rows = _has_label(lengths, token_ids.shape[1], 2) & (labels >= 0)
            # A sequence's first token is where attention goes to rest: its states are huge.
            rows[:, : entry + 1] = False
            logits = self.student.drafter.lm_head(self.student.drafter.norm(hidden[rows]))
            cross = -(target[rows] * logits.log_softmax(-1)).sum(-1)
            total = total + _ENTRY_DECAY**entry * cross.mean()
        return total

    def _batch(self, step: int) -> list[int]:
        """Batch number `step` of a shuffling that depends on the seed and the epoch alone."""
        epoch, left = 0, step
        while left >= len(batches := self._epoch(epoch)):
            left -= len(batches)
            epoch += 1
        return batches[left]

    def _epoch(self, epoch: int) -> list[list[int]]:
        if epoch not in self._epochs:
            generator = torch.Generator().manual_seed(self._options.seed + epoch)
            order = torch.randperm(len(self._trained_on), generator=generator).tolist()
            self._epochs[epoch] = self._cut([self._trained_on[place] for place in order])
        return self._epochs[epoch]

    def _cut(self, order: Sequence[int]) -> list[list[int]]:
        """Neighbours together, as many as fit into a batch when padded."""
        batches: list[list[int]] = [[]]
        longest = 0
        for index in order:
            length = len(self._sequences[index])
            longest = max(longest, length)
            if batches[-1] and longest * (len(batches[-1]) + 1) > self._options.batch_tokens:
                batches.append([])
                longest = length
            batches[-1].append(index)
        return batches

    def _resume(self) -> None:
        path = self._folder / STATE
        if not path.is_file():
            raise BuildError(
                f"{self._folder} holds no {STATE} to resume from: leave --resume out to begin anew"
            )
        state = torch.load(path, weights_only=True)
        self.student.resume(state["student"], self._folder)
        self._optimizer.load_state_dict(state["optimizer"])
        self._step, self._seconds = int(state["step"]), float(state["seconds"])


def _has_label(lengths: Tensor, width: int, ahead: int) -> Tensor:
    """bool [B, T]: whether the token `ahead` places after a position is the sequence's own."""
    return torch.arange(width)[None] + ahead < lengths[:, None]

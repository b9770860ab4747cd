"""A captured model: the exported graph and what later stages must know of it. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from torch.export import ExportedProgram

from octavo.graphs.spec import ModelSpec, PassRecord


@dataclass(frozen=True)
class CapturedProgram:
    """`exported` takes the step inputs in the order of `bindings.STEP_INPUTS`, then the list of
    caches, and returns (logits, list of changed caches)."""

    exported: ExportedProgram
    spec: ModelSpec
    block_size: int
    records: tuple[PassRecord, ...] = ()

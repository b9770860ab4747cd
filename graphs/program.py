"""A captured model: the exported graph and what later stages must know of it. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from torch.export import ExportedProgram

from octavo.graphs.bindings import STEP_INPUTS, Binding
from octavo.graphs.spec import ModelSpec, PassRecord


@dataclass(frozen=True)
class CapturedProgram:
    """`exported` takes `inputs` in their order, then the list of caches, and returns logits, hidden
    states if `spec` names them, and the list of changed caches; neither list where there are no
    attention layers."""

    exported: ExportedProgram
    spec: ModelSpec
    block_size: int
    records: tuple[PassRecord, ...] = ()
    inputs: tuple[Binding, ...] = STEP_INPUTS

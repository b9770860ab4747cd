"""The order of the passes, and the shape of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch.export import ExportedProgram

from octavo.compiler.passes.dead_code import remove_dead_code
from octavo.compiler.passes.flatten_batch import flatten_batch
from octavo.compiler.passes.functionalize import functionalize
from octavo.graphs.program import CapturedProgram
from octavo.graphs.spec import PassRecord

# A pass returns a program that computes the same, and its record.
Pass = Callable[[ExportedProgram], tuple[ExportedProgram, PassRecord]]

PASSES: tuple[Pass, ...] = (functionalize, remove_dead_code, flatten_batch)


def run_passes(program: CapturedProgram) -> CapturedProgram:
    exported, records = program.exported, list(program.records)
    for apply in PASSES:
        exported, record = apply(exported)
        records.append(record)
    return replace(program, exported=exported, records=tuple(records))

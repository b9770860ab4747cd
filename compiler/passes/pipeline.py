"""The order of the passes, and the shape of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch.export import ExportedProgram

from octavo.compiler.passes.dead_code import remove_dead_code
from octavo.compiler.passes.flatten_batch import flatten_batch
from octavo.compiler.passes.functionalize import functionalize
from octavo.graphs.program import CapturedProgram
from octavo.graphs.spec import PassRecord

# A pass returns a program that computes the same, and its record.
Pass = Callable[[ExportedProgram], tuple[ExportedProgram, PassRecord]]

NORMALISE: tuple[Pass, ...] = (functionalize, remove_dead_code, flatten_batch)


@dataclass(frozen=True)
class Fusion:
    """A pass that writes operators of ours: run where the backend has kernels for them all."""

    name: str
    apply: Pass
    operators: frozenset[str]


FUSIONS: tuple[Fusion, ...] = ()


def run_passes(program: CapturedProgram, operators: frozenset[str]) -> CapturedProgram:
    """`operators`: names of Octavo's operators that the backend runs natively."""
    exported, records = program.exported, list(program.records)
    for apply in NORMALISE:
        exported, record = apply(exported)
        records.append(record)
    for fusion in FUSIONS:
        missing = sorted(fusion.operators - operators)
        if missing:
            reason = f"the backend has no kernel for {', '.join(missing)}"
            records.append(PassRecord(name=fusion.name, matches=0, skipped=(reason,)))
            continue
        exported, record = fusion.apply(exported)
        records.append(record)
    return replace(program, exported=exported, records=tuple(records))

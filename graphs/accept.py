"""The acceptance graph: verified logits and drafts in, tokens out. Imports torch."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from octavo.graphs.ops.accept import SCHEMA
from octavo.graphs.ops.accept_torch import OPERATOR

_ROWS, _EDITS, _PROBS = "L", "E", "P"


class AcceptGraph(nn.Module):
    """`octavo::accept` under the names of its operands."""

    def __init__(self, sampled_vocab_size: int) -> None:
        super().__init__()
        self._sampled_vocab_size = sampled_vocab_size

    def forward(
        self,
        logits: Tensor,
        edit_rows: Tensor,
        edit_token_ids: Tensor,
        edit_values: Tensor,
        first_rows: Tensor,
        draft_token_ids: Tensor,
        draft_probs: Tensor,
        prob_rows: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        uniforms: Tensor,
    ) -> Tensor:
        """See `octavo.graphs.ops.accept`; returns token_ids i32 [L]."""
        operands = (
            logits,
            edit_rows,
            edit_token_ids,
            edit_values,
            first_rows,
            draft_token_ids,
            draft_probs,
            prob_rows,
            temperature,
            top_k,
            top_p,
            min_p,
            uniforms,
        )
        return cast(Tensor, OPERATOR(*operands, self._sampled_vocab_size))


def export_accept(sampled_vocab_size: int) -> ExportedProgram:
    """The graph for logits [L, V] over the tokens that are sampled, with any number of rows, edits
    and probabilities."""
    rows, edits, probs = (Dim(name, min=0) for name in (_ROWS, _EDITS, _PROBS))
    dims = {_ROWS: rows, _EDITS: edits, _PROBS: probs}
    sizes = {_ROWS: 3, _EDITS: 4, _PROBS: 5}
    examples, shapes = [], []
    size = sampled_vocab_size
    for operand in SCHEMA.inputs:
        first = operand.meaning[1]  # the letter of the first axis
        tail = {"logits": [size], "draft_probs": [size], "uniforms": [2]}
        shape = [sizes[first], *tail.get(operand.name, [])]
        examples.append(torch.zeros(shape, dtype=getattr(torch, operand.type_group)))
        shapes.append({0: dims[first]})
    return torch.export.export(
        AcceptGraph(sampled_vocab_size),
        tuple(examples),
        dynamic_shapes=tuple(shapes),
        strict=False,
    )

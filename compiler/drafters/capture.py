"""Capture of a drafter: its module becomes a graph with the bindings that the runtime knows."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from octavo.backends.manifest import Limits
from octavo.compiler import rope
from octavo.compiler.attention_interface import IMPLEMENTATION, StepContext, active
from octavo.compiler.capture import EXPERTS_IMPLEMENTATION, export, observe, traced
from octavo.compiler.isolation import one_thread
from octavo.graphs import bindings
from octavo.graphs.bindings import STEP_INPUTS, TOKEN_IDS
from octavo.graphs.drafters.base import HeadsDrafter, PagedDrafter
from octavo.graphs.program import CapturedProgram
from octavo.graphs.spec import HiddenStatesSpec, ModelSpec, SpeculativeMethod


class PagedDrafterGraph(nn.Module):
    """A `PagedDrafter` under the graph contract."""

    def __init__(self, drafter: PagedDrafter, context: StepContext) -> None:
        super().__init__()
        self.drafter = drafter
        self.register_buffer("no_operand", torch.zeros(0), persistent=False)
        self._context = context

    def forward(
        self,
        token_ids: Tensor,  # i32 [T]
        positions: Tensor,  # i32 [T]
        slot_mapping: Tensor,  # i32 [T]
        block_tables: Tensor,  # i32 [B, M]
        query_start_loc: Tensor,  # i32 [B+1]
        prefix_offsets: Tensor,  # i32 [B]
        logits_indices: Tensor,  # i32 [L]
        features: Tensor,  # f32 [T, F]
        kv_caches: list[Tensor],  # each [N, 2, Hkv, block_size, row]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Returns logits f32 [L, V], hidden states f32 [L, h] and the changed caches."""
        steps = (slot_mapping, block_tables, query_start_loc, prefix_offsets)
        self._context.begin(steps, kv_caches, cast(Tensor, self.no_operand))
        logits, hidden_states = self.drafter(
            token_ids.long(), positions.long(), features, logits_indices.long()
        )
        return logits.float(), hidden_states.float(), self._context.new_caches


class HeadsDrafterGraph(nn.Module):
    """A `HeadsDrafter` under the names of the bindings."""

    def __init__(self, drafter: HeadsDrafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, token_ids: Tensor, features: Tensor) -> Tensor:
        """token_ids i32 [T], features f32 [T, F] -> logits f32 [T * k, V]."""
        return cast(Tensor, self.drafter(token_ids.long(), features)).float()


@one_thread()
def capture_drafter(
    drafter: PagedDrafter | HeadsDrafter,
    method: SpeculativeMethod,
    target: ModelSpec,
    limits: Limits,
    dtype: torch.dtype,
) -> CapturedProgram:
    """Captures a drafter (eval mode, on the CPU) of a model with the spec `target`.

    Raises UnsupportedModelError where its code cannot be captured.
    """
    name = type(drafter).__name__
    spec = target.model_copy(
        update={
            "architecture": name,
            "model_type": method,
            "max_position_embeddings": limits.max_model_len,
            "tie_word_embeddings": False,
            "layers": (),
            "num_parameters": sum(p.numel() for p in drafter.parameters()),
            "feature_size": drafter.feature_size,
            "hidden_states": None,
        }
    )
    features = bindings.features(drafter.feature_size)
    if isinstance(drafter, HeadsDrafter):
        return _capture_heads(drafter, spec, limits, (TOKEN_IDS, features), dtype)
    config: Any = drafter.config
    config._attn_implementation = IMPLEMENTATION
    config._experts_implementation = EXPERTS_IMPLEMENTATION
    rope.freeze(drafter, limits.max_model_len)
    context = StepContext(limits.max_model_len)
    graph = PagedDrafterGraph(drafter, context).eval()
    with torch.no_grad(), active(context):

        def run(*arguments: Any) -> Any:
            *step, caches = arguments
            return graph(*step, torch.zeros(len(step[0]), drafter.feature_size), caches)

        hidden_states = HiddenStatesSpec(rows="logits", source="chain", size=drafter.hidden_size)
        spec = spec.model_copy(
            update={
                "layers": traced(lambda: observe(run, context, name), name),
                "hidden_states": hidden_states,
            }
        )
        inputs = (*STEP_INPUTS, features)
        exported = export(graph, spec, limits, inputs, dtype, name)
    return CapturedProgram(exported, spec, limits.block_size, inputs=inputs)


def _capture_heads(
    drafter: HeadsDrafter,
    spec: ModelSpec,
    limits: Limits,
    inputs: tuple[bindings.Binding, ...],
    dtype: torch.dtype,
) -> CapturedProgram:
    spec = spec.model_copy(update={"drafts_per_row": drafter.num_heads})
    with torch.no_grad():
        exported = export(
            HeadsDrafterGraph(drafter).eval(), spec, limits, inputs, dtype, spec.architecture
        )
    return CapturedProgram(exported, spec, limits.block_size, inputs=inputs)

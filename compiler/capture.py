"""Capture: HF's own modelling code becomes one flattened, paged graph through `torch.export`."""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import PreTrainedModel

from octavo.backends.manifest import Limits
from octavo.compiler import rope
from octavo.compiler.attention_interface import IMPLEMENTATION, StepContext, active
from octavo.compiler.checkpoints import TokenFacts
from octavo.compiler.hidden_states import CaptureHidden, HiddenStatesTap
from octavo.compiler.isolation import (
    PROBE_TOKENS,
    module_tracer,
    one_thread,
    prove_isolation,
)
from octavo.graphs.bindings import (
    BLOCK_TABLES,
    BLOCKS_PER_SEQUENCE,
    CACHE_BLOCKS,
    LOGITS_INDICES,
    LOGITS_ROWS,
    POSITIONS,
    PREFIX_OFFSETS,
    QUERY_START_LOC,
    SEQUENCES,
    SEQUENCES_PLUS_ONE,
    SLOT_MAPPING,
    STEP_INPUTS,
    TOKEN_IDS,
    TOKENS,
    Binding,
)
from octavo.graphs.errors import OctavoError, UnsupportedModelError
from octavo.graphs.program import CapturedProgram
from octavo.graphs.spec import AttentionSpec, ModelSpec, PassRecord

# Symbolic sizes need examples of at least two: torch.export specialises on zero and one.
_EXAMPLE_LENGTHS = (4, 3)
_EXAMPLE_BLOCKS = 5
EXPERTS_IMPLEMENTATION = "batched_mm"


class PagedDecoder(nn.Module):
    """A causal LM as the graph contract wants it: flattened tokens, paged caches, chosen rows."""

    def __init__(
        self, model: PreTrainedModel, context: StepContext, hidden: CaptureHidden | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.tap = None if hidden is None else HiddenStatesTap(model, hidden)
        self.register_buffer("no_operand", torch.zeros(0), persistent=False)
        self._context = context
        parameters = inspect.signature(model.forward).parameters
        self._chooses_rows = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters

    def forward(
        self,
        token_ids: Tensor,  # i32 [T]
        positions: Tensor,  # i32 [T]
        slot_mapping: Tensor,  # i32 [T]
        block_tables: Tensor,  # i32 [B, M]
        query_start_loc: Tensor,  # i32 [B+1]
        prefix_offsets: Tensor,  # i32 [B]
        logits_indices: Tensor,  # i32 [L]
        kv_caches: list[Tensor],  # each [N, 2, Hkv, block_size, row]
    ) -> tuple[Any, ...]:
        """Returns logits f32 [L, V], the hidden states f32 [L, F] or [T, F] if they are wanted,
        and the caches with this step's keys and values."""
        steps = (slot_mapping, block_tables, query_start_loc, prefix_offsets)
        self._context.begin(steps, kv_caches, cast(Tensor, self.no_operand))
        rows = logits_indices.long()
        arguments: dict[str, Any] = {"use_cache": False}
        if self._takes_positions:
            arguments["position_ids"] = positions.long()[None]
        if self._chooses_rows:
            arguments["logits_to_keep"] = rows
        with contextlib.nullcontext() if self.tap is None else self.tap.listening():
            logits = self.model(input_ids=token_ids.long()[None], **arguments).logits[0]
        if not self._chooses_rows:
            logits = logits[rows]
        outputs: tuple[Any, ...] = (logits.float(), self._context.new_caches)
        if self.tap is not None:
            hidden = self.tap.read(None if self._chooses_rows else rows)
            outputs = (outputs[0], hidden, outputs[1])
        return outputs


def _example_inputs(inputs: tuple[Binding, ...], block_size: int) -> tuple[Any, ...]:
    """A valid step of two sequences, for tracing only."""
    first, second = _EXAMPLE_LENGTHS
    total = first + second
    positions = torch.cat([torch.arange(first), torch.arange(second)])
    starts = torch.tensor([0, first, total])
    block = torch.tensor([1] * first + [2] * second)
    values = {
        TOKEN_IDS: torch.arange(total) % 2,
        POSITIONS: positions,
        SLOT_MAPPING: block * block_size + positions % block_size,
        BLOCK_TABLES: torch.tensor([[1, 3], [2, 4]]),
        QUERY_START_LOC: starts,
        PREFIX_OFFSETS: torch.zeros(2),
        LOGITS_INDICES: starts[1:] - 1,
    }
    return tuple(
        values[binding].to(torch.int32)
        if binding in values
        else torch.zeros(total, int(binding.shape[1]))  # features
        for binding in inputs
    )


def _example_caches(
    layers: tuple[AttentionSpec, ...], block_size: int, dtype: torch.dtype
) -> list[Tensor]:
    return [
        torch.zeros(
            _EXAMPLE_BLOCKS, 2, layer.num_kv_heads, block_size, layer.cache_row_size, dtype=dtype
        )
        for layer in layers
    ]


def observe(decoder: Any, context: StepContext, name: str) -> tuple[AttentionSpec, ...]:
    """One eager run of a single sequence tells every layer's attention and mask."""
    length = 6
    positions = torch.arange(length, dtype=torch.int32)
    one = torch.tensor([length - 1], dtype=torch.int32)
    context.observing = True
    try:
        decoder(positions % 2, positions, positions, one[None], positions[:2], one, one, [])
    finally:
        context.observing = False
    if not context.layers:
        raise UnsupportedModelError(
            f"{name} attends with code of its own instead of transformers' attention interface, "
            "so its keys and values cannot be paged: choose a model that uses the interface"
        )
    return tuple(context.layers)


def _prepare(model: PreTrainedModel, max_model_len: int) -> tuple[str, ...]:
    name = type(model).__name__
    try:
        model.set_attn_implementation(IMPLEMENTATION)
    except ValueError:
        raise UnsupportedModelError(
            f"{name} does not support transformers' attention interface, so its keys and values "
            "cannot be paged: choose a model that does"
        ) from None
    if model._can_set_experts_implementation():
        # The other implementations loop over the experts that a batch happens to choose.
        model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    return rope.freeze(model, max_model_len)


def _dynamic_shapes(limits: Limits, inputs: tuple[Binding, ...], layers: int) -> tuple[Any, ...]:
    """One for each input, then those of the caches if there are any."""
    # The proof runs steps of its own, however small the engine's are.
    most_tokens = max(PROBE_TOKENS, limits.max_num_batched_tokens)
    width = max(PROBE_TOKENS, limits.max_blocks_per_seq)
    sequences = Dim(SEQUENCES, min=1, max=max(2, limits.max_num_seqs))
    dims: dict[str, Any] = {
        TOKENS: Dim(TOKENS, min=1, max=most_tokens),
        SEQUENCES: sequences,
        SEQUENCES_PLUS_ONE: sequences + 1,
        BLOCKS_PER_SEQUENCE: Dim(BLOCKS_PER_SEQUENCE, min=1, max=width),
        LOGITS_ROWS: Dim(LOGITS_ROWS, min=0, max=most_tokens),
    }
    shapes: tuple[Any, ...] = tuple(
        {axis: dims[size] for axis, size in enumerate(binding.shape) if isinstance(size, str)}
        for binding in inputs
    )
    blocks = Dim(CACHE_BLOCKS, min=1)
    return (*shapes, [{0: blocks}] * layers) if layers else shapes


@one_thread()
def capture(
    model: PreTrainedModel,
    facts: TokenFacts,
    limits: Limits,
    dtype: torch.dtype,
    hidden: CaptureHidden | None = None,
) -> CapturedProgram:
    """Captures `model` (eval mode, on the CPU) as a paged decoder of `limits`' shapes.

    With `hidden` it also returns hidden states. The model's attention is left set to Octavo's.
    Raises UnsupportedModelError when the model's attention, masks or control flow cannot be
    expressed.
    """
    notes = _prepare(model, limits.max_model_len)
    context = StepContext(limits.max_model_len)
    decoder = PagedDecoder(model, context, hidden).eval()
    name = type(model).__name__
    with torch.no_grad(), active(context):
        layers = traced(lambda: observe(decoder, context, name), name)
        spec = _spec(model, facts, layers, limits)
        if hidden is not None:
            states = hidden.spec(spec.hidden_size)
            spec = spec.model_copy(update={"hidden_states": states})
        try:
            exported = export(decoder, spec, limits, STEP_INPUTS, dtype, name)
        except UnsupportedModelError:
            # Code that scans over tokens rarely exports: then the module that does is the reason.
            prove_isolation(module_tracer(decoder), spec, limits.block_size, dtype)
            raise
    records = (PassRecord(name="freeze_rotary", matches=len(notes), notes=notes),) if notes else ()
    return CapturedProgram(exported, spec, limits.block_size, records)


def export(
    module: nn.Module,
    spec: ModelSpec,
    limits: Limits,
    inputs: tuple[Binding, ...],
    dtype: torch.dtype,
    name: str,
) -> torch.export.ExportedProgram:
    """Exports a module that takes `inputs`, and caches where `spec` has layers; `name` is shown."""
    arguments = _example_inputs(inputs, limits.block_size)
    if spec.layers:
        arguments = (*arguments, _example_caches(spec.layers, limits.block_size, dtype))
    exported: torch.export.ExportedProgram = traced(
        lambda: torch.export.export(
            module,
            arguments,
            dynamic_shapes=_dynamic_shapes(limits, inputs, len(spec.layers)),
            strict=False,
        ),
        name,
    )
    _reject_static_shapes(exported, inputs)
    return exported


def traced(run: Any, name: str) -> Any:
    """Runs third-party code: its warnings are not the user's, its errors name the model."""
    logger = logging.getLogger("torch.export")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run()
    except OctavoError:
        raise
    except Exception as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise UnsupportedModelError(
            f"{name} cannot be captured as a graph ({type(error).__name__}: "
            f"{first_line}): choose another model, or report this one"
        ) from error
    finally:
        logger.setLevel(level)


def _reject_static_shapes(
    exported: torch.export.ExportedProgram, inputs: tuple[Binding, ...]
) -> None:
    """A dimension that tracing fixed to its example's size would serve one shape only."""
    placeholders = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    names = exported.graph_signature.user_inputs
    for binding, name in zip(inputs, names, strict=False):
        shape = placeholders[str(name)].meta["val"].shape
        for size, declared in zip(shape, binding.shape, strict=True):
            if isinstance(size, int) and isinstance(declared, str):
                raise UnsupportedModelError(
                    f"capture fixed {binding.name}'s dimension {declared} to {size}, so "
                    "the model's code depends on a step's shape: choose another model"
                )


def _spec(
    model: PreTrainedModel,
    facts: TokenFacts,
    layers: tuple[AttentionSpec, ...],
    limits: Limits,
) -> ModelSpec:
    config = model.config.get_text_config()
    head = cast(Any, model).get_output_embeddings()
    vocab_size = int(head.weight.shape[0]) if head is not None else int(config.vocab_size)
    return ModelSpec(
        architecture=type(model).__name__,
        model_type=str(model.config.model_type),
        vocab_size=vocab_size,
        hidden_size=int(config.hidden_size),
        max_position_embeddings=max_positions(model.config, limits.max_model_len),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        layers=layers,
        bos_token_id=facts.bos_token_id,
        eos_token_ids=facts.eos_token_ids,
        pad_token_id=facts.pad_token_id,
        num_parameters=sum(p.numel() for p in model.parameters()),
        sampled_vocab_size=min(facts.sampled_vocab_size, vocab_size),
    )


def max_positions(config: Any, chosen: int | None = None) -> int:
    """Positions a model was made for (`n_positions` in GPT-2); `chosen` if it names none."""
    text = config.get_text_config()
    found = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    found = found or chosen
    if not found:
        raise UnsupportedModelError(
            f"the config of {config.model_type!r} names no max_position_embeddings: "
            "give --max-model-len"
        )
    return int(found)

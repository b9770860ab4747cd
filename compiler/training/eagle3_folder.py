"""An EAGLE-3 drafter to be trained: made for a target, written as a checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from octavo.compiler.drafters.eagle3 import default_layers
from octavo.compiler.hidden_states import decoder_layers
from octavo.graphs.drafters.eagle3 import Eagle3
from octavo.graphs.errors import BuildError

WEIGHTS = "model.safetensors"
_EMBEDDING = "embed_tokens.weight"
_CONFIG_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
    "hidden_act",
)


class Eagle3Student(nn.Module):
    """The drafter, and the fusion `fc` that is part of the target's graph later on.

    Hidden states differ in size by orders of magnitude from dimension to dimension, which no
    learning rate suits: `fc` reads them divided by their usual sizes, and what it gives is of the
    size 1. In a checkpoint it is joined with these.

    token_ids  i64 [D], ascending: the draft vocabulary
    sizes      f32 [layers * h], root mean squares of the hidden states that are fused
    layers     of the target, whose inputs are fused
    """

    def __init__(self, model: PreTrainedModel, token_ids: Tensor, sizes: Tensor) -> None:
        super().__init__()
        target: Any = model
        text = target.config.get_text_config()
        self.layers = fused_layers(model)
        self.register_buffer("token_ids", token_ids)
        self.register_buffer("sizes", sizes.clamp(min=1e-6))
        size, vocab_size = int(text.hidden_size), int(text.vocab_size)
        values = {key: getattr(text, key) for key in _CONFIG_KEYS if hasattr(text, key)}
        config = LlamaConfig(
            **{**values, "vocab_size": vocab_size, "num_hidden_layers": 1, "hidden_act": "silu"}
        )
        self.drafter = Eagle3(config, vocab_size=vocab_size, num_head_tokens=len(token_ids))
        self.fc = nn.Linear(len(self.layers) * size, size, bias=False)
        self._take_from(target)

    def fused(self, hidden: Tensor) -> Tensor:
        """[..., layers * h] -> [..., h]."""
        result: Tensor = self.fc(hidden / self.get_buffer("sizes"))
        return result

    def trained(self) -> list[nn.Parameter]:
        """All but the embedding, which is the target's and stays so."""
        embedding = self.drafter.embed_tokens.weight
        return [one for one in self.parameters() if one is not embedding]

    def columns(self, vocab_size: int) -> Tensor:
        """i64 [V]: the place of each token in the draft vocabulary, -1 for none."""
        columns = torch.full((vocab_size,), -1)
        columns[self.get_buffer("token_ids")] = torch.arange(len(self.get_buffer("token_ids")))
        return columns

    def save(self, folder: Path) -> None:
        """Writes a checkpoint that `build-engine` reads; one there is replaced at once."""
        config = self.drafter.config.to_dict()
        content = {key: config[key] for key in _CONFIG_KEYS if key in config}
        token_ids = self.get_buffer("token_ids")
        content |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "vocab_size": config["vocab_size"],
            "draft_vocab_size": len(token_ids),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.layers)},
        }
        write_atomically(folder / "config.json", (json.dumps(content, indent=2) + "\n").encode())
        tensors = {
            name: tensor.contiguous()
            for name, tensor in self.drafter.state_dict().items()
            if name not in (_EMBEDDING, "columns") and "inv_freq" not in name
        }
        tensors["fc.weight"] = self.fc.weight.detach() / self.get_buffer("sizes")
        tensors["d2t"] = token_ids - torch.arange(len(token_ids))
        partial = folder / f".{WEIGHTS}.partial"
        save_file(tensors, partial)
        partial.replace(folder / WEIGHTS)

    def state(self) -> dict[str, Tensor]:
        """All that training changes, and the draft vocabulary."""
        return {
            name: tensor for name, tensor in self.state_dict().items() if _EMBEDDING not in name
        }

    def resume(self, state: dict[str, Tensor], folder: Path) -> None:
        """Takes over a state; BuildError for one with another draft vocabulary, the rows of whose
        output embedding are other tokens."""
        if not torch.equal(state["token_ids"], self.get_buffer("token_ids")):
            raise BuildError(
                f"{folder} drafts other tokens than these texts and --draft-vocab-size give: "
                "resume with those it was begun with, or choose another output"
            )
        self.load_state_dict(state, strict=False)

    @torch.no_grad()
    def _take_from(self, target: Any) -> None:
        """Begins with the target's embeddings and, where shapes fit, weights of its layers.

        Those of the last one, which has the feature as it comes from the layers before; what reads
        the token's embedding is the first one's.
        """
        drafter = self.drafter
        drafter.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        drafter.embed_tokens.weight.requires_grad_(False)
        head = target.get_output_embeddings().weight
        drafter.lm_head.weight.copy_(head[self.get_buffer("token_ids")])
        layers = decoder_layers(target.get_decoder())
        first, last = (dict(layer.named_parameters()) for layer in (layers[0], layers[-1]))
        size = drafter.hidden_size
        own_sizes = self.get_buffer("sizes")[-size:]
        usual = own_sizes.median()
        for name, own in drafter.midlayer.named_parameters():
            given = first.get(name) if name.startswith("input_layernorm") else last.get(name)
            if given is None:
                continue
            if given.shape == own.shape:
                own.copy_(given)
            elif own.shape == (given.shape[0], 2 * size):
                own[:, :size] = first[name]
                own[:, size:] = given
        for matrix in (drafter.midlayer.self_attn.o_proj, drafter.midlayer.mlp.down_proj):
            cast(nn.Linear, matrix).weight /= usual
        norm = next((m for n, m in target.get_decoder().named_children() if "norm" in n), None)
        if norm is not None and getattr(norm, "weight", None) is not None:
            drafter.norm.weight.copy_(norm.weight)
        self.fc.weight.zero_()
        self.fc.weight[:, -size:] = torch.diag(own_sizes / usual)


def fused_layers(model: PreTrainedModel) -> tuple[int, ...]:
    """The layers whose inputs are fused; BuildError for a model with too few."""
    count = int(cast(Any, model).config.get_text_config().num_hidden_layers)
    layers = default_layers(count)
    if min(layers) < 0:
        raise BuildError(
            f"the model has {count} layers and EAGLE-3 reads three of them from the third on: "
            "choose a model with at least 4 layers"
        )
    return layers


def draft_vocabulary(sequences: Sequence[Sequence[int]], size: int, vocab_size: int) -> Tensor:
    """i64 [D], ascending: the `size` most frequent tokens, of ties the lower ids."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for sequence in sequences:
        counts += torch.bincount(torch.tensor(sequence), minlength=vocab_size)
    order = counts.argsort(descending=True, stable=True)
    return order[: min(size, vocab_size)].sort().values


def write_atomically(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)

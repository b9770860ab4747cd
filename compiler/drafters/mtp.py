"""Multi-token prediction layers, which lie in the checkpoint of the model itself.

DeepSeek-V3: `model.layers.{num_hidden_layers}.` with `enorm`, `hnorm`, `eh_proj`, a decoder layer
and `shared_head`. MiMo-7B: `model.mtp_layers.0.` with `token_layernorm`, `hidden_layernorm`,
`input_proj`, a Qwen2 layer and `final_layernorm`. Of several layers the first is run every time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.compiler.drafters.base import ModuleCheckpoint, TargetFacts, TargetWeights
from octavo.compiler.drafters.llama_config import mlp_shapes
from octavo.compiler.drafters.tensors import TensorFolder
from octavo.compiler.drafters.unread import refuse_other_settings, refuse_unread_tensors
from octavo.graphs.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.compiler.hidden_states import CaptureHidden
    from octavo.graphs.drafters.base import PagedDrafter
    from octavo.graphs.spec import SpeculativeMethod

_MIMO = "model.mtp_layers.0."
_EMBEDDING, _HEAD = "embed_tokens.weight", "shared_head.head.weight"
_EXPERTS = "mlp.experts."
_OWNER = "its layer that predicts further tokens"
# Differences between experts are smaller than the steps of a 16-bit float at its values.
_FLOAT32 = "mlp.gate.e_score_correction_bias"


def open_mtp(target: TargetFacts) -> MtpCheckpoint:
    """Raises CheckpointError, with names, where the model has no such layers or not all of them."""
    path = target.checkpoint.path
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is no folder of safetensors, which the layers of method=mtp are read from: "
            "build from the original checkpoint"
        )
    tensors = TensorFolder(path)
    deepseek = f"model.layers.{target.num_layers}."
    if f"{deepseek}eh_proj.weight" in tensors.tensors:
        return DeepseekMtpCheckpoint(target, tensors, deepseek)
    if f"{_MIMO}input_proj.weight" in tensors.tensors:
        return MimoMtpCheckpoint(target, tensors, _MIMO)
    raise CheckpointError(
        f"{path} has neither {deepseek}eh_proj.weight nor {_MIMO}input_proj.weight, so it has no "
        "layers that predict further tokens: choose another drafter"
    )


class MtpCheckpoint(ModuleCheckpoint):
    """
    model_types  those whose layers the stored one is like
    settings     values of the model's config that the stored layer is known with
    """

    method: SpeculativeMethod = "mtp"
    model_types: tuple[str, ...]
    settings: ClassVar[Mapping[str, bool | float]] = {}

    def __init__(self, target: TargetFacts, tensors: TensorFolder, prefix: str) -> None:
        self.path = target.checkpoint.path
        self._target = target
        self._tensors = tensors
        self._prefix = prefix
        self._config: Any = target.checkpoint.config.get_text_config()
        model_type = self._config.model_type
        if model_type not in self.model_types:
            raise CheckpointError(
                f"{self.path} is a {model_type} model, and of those with tensors {prefix}* only "
                f"{' and '.join(self.model_types)} are known to method=mtp: choose another drafter"
            )
        refuse_other_settings(self.path, self._config.to_dict(), self.settings)
        shapes = {prefix + name: shape for name, shape in self._shapes().items()}
        tensors.require(shapes, _OWNER)
        refuse_unread_tensors(tensors, shapes, _OWNER, prefix=prefix)

    def content_digest(self) -> str:
        return self._target.checkpoint.content_digest()

    def load_module(self, target: TargetWeights, dtype: torch.dtype) -> PagedDrafter:
        import torch

        from octavo.compiler.drafters.assembly import with_weights

        names = [self._prefix + name for name in self._shapes()]
        loaded = self._tensors.load(names, dtype)
        exact = [name for name in names if name.endswith(_FLOAT32)]
        loaded |= self._tensors.load(exact, torch.float32)
        state = self._placed(
            {name.removeprefix(self._prefix): tensor for name, tensor in loaded.items()}
        )
        state.setdefault(_EMBEDDING, target.embedding.to(dtype))
        state.setdefault("head.weight", target.head.to(dtype))
        return with_weights(self._module, state)

    @abstractmethod
    def _module(self) -> PagedDrafter:
        """With weights of any kind."""

    @abstractmethod
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the stored tensors, behind the prefix."""

    @abstractmethod
    def _placed(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        """The stored tensors under the module's names."""


class DeepseekMtpCheckpoint(MtpCheckpoint):
    model_types = ("deepseek_v3",)
    settings: ClassVar[Mapping[str, bool | float]] = {"attention_bias": False}

    def hidden(self) -> CaptureHidden:
        from octavo.compiler.hidden_states import CaptureHidden

        return CaptureHidden(rows="all", source="post_norm")

    def _module(self) -> PagedDrafter:
        from octavo.graphs.drafters.mtp import DeepseekMtp

        return DeepseekMtp(self._config, self._target.vocab_size)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        size, stored = self._config.hidden_size, self._tensors.tensors
        shapes: dict[str, tuple[int, ...]] = {
            "enorm.weight": (size,),
            "hnorm.weight": (size,),
            "eh_proj.weight": (size, 2 * size),
            "shared_head.norm.weight": (size,),
            "input_layernorm.weight": (size,),
            "post_attention_layernorm.weight": (size,),
            **self._attention_shapes(),
            **self._mlp_shapes(),
        }
        for name in (_EMBEDDING, _HEAD):  # else the target's
            if self._prefix + name in stored:
                shapes[name] = (self._target.vocab_size, size)
        return shapes

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        config = self._config
        size, heads = config.hidden_size, config.num_attention_heads
        queries = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        values = heads * (config.qk_nope_head_dim + config.v_head_dim)
        shapes: dict[str, tuple[int, ...]] = {
            "kv_a_proj_with_mqa.weight": (config.kv_lora_rank + config.qk_rope_head_dim, size),
            "kv_a_layernorm.weight": (config.kv_lora_rank,),
            "kv_b_proj.weight": (values, config.kv_lora_rank),
            "o_proj.weight": (size, heads * config.v_head_dim),
        }
        if config.q_lora_rank is None:
            shapes["q_proj.weight"] = (queries, size)
        else:
            shapes["q_a_proj.weight"] = (config.q_lora_rank, size)
            shapes["q_a_layernorm.weight"] = (config.q_lora_rank,)
            shapes["q_b_proj.weight"] = (queries, config.q_lora_rank)
        return {f"self_attn.{name}": shape for name, shape in shapes.items()}

    def _mlp_shapes(self) -> dict[str, tuple[int, ...]]:
        config = self._config
        size = config.hidden_size
        if self._target.num_layers < config.first_k_dense_replace:
            return mlp_shapes(config, "")
        count, inner = config.n_routed_experts, config.moe_intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "mlp.gate.weight": (count, size),
            "mlp.gate.e_score_correction_bias": (count,),
        }
        parts = [(f"{_EXPERTS}{expert}", inner) for expert in range(count)]
        parts.append(("mlp.shared_experts", inner * config.n_shared_experts))
        for part, width in parts:
            shapes[f"{part}.gate_proj.weight"] = (width, size)
            shapes[f"{part}.up_proj.weight"] = (width, size)
            shapes[f"{part}.down_proj.weight"] = (size, width)
        return shapes

    def _placed(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        import torch

        outside = {
            _EMBEDDING: _EMBEDDING,
            _HEAD: "head.weight",
            "shared_head.norm.weight": "norm.weight",
        }
        own = ("enorm.", "hnorm.", "eh_proj.")
        placed = {
            outside.get(name, name if name.startswith(own) else f"block.{name}"): tensor
            for name, tensor in stored.items()
            if not name.startswith(_EXPERTS)
        }
        if any(name.startswith(_EXPERTS) for name in stored):
            experts = range(self._config.n_routed_experts)

            def stacked(part: str) -> Tensor:
                return torch.stack([stored[f"{_EXPERTS}{e}.{part}.weight"] for e in experts])

            joined = torch.cat([stacked("gate_proj"), stacked("up_proj")], dim=1)
            placed[f"block.{_EXPERTS}gate_up_proj"] = joined
            placed[f"block.{_EXPERTS}down_proj"] = stacked("down_proj")
        return placed


class MimoMtpCheckpoint(MtpCheckpoint):
    model_types = ("qwen2", "mimo")

    def hidden(self) -> CaptureHidden:
        from octavo.compiler.hidden_states import CaptureHidden

        return CaptureHidden(rows="all", source="pre_norm")

    def _module(self) -> PagedDrafter:
        from transformers import Qwen2Config

        from octavo.graphs.drafters.mtp import MimoMtp

        # MiMo's own config is one of Qwen2 with the number of these layers.
        config = Qwen2Config.from_dict(self._config.to_dict() | {"use_sliding_window": False})
        return MimoMtp(config, self._target.vocab_size)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        config = self._config
        size = config.hidden_size
        head_dim = getattr(config, "head_dim", None) or size // config.num_attention_heads
        queries = config.num_attention_heads * head_dim
        keys = config.num_key_value_heads * head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "token_layernorm.weight": (size,),
            "hidden_layernorm.weight": (size,),
            "input_proj.weight": (size, 2 * size),
            "final_layernorm.weight": (size,),
            "input_layernorm.weight": (size,),
            **mlp_shapes(config, ""),
        }
        for name, width in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            shapes[f"self_attn.{name}.weight"] = (width, size)
            shapes[f"self_attn.{name}.bias"] = (width,)
        shapes["self_attn.o_proj.weight"] = (size, queries)
        return shapes

    def _placed(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        own = ("token_layernorm.", "hidden_layernorm.", "input_proj.", "final_layernorm.")
        return {
            name if name.startswith(own) else f"block.{name}": tensor
            for name, tensor in stored.items()
        }

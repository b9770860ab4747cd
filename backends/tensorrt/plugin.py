"""`octavo::PagedAttention` as a TensorRT plugin whose cache is its own output.

Nothing here imports TensorRT: its classes can only be derived from once the library that is meant,
TensorRT or TensorRT-RTX, is loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from octavo.backends.tensorrt.surroundings import (
    Attention,
    Surroundings,
    noted,
    surroundings_of_new_plugins,
)
from octavo.graphs.errors import BackendError
from octavo.graphs.ops.paged_attention import SCHEMA
from octavo.graphs.ops.schema import DOMAIN, Attribute

if TYPE_CHECKING:
    from octavo.backends.gpu_attention import AttentionShape
    from octavo.graphs.spec import FloatDType

NAME = SCHEMA.onnx_name
VERSION = "1"
NAMESPACE = DOMAIN

_INPUTS = [operand.name for operand in SCHEMA.inputs]
_OUTPUTS = [operand.name for operand in SCHEMA.outputs]
QUERY, KEY, VALUE, CACHE = (_INPUTS.index(n) for n in ("query", "key", "value", "kv_cache"))
BLOCK_TABLES = _INPUTS.index("block_tables")
SINKS, ALIBI_SLOPES = (_INPUTS.index(name) for name in ("sinks", "alibi_slopes"))
ATTENTION, CACHE_OUT = (_OUTPUTS.index(name) for name in ("attention", "kv_cache_out"))
_NOT_ALIASED = -1
_FIELD_DTYPES = {"int": np.int32, "float": np.float32}  # as the ONNX parser passes them on
Attributes = dict[str, int | float]


_registered: list[Any] = []  # creators, which TensorRT does not keep alive


@functools.cache
def register(trt: Any) -> None:
    """Makes the plugin known to the library `trt`, once in a process."""
    creator = _classes(trt)[1]()
    if not trt.get_plugin_registry().register_creator(creator, NAMESPACE):
        raise BackendError(
            f"{trt.__name__} did not take the plugin {NAMESPACE}::{NAME} version {VERSION}: "
            "another one of that name is registered"
        )
    _registered.append(creator)


def attributes_of(fields: Any) -> Attributes:
    """The attributes of `SCHEMA`, each one given; raises BackendError naming one that is not."""
    given = {field.name: field.data for field in fields}
    found: Attributes = {}
    for attribute in SCHEMA.attributes:
        if attribute.name not in given:
            raise BackendError(f"the node {NAME} has no attribute {attribute.name}")
        value = np.asarray(given[attribute.name]).reshape(-1)[0]
        found[attribute.name] = int(value) if attribute.type == "int" else float(value)
    return found


def attention_shape(
    attributes: Attributes,
    dims: Sequence[Sequence[int]],
    dtype: FloatDType,
    cache_dtype: FloatDType | Literal["float8_e4m3fn"],
) -> AttentionShape:
    """What the kernel is compiled for; `dims` are those of the inputs of `SCHEMA`."""
    from octavo.backends.gpu_attention import AttentionShape

    return AttentionShape(
        num_heads=dims[QUERY][1],
        num_kv_heads=dims[KEY][1],
        head_size=dims[QUERY][2],
        value_head_size=dims[VALUE][2],
        block_size=dims[CACHE][3],
        scale=float(attributes["scale"]),
        causal=bool(attributes["causal"]),
        sliding_window=int(attributes["sliding_window"]),
        softcap=float(attributes["softcap"]),
        has_sinks=dims[SINKS][0] > 0,
        has_alibi=dims[ALIBI_SLOPES][0] > 0,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )


@functools.cache
def _classes(trt: Any) -> tuple[Any, Any]:
    """(plugin, creator) derived from the classes of the library `trt`."""
    dtypes: dict[Any, FloatDType] = {
        trt.DataType.FLOAT: "float32",
        trt.DataType.HALF: "float16",
        trt.DataType.BF16: "bfloat16",
    }
    cache_dtypes: dict[Any, FloatDType | Literal["float8_e4m3fn"]] = {**dtypes}
    if hasattr(trt.DataType, "FP8"):
        cache_dtypes[trt.DataType.FP8] = "float8_e4m3fn"
    fixed = {"int32": trt.DataType.INT32, "float32": trt.DataType.FLOAT}

    class PagedAttentionPlugin(
        trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime
    ):
        def __init__(self, attributes: Attributes, surroundings: Surroundings | None) -> None:
            trt.IPluginV3.__init__(self)
            trt.IPluginV3OneCore.__init__(self)
            trt.IPluginV3OneBuildV2.__init__(self)
            trt.IPluginV3OneRuntime.__init__(self)
            self.plugin_name = NAME
            self.plugin_version = VERSION
            self.plugin_namespace = NAMESPACE
            self.num_outputs = len(_OUTPUTS)
            self._attributes = attributes
            self._surroundings = surroundings
            self._attention: Attention | None = None

        # --- core -------------------------------------------------------------------------------

        def get_capability_interface(self, kind: Any) -> Any:
            return self

        def clone(self) -> Any:
            return PagedAttentionPlugin(self._attributes, self._surroundings)

        # --- build ------------------------------------------------------------------------------

        def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
            return [input_types[QUERY], input_types[CACHE]]

        def get_output_shapes(self, inputs: Any, shape_inputs: Any, builder: Any) -> list[Any]:
            query, value, cache = inputs[QUERY], inputs[VALUE], inputs[CACHE]
            attention = trt.DimsExprs([query[0], query[1], value[2]])
            return [attention, trt.DimsExprs([cache[i] for i in range(len(cache))])]

        def supports_format_combination(
            self, position: int, descriptions: Sequence[Any], num_inputs: int
        ) -> bool:
            own = descriptions[position].desc
            if own.format != trt.TensorFormat.LINEAR:
                return False
            if position >= num_inputs:
                aliased = (QUERY, CACHE)[position - num_inputs]
                return bool(own.type == descriptions[aliased].desc.type)
            operand = SCHEMA.inputs[position]
            if position == CACHE:
                query = descriptions[QUERY].desc.type
                return own.type in cache_dtypes and own.type in (query, *_narrow(trt))
            if operand.type_group != "T":
                return bool(own.type == fixed[operand.type_group])
            if position == QUERY:
                return own.type in dtypes
            return bool(own.type == descriptions[QUERY].desc.type)

        def get_aliased_input(self, output: int) -> int:
            return CACHE if output == CACHE_OUT else _NOT_ALIASED

        def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            """All follows from the shapes of a step."""

        def get_workspace_size(self, inputs: Any, outputs: Any) -> int:
            return 0

        def get_valid_tactics(self) -> list[int]:
            return []

        # --- runtime ----------------------------------------------------------------------------

        def set_tactic(self, tactic: int) -> None:
            """There is one way only."""

        def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            if self._surroundings is None:  # while it is built there is nothing to run
                return
            dtype, cache_dtype = dtypes[inputs[QUERY].type], cache_dtypes[inputs[CACHE].type]
            dims = [tuple(description.dims) for description in inputs]
            shape = attention_shape(self._attributes, dims, dtype, cache_dtype)
            with noted(self._surroundings):
                self._attention = self._surroundings.kernels.attention(shape)

        def attach_to_context(self, context: Any) -> Any:
            return self.clone()

        def get_fields_to_serialize(self) -> Any:
            return trt.PluginFieldCollection(
                [
                    trt.PluginField(
                        one.name,
                        np.array([self._attributes[one.name]], _FIELD_DTYPES[one.type]),
                        _field_type(trt, one),
                    )
                    for one in SCHEMA.attributes
                ]
            )

        def enqueue(
            self,
            inputs: Sequence[Any],
            outputs: Sequence[Any],
            input_addresses: Sequence[int],
            output_addresses: Sequence[int],
            workspace: int,
            stream: int,
        ) -> None:
            if self._attention is None or self._surroundings is None:
                raise BackendError(f"the plugin {NAME} runs in an engine that Octavo loaded only")
            from octavo.backends.gpu_attention.launch import AttentionPointers

            given = dict(zip(_INPUTS, map(int, input_addresses), strict=True))
            pointers = AttentionPointers(**given, output=int(output_addresses[ATTENTION]))
            num_seqs, max_blocks = inputs[BLOCK_TABLES].dims
            num_tokens = inputs[QUERY].dims[0]
            with noted(self._surroundings):
                self._attention.launch(pointers, num_tokens, num_seqs, max_blocks, int(stream))

    class PagedAttentionCreator(trt.IPluginCreatorV3One):
        def __init__(self) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name = NAME
            self.plugin_version = VERSION
            self.plugin_namespace = NAMESPACE
            self.field_names = trt.PluginFieldCollection(
                [
                    trt.PluginField(one.name, np.array([]), _field_type(trt, one))
                    for one in SCHEMA.attributes
                ]
            )

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            return PagedAttentionPlugin(attributes_of(fields), surroundings_of_new_plugins())

    return PagedAttentionPlugin, PagedAttentionCreator


def _field_type(trt: Any, attribute: Attribute) -> Any:
    types = trt.PluginFieldType
    return types.INT32 if attribute.type == "int" else types.FLOAT32


def _narrow(trt: Any) -> tuple[Any, ...]:
    """Types of a cache that is narrower than what is computed in."""
    return (trt.DataType.FP8,) if hasattr(trt.DataType, "FP8") else ()

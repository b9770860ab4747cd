"""`octavo::paged_attention`: write keys and values into the paged cache, then attend."""

from __future__ import annotations

from octavo.graphs.ops.schema import Attribute, Operand, OperatorSchema

SCHEMA = OperatorSchema(
    name="paged_attention",
    onnx_name="PagedAttention",
    inputs=(
        Operand("query", "T", "[T, H, Dk]"),
        Operand("key", "T", "[T, Hkv, Dk]"),
        Operand("value", "T", "[T, Hkv, Dv]"),
        Operand("kv_cache", "T", "[N, 2, Hkv, block_size, max(Dk, Dv)]"),
        Operand("slot_mapping", "int32", "[T]; -1 writes nothing"),
        Operand("block_tables", "int32", "[B, M]"),
        Operand("query_start_loc", "int32", "[B+1]"),
        Operand("prefix_offsets", "int32", "[B]"),
        Operand("sinks", "float32", "[H], or [0] for a model without sinks"),
        Operand("alibi_slopes", "float32", "[H], or [0] for a model without ALiBi"),
    ),
    outputs=(
        Operand("attention", "T", "[T, H, Dv]"),
        Operand("kv_cache_out", "T", "the cache with this step's keys and values"),
    ),
    attributes=(
        Attribute("scale", "float", "factor of the scores"),
        Attribute("causal", "int", "1: a token sees no later token"),
        Attribute("sliding_window", "int", "keys a token sees, itself included; 0: all"),
        Attribute("softcap", "float", "scores become softcap * tanh(score / softcap); 0: none"),
        Attribute("k_transposed", "int", "1: a block holds keys as [row, block_size]"),
    ),
    doc=(
        "The keys and values of all T tokens go to the slots given, then token i of sequence b, at "
        "position prefix_offsets[b] + i, attends over the sequence's cache. Query head h reads "
        "key/value head h * Hkv // H. The scaled score is capped, then gets "
        "alibi_slope * (key position - query position), then masks; a sink adds exp(sink) to the "
        "softmax's denominator only. A token that sees no key gives zeros."
    ),
)

"""`octavo::accept`: which drafts are kept, and the token after them, by rejection sampling.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, and Chen et
al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
"""

from __future__ import annotations

from octavo.graphs.ops.schema import Attribute, Operand, OperatorSchema

NO_TOKEN = -1

SCHEMA = OperatorSchema(
    name="accept",
    onnx_name="Accept",
    inputs=(
        Operand("logits", "float32", "[L, V], each sequence's rows in order: its drafts' and one"),
        Operand("edit_rows", "int32", "[E]"),
        Operand("edit_token_ids", "int32", "[E]"),
        Operand("edit_values", "float32", "[E], what takes the place of logits[row, token id]"),
        Operand("first_rows", "int32", "[L], the first row of each row's sequence"),
        Operand("draft_token_ids", "int32", "[L], the draft at a row; -1 at a sequence's last"),
        Operand("draft_probs", "float32", "[P, V], distributions that drafts were drawn from"),
        Operand("prob_rows", "int32", "[L], a draft's row of those; -1: chosen with certainty"),
        Operand("temperature", "float64", "[L], 0: the likeliest token, of ties the first"),
        Operand("top_k", "int32", "[L], 0: all"),
        Operand("top_p", "float64", "[L], 1: all"),
        Operand("min_p", "float64", "[L], 0: all"),
        Operand("uniforms", "float64", "[L, 2] in [0, 1): to accept the draft, to draw a token"),
    ),
    outputs=(
        Operand(
            "token_ids",
            "int32",
            "[L], a sequence's accepted drafts and the token after them, then -1; -1 also where "
            "logits are no numbers",
        ),
    ),
    attributes=(Attribute("vocab", "int", "columns from it on are never chosen"),),
    doc=(
        "With p a row's distribution after its edits, temperature, top-k, min-p and top-p, and q "
        "that of its draft x: x is accepted if u q(x) < p(x); the first draft that is not gives "
        "way to a token drawn from max(p - q, 0), and a row without draft to one drawn from p."
    ),
)

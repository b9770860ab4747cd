"""The ONNX function body of `octavo::Accept`, in standard operators only."""

from __future__ import annotations

import onnx
import onnx.parser

from octavo.graphs.ops.accept import SCHEMA

# TopK over all columns is the sort: of ties it gives the lower index first. Where a row has no
# draft or its draft has no row of probabilities, a first row of zeros stands for them.
_BODY = """
<domain: "octavo", opset_import: ["": 21]>
Accept <vocab> (logits, edit_rows, edit_token_ids, edit_values, first_rows, draft_token_ids,
                draft_probs, prob_rows, temperature, top_k, top_p, min_p, uniforms) => (token_ids)
{
  zero = Constant <value_ints = [0]> ()
  one = Constant <value_ints = [1]> ()
  two = Constant <value_ints = [2]> ()
  last_axis = Constant <value_ints = [-1]> ()
  zero_scalar = Constant <value_int = 0> ()
  one_scalar = Constant <value_int = 1> ()
  none = Constant <value_ints = [-1]> ()
  zero_float = Constant <value_float = 0.0> ()
  one_float = Constant <value_float = 1.0> ()
  zero_double = Cast <to = 11> (zero_float)
  one_double = Cast <to = 11> (one_float)
  vocab_count = Constant <value_int: int = @vocab> ()
  vocab_row = Reshape (vocab_count, one)

  edit_rows_64 = Cast <to = 7> (edit_rows)
  edit_tokens_64 = Cast <to = 7> (edit_token_ids)
  edit_rows_column = Unsqueeze (edit_rows_64, last_axis)
  edit_tokens_column = Unsqueeze (edit_tokens_64, last_axis)
  edit_places = Concat <axis = 1> (edit_rows_column, edit_tokens_column)
  edited_all = ScatterND (logits, edit_places, edit_values)
  edited = Slice (edited_all, zero, vocab_row, one)

  largest_single = ReduceMax <keepdims = 1> (edited, last_axis)
  sum_single = ReduceSum <keepdims = 1> (edited, last_axis)
  is_nan = IsNaN (sum_single)
  is_infinite = IsInf (largest_single)
  wrong_column = Or (is_nan, is_infinite)
  wrong = Squeeze (wrong_column, last_axis)
  is_finite = Not (wrong)

  values = Cast <to = 11> (edited)
  ordered, order = TopK <axis = 1, largest = 1, sorted = 1> (values, vocab_row)
  largest = Slice (ordered, zero, one, one)
  top_k_64 = Cast <to = 7> (top_k)
  has_top_k = Greater (top_k_64, zero)
  wanted_k = Where (has_top_k, top_k_64, vocab_row)
  kept_k = Min (wanted_k, vocab_row)
  last_kept = Sub (kept_k, one)
  last_kept_column = Unsqueeze (last_kept, last_axis)
  threshold = GatherElements <axis = 1> (ordered, last_kept_column)
  is_random = Greater (temperature, zero_double)
  heat = Where (is_random, temperature, one_double)
  heat_column = Unsqueeze (heat, last_axis)
  distance = Sub (ordered, largest)
  exponent = Div (distance, heat_column)
  raw_weights = Exp (exponent)
  in_top_k = GreaterOrEqual (ordered, threshold)
  weights_k = Where (in_top_k, raw_weights, zero_double)
  min_p_column = Unsqueeze (min_p, last_axis)
  in_min_p = GreaterOrEqual (weights_k, min_p_column)
  weights_m = Where (in_min_p, weights_k, zero_double)
  mass_m = ReduceSum <keepdims = 1> (weights_m, last_axis)
  columns_axis = Constant <value_int = 1> ()
  before_p = CumSum <exclusive = 1> (weights_m, columns_axis)
  top_p_column = Unsqueeze (top_p, last_axis)
  goal_p = Mul (top_p_column, mass_m)
  past_goal = GreaterOrEqual (before_p, goal_p)
  has_top_p = Less (top_p_column, one_double)
  cut_p = And (past_goal, has_top_p)
  weights_p = Where (cut_p, zero_double, weights_m)
  column_ids = Range (zero_scalar, vocab_count, one_scalar)
  is_first = Equal (column_ids, zero)
  first_only = Cast <to = 11> (is_first)
  random_column = Unsqueeze (is_random, last_axis)
  weights = Where (random_column, weights_p, first_only)
  mass = ReduceSum <keepdims = 1> (weights, last_axis)
  ordered_probs = Div (weights, mass)
  no_probs = Sub (ordered_probs, ordered_probs)
  probs = ScatterElements <axis = 1> (no_probs, order, ordered_probs)

  drafts = Cast <to = 7> (draft_token_ids)
  has_draft = GreaterOrEqual (drafts, zero)
  draft_columns = Max (drafts, zero)
  draft_column = Unsqueeze (draft_columns, last_axis)
  own_probs = Slice (draft_probs, zero, vocab_row, one)
  zeros_row_shape = Concat <axis = 0> (one, vocab_row)
  zeros_row = Expand (zero_float, zeros_row_shape)
  padded_probs = Concat <axis = 0> (zeros_row, own_probs)
  prob_rows_64 = Cast <to = 7> (prob_rows)
  padded_rows_all = Add (prob_rows_64, one)
  padded_rows = Where (has_draft, padded_rows_all, zero)
  drawn_from = Gather <axis = 0> (padded_probs, padded_rows)
  drawn_double = Cast <to = 11> (drawn_from)
  is_drawn = Greater (padded_rows, zero)
  not_drawn = Not (is_drawn)
  is_certain = And (has_draft, not_drawn)
  certain_column = Unsqueeze (is_certain, last_axis)
  at_draft = Equal (column_ids, draft_column)
  certain_places = And (at_draft, certain_column)
  certain = Cast <to = 11> (certain_places)
  proposed = Add (drawn_double, certain)

  p_column = GatherElements <axis = 1> (probs, draft_column)
  q_column = GatherElements <axis = 1> (proposed, draft_column)
  u_accept = Slice (uniforms, zero, one, one)
  u_draw = Slice (uniforms, one, two, one)
  needed = Mul (u_accept, q_column)
  is_likely_column = Less (needed, p_column)
  is_likely = Squeeze (is_likely_column, last_axis)
  may_accept = And (has_draft, is_finite)
  accepted = And (may_accept, is_likely)

  difference = Sub (probs, proposed)
  is_positive = Greater (difference, zero_double)
  residual_own = Where (is_positive, difference, zero_double)
  residual_mass = ReduceSum <keepdims = 1> (residual_own, last_axis)
  has_residual = Greater (residual_mass, zero_double)
  residual = Where (has_residual, residual_own, probs)
  cumulative = CumSum (residual, columns_axis)
  all_columns = Sub (vocab_row, one)
  total = Slice (cumulative, all_columns, vocab_row, one)
  draw_goal = Mul (u_draw, total)
  is_passed = Greater (cumulative, draw_goal)
  passed = Cast <to = 6> (is_passed)
  drawn_tokens = ArgMax <axis = 1, keepdims = 0> (passed)

  chosen = Where (accepted, drafts, drawn_tokens)
  checked = Where (is_finite, chosen, none)
  is_end = Not (accepted)
  ends = Cast <to = 7> (is_end)
  rows_axis = Constant <value_int = 0> ()
  before = CumSum <exclusive = 1> (ends, rows_axis)
  first_rows_64 = Cast <to = 7> (first_rows)
  before_first = Gather <axis = 0> (before, first_rows_64)
  is_reached = Equal (before, before_first)
  reached_tokens = Where (is_reached, checked, none)
  token_ids = Cast <to = 6> (reached_tokens)
}
"""


def function() -> onnx.FunctionProto:
    """The body, to be added to a model's `functions`."""
    body = onnx.parser.parse_function(_BODY)
    body.doc_string = SCHEMA.doc
    return body

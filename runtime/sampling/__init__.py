"""From logits to tokens: parameters, edits, the choice of a token, beam search."""

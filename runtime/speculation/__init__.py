"""Drafters propose tokens, the engine's next step verifies them."""

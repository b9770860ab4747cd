"""Weights become integers: 8 or 4 bits, rounded here or taken from a GGUF file as they are."""

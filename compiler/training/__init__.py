"""Trains drafters on what their target says itself."""

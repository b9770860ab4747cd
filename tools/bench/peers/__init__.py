"""Octavo beside other engines: each in its own environment, all on the same token ids."""

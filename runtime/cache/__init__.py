"""The paged cache: its blocks, the prefixes found in them, and which are given up first."""

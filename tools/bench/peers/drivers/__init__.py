"""What runs inside a peer's environment: files that import nothing of Octavo but its own driver."""

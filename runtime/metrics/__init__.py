"""What an engine counts and measures, and how it is shown."""

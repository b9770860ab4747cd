"""What is compiled: operator definitions, bindings and the model spec. Importing it needs no torch."""

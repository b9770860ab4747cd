"""What is compiled: operators, bindings and the model spec. Importing it needs no torch."""

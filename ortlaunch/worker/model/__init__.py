"""The model: built from its config or loaded, its loss, its parameters by name."""

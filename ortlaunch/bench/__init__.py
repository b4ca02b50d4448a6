"""Measurement of a recipe's variants, for `ortlaunch bench` and `engine.name: auto`."""

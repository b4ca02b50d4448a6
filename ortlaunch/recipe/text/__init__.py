"""YAML text with the location of each value."""

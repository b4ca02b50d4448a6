"""The trace of a model, and the form in which each operator is exported."""

"""What a verb does beside training: evaluate, export, generate, prepare data, selftest, submit, compare."""

"""Conclude why a run ended from its folder alone: one verdict, with its cause and advice.

`conclude` is the entry: `run_end` classifies the end, `memory` says what would fit. Control side: no
torch. May import planning and recipe.
"""

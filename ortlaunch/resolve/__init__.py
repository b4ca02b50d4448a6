"""Resolve a recipe, a world and choices to a run, once; `prepare` writes its folder.

Must not start a process.
"""

"""From a recipe, a world and choices to a resolved run, once; `prepare` writes its folder.

Must not start a process.
"""

"""The schema: every field of a recipe, with its type, bounds and description."""

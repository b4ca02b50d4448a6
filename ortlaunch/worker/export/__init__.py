"""The export of a model: its folder, model card and upload; text generation with it."""

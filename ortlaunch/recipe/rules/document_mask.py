"""When a mask keeps the documents of a packed sample apart, and how long the sample may be."""

from __future__ import annotations

from ortlaunch.recipe.fields.recipe import Recipe

LONGEST_MASKED_SAMPLE = 8192
"""Tokens of a sample that a mask may have. It has their square in values, 256 MiB of float32 a
sample; at twice the length, 1 GiB, it is more than the activations of most layers."""


def document_mask_reason_or_empty(recipe: Recipe) -> str:
    """Return why packed documents of a recipe get a mask; "": their attention keeps them apart.

    A model may need the mask for reasons of its own; the worker detects that (model/packing.py).
    """
    if not recipe.data.separates_documents:
        return ""
    if recipe.engine.name == "ort":
        return "a graph of engine ort has fixed operators, whatever the documents"
    return "model.attention is eager" if recipe.model.attention == "eager" else ""


def too_long_for_mask_text_or_empty(sample_tokens: int | None, mask_reason: str) -> str:
    """Return what is wrong with the length of samples that need a mask; "" for nothing."""
    if not mask_reason or (sample_tokens or 0) <= LONGEST_MASKED_SAMPLE:
        return ""
    return (
        f"got {sample_tokens}, but at most {LONGEST_MASKED_SAMPLE:,} tokens may be packed where a "
        f"mask keeps documents apart, because {mask_reason}: use engine eager and model.attention "
        "auto with a model that has transformers' sdpa, shorter samples, or no packing"
    )

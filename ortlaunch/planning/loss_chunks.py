"""Rows of a chunk of the loss (`engine.chunked_loss`), which limits the logits in memory."""

from __future__ import annotations

from ortlaunch.recipe import Recipe

# By device: the number of logits in a chunk of the loss, and the least number of its rows. Fewer
# rows would be slow, because each chunk reads and writes the whole gradient of the head. Measured
# on a CPU.
_CHUNKS = {"cpu": (5 * 2**20, 128), "cuda": (2**25, 1024)}


def chunk_rows(requested: int | str, rows: int, vocabulary: int, device: str) -> int:
    """Return the rows of a chunk of the loss; 0: all logits are computed at once.

    Args:
        requested: the field `engine.chunked_loss`: auto, off or a number of rows.
        rows: rows of all logits.
        vocabulary: columns of the logits.
        device: cpu or cuda.
    """
    if requested != "auto":
        return 0 if requested == "off" else int(requested)
    logits, least = _CHUNKS[device]
    # Rounded down to a multiple of 32 rows.
    chunk = max(least, logits // vocabulary // 32 * 32)
    return chunk if chunk < rows else 0


def chunked(recipe: Recipe, tokens: int, vocabulary: int, device: str) -> int:
    """Return the rows of a chunk of the loss, or 0 if the recipe does not allow chunks.

    The model may not allow them either; the worker detects that (model/chunked_head.py).
    """
    whole = not recipe.model.traits.predicts or (recipe.zero and recipe.zero.stage == 3)
    return 0 if whole else chunk_rows(recipe.engine.chunked_loss, tokens, vocabulary, device)

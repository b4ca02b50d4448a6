"""Rows of a chunk of the loss (`engine.chunked_loss`), which limits the logits in memory."""

from __future__ import annotations

from ortlaunch.recipe import Recipe

# By device: the number of logits in a chunk of the loss, and the least number of its rows. Fewer
# rows would be slow, because each chunk reads and writes the whole gradient of the head. Measured
# on a CPU.
_CHUNKS = {"cpu": (5 * 2**20, 128), "cuda": (2**25, 1024)}


def loss_chunk_rows_or_zero(
    requested_chunk_rows: int | str, logit_rows: int, vocabulary_size: int, device: str
) -> int:
    """Return the rows of a chunk of the loss; 0: all logits are computed at once.

    Args:
        requested_chunk_rows: the field `engine.chunked_loss`: auto, off or a number of rows.
        logit_rows: rows of all logits.
        vocabulary_size: columns of the logits.
        device: cpu or cuda.
    """
    if requested_chunk_rows != "auto":
        return 0 if requested_chunk_rows == "off" else int(requested_chunk_rows)
    logits_per_chunk, least_rows = _CHUNKS[device]
    # Rounded down to a multiple of 32 rows.
    rows_per_chunk = max(least_rows, logits_per_chunk // vocabulary_size // 32 * 32)
    return rows_per_chunk if rows_per_chunk < logit_rows else 0


def loss_chunk_rows_if_recipe_allows(
    recipe: Recipe, token_count: int, vocabulary_size: int, device: str
) -> int:
    """Return the rows of a chunk of the loss, or 0 if the recipe does not allow chunks.

    The model may not allow them either; the worker detects that (model/chunked_head.py).
    """
    return (
        0
        if not recipe.model.traits.predicts or recipe.output_layer_sharding
        else loss_chunk_rows_or_zero(
            recipe.engine.chunked_loss, token_count, vocabulary_size, device
        )
    )

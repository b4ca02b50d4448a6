"""Attention within the documents of a packed sample, without a mask of length x length values.

transformers hands a mask of four dimensions to its attention functions unchanged. The function here
is one of them, and takes the numbers of the documents in the place of such a mask. It runs torch's
scaled_dot_product_attention on each document alone: time and memory grow with the squares of the
documents' lengths, not with the square of the sample's length.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

ATTENTION = "sdpa_by_document"
"""The function's name in transformers, which allows names with sdpa to models that have sdpa."""

# Tokens computed together where a document is longer than the window that a token sees. Their mask
# has this number x (this number + window) values.
_BLOCK = 1024


def register_document_attention() -> None:
    """Make `attn_implementation=ATTENTION` known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    # The lengths of documents differ from batch to batch; each would be compiled anew. Not a decorator:
    # that would import torch._dynamo, 800 modules, into every rank.
    AttentionInterface.register(ATTENTION, torch.compiler.disable(attend_within_documents))
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def window_and_document_ids(document_ids: Tensor, window: int) -> Tensor:
    """Return what `attend_within_documents` takes as a mask: (samples, 1, 1, 1 + length) int64.

    Args:
        document_ids: the number of each token's document, (samples, length).
        window: tokens that a token sees, itself included, in each direction that the model's
            attention has; 0: all.
    """
    return nn.functional.pad(document_ids, (1, 0), value=window)[:, None, None]


def attend_within_documents(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **sdpa_arguments: Any,
) -> tuple[Tensor, None]:
    """Return the output of attention: (samples, length, heads, size).

    Args:
        module: the layer.
        query: (samples, heads, length, size).
        key: as query, perhaps with fewer heads.
        value: as key.
        attention_mask: of `window_and_document_ids`. With another mask, or without one, this is
            transformers' sdpa.
        sdpa_arguments: further arguments of transformers' sdpa.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is None or attention_mask.dtype != torch.int64:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, **sdpa_arguments
        )
        return output, None
    outputs = []
    # As transformers' sdpa takes it where it has no mask.
    sees_later_tokens = not getattr(module, "is_causal", True)
    # A split has one backward pass for all parts; that of a slice would fill the whole with zeros.
    rows = zip(attention_mask[:, 0, 0].tolist(), query.split(1), key.split(1), value.split(1))
    for (window, *document_ids), *row_tensors in rows:
        lengths = [len([*tokens]) for _, tokens in itertools.groupby(document_ids)]
        for queries, keys, values in zip(*(tensor.split(lengths, dim=2) for tensor in row_tensors)):
            blocks = (
                _query_blocks_with_keys_in_window(queries, keys, values, window, sees_later_tokens)
                if 0 < window < queries.shape[2]
                else [(queries, keys, values, None)]
            )
            # Each output: (1, tokens, heads, size)
            outputs += [
                sdpa_attention_forward(module, *block, **sdpa_arguments)[0] for block in blocks
            ]
    # The rows follow one another: (1, samples x length, heads, size).
    return torch.cat(outputs, dim=1).view(query.shape[0], -1, *outputs[0].shape[2:]), None


def _query_blocks_with_keys_in_window(
    query: Tensor, key: Tensor, value: Tensor, window: int, sees_later_tokens: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield a document's queries in blocks, the keys and values that each sees, and the mask."""
    places = torch.arange(query.shape[2], device=query.device)
    for begin in range(0, query.shape[2], _BLOCK):
        tokens = slice(begin, begin + _BLOCK)
        later_tokens = window - 1 if sees_later_tokens else 0
        visible_keys = slice(max(0, begin - window + 1), begin + _BLOCK + later_tokens)
        distances = places[tokens, None] - places[visible_keys]
        mask = (distances >= -later_tokens) & (distances < window)
        yield (
            query[:, :, tokens],
            key[:, :, visible_keys],
            value[:, :, visible_keys],
            mask[None, None],
        )

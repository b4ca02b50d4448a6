"""`data.attend_across_documents: false`: no attention between documents packed into one sample.

Models of PyTorch use a mask for that. An exported graph has no such mask, and gets each document in
a row of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ortlaunch.base.errors import InputError
from ortlaunch.worker.data import IGNORED

DOCUMENTS = "document_ids"
# Tokens in each sample of the test.
_TEST_TOKENS = 8
# transformers' types of attention, and the fields of a config that limit the last two.
_FULL = "full_attention"
_LOCAL = ("sliding_attention", "chunked_attention")
_LIMITS = ("sliding_window", "attention_chunk_size")


def batch_with_documents_in_rows_or_masked(
    batch: Mapping[str, Tensor], model: nn.Module
) -> dict[str, Any]:
    """Return a packed batch in the form that the model accepts."""
    # An exported graph has no PyTorch parameters.
    parameter = next(model.parameters(), None)
    if parameter is None:
        return split_packed_documents_into_rows_or_copy_unpacked(batch)
    return replace_document_ids_by_mask(batch, parameter.dtype, getattr(model, "config", None))


def split_packed_documents_into_rows_or_copy_unpacked(
    batch: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return a packed batch with each document in a row of its own: (documents, longest).

    Any other batch is returned unchanged. The loss is the same, because neither the first token of
    a document nor padding is predicted.
    """
    if DOCUMENTS not in batch:
        return dict(batch)
    sizes = torch.cat([row.bincount() for row in batch[DOCUMENTS]]).tolist()
    packed_batch = {**batch, "attention_mask": torch.ones_like(batch[DOCUMENTS])}
    fill_values = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}
    return {
        name: pad_sequence(
            packed_batch[name].flatten().split(sizes), batch_first=True, padding_value=value
        )
        for name, value in fill_values.items()
    }


def replace_document_ids_by_mask(
    batch: Mapping[str, Tensor], dtype: torch.dtype, config: Any = None
) -> dict[str, Any]:
    """Return a batch for transformers' models: `attention_mask` instead of `document_ids`.

    Args:
        batch: has `document_ids`, (samples, length).
        dtype: the dtype of the weights.
        config: the model's config; None: of a model whose tokens see all earlier ones.

    Returns:
        The batch with a mask (samples, 1, length, length) of that dtype, which is added to the
        scores of attention: 0 if a token attends to another, else the lowest finite value. For a
        model with several types of layers it is a mapping from type to mask.
    """
    documents = batch[DOCUMENTS]
    token_places = torch.arange(documents.shape[1], device=documents.device)
    distances = token_places[:, None] - token_places[None, :]
    is_visible = (documents[:, None, :, None] == documents[:, None, None, :]) & (distances >= 0)
    hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=documents.device)
    masks = {}
    for attention_type, size in _visible_token_limit_by_attention_type(config).items():
        is_near = is_visible
        if size and attention_type == "chunked_attention":
            chunks = batch["position_ids"] // size
            is_near = is_visible & (chunks[:, None, :, None] == chunks[:, None, None, :])
        elif size:
            is_near = is_visible & (distances < size)
        masks[attention_type] = torch.where(is_near, torch.zeros_like(hidden), hidden)
    # transformers' models with `layer_types` take a mask for each type; others take one mask.
    (first_mask, *_) = masks.values()
    has_types = getattr(_text_config(config), "layer_types", None) and masks.keys() != {_FULL}
    return {
        **{name: value for name, value in batch.items() if name != DOCUMENTS},
        "attention_mask": masks if has_types else first_mask,
    }


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _visible_token_limit_by_attention_type(config: Any) -> dict[str, int]:
    """Return a model's types of attention, each with the number of tokens seen; 0: all.

    transformers leaves such limits out of a mask that it is given.
    """
    text = _text_config(config)
    sizes = {
        _FULL: 0,
        **{
            attention_type: getattr(text, name, None) or 0
            for attention_type, name in zip(_LOCAL, _LIMITS)
        },
    }
    types = getattr(text, "layer_types", None)
    if types is None:
        attention_type = next((type_name for type_name in _LOCAL if sizes[type_name]), _FULL)
        return {attention_type: sizes[attention_type]}
    # Layers that are no attention, as convolutions, take no such mask.
    return (
        {type_name: sizes[type_name] for type_name in sorted({*types})}
        if {*types} <= {*sizes}
        else {_FULL: 0}
    )


@torch.no_grad()
def require_model_separates_documents(model: nn.Module) -> None:
    """Check on a few tokens that a document has the scores in a pack that it has alone.

    Raises:
        InputError: it has others, or the model does not accept such a mask.
    """
    # Two samples: different first documents, the same second document.
    half = _TEST_TOKENS // 2
    ids = torch.arange(2 * _TEST_TOKENS).reshape(2, _TEST_TOKENS) % 3
    ids[:, half:] = ids[0, half:]
    batch = {"input_ids": ids, "position_ids": (torch.arange(_TEST_TOKENS) % half).expand(2, -1),
             DOCUMENTS: (torch.arange(_TEST_TOKENS) // half).expand(2, -1)}  # fmt: skip
    lone_documents = {"input_ids": ids[:, half:], "position_ids": batch["position_ids"][:, half:]}
    config = getattr(model, "config", None)
    name = type(model).__name__
    dtype = next(model.parameters()).dtype
    try:
        with (
            _evaluation_mode_until_end(model),
            _shrink_attention_limits_until_end(_text_config(config)),
        ):
            expected = model(**lone_documents, attention_mask=None).logits
            separate_difference, joined_difference = (
                _largest_logit_difference_of_second(
                    model(**replace_document_ids_by_mask(tested_batch, dtype, config)).logits,
                    expected,
                )
                for tested_batch in (batch, {**batch, DOCUMENTS: torch.zeros_like(ids)})
            )
    # A model without such an argument may raise any exception.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"data.attend_across_documents: {name} does not accept a document mask: {reason}"
        ) from error
    # Other kernels may round a little: a tenth of the influence without mask is no influence.
    if separate_difference > max(joined_difference / 10, 1e-6):
        raise InputError(
            f"data.attend_across_documents: {name} gives a document other scores beside another "
            "one than alone, despite the mask"
        )


def _largest_logit_difference_of_second(logits: Tensor, expected: Tensor) -> float:
    """Return the largest difference of the second documents' logits, relative to their maximum."""
    second = logits[:, _TEST_TOKENS // 2 :].float()
    return float((second - expected.float()).abs().max() / expected.float().abs().max())


@contextlib.contextmanager
def _shrink_attention_limits_until_end(config: Any) -> Iterator[None]:
    """Make the limits of a model's attention so small that the test's documents exceed them."""
    names = [name for name in _LIMITS if getattr(config, name, None)]
    former_limits = [getattr(config, name) for name in names]
    try:
        for name in names:
            setattr(config, name, _TEST_TOKENS // 4)
        yield
    finally:
        for name, value in zip(names, former_limits):
            setattr(config, name, value)


@contextlib.contextmanager
def _evaluation_mode_until_end(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)

"""`data.attend_across_documents: false`: no attention between documents packed into one sample.

Models of PyTorch attend within each document (document_attention.py) where their attention and the
engine permit that, and use a mask of length x length values elsewhere. An exported graph has no
such mask, and gets each document in a row of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.rnn import pad_sequence

from ortlaunch.base.errors import InputError
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.rules.document_mask import (
    document_mask_reason_or_empty,
    too_long_for_mask_text_or_empty,
)
from ortlaunch.tables.model_tasks import ModelTask
from ortlaunch.worker.data import IGNORED
from ortlaunch.worker.model.document_attention import (
    ATTENTION,
    register_document_attention,
    window_and_document_ids,
)

DOCUMENTS = "document_ids"
# Tokens in each sample of the test.
_TEST_TOKENS = 8
# transformers' types of attention, and the fields of a config that limit the last two.
_FULL = "full_attention"
_LOCAL = ("sliding_attention", "chunked_attention")
_LIMITS = ("sliding_window", "attention_chunk_size")


class PackTraits(NamedTuple):
    """How a model reads the documents of a pack."""

    sees_later_tokens: bool = False
    first_position: int = 0
    """The position of a document's first token: RoBERTa's come after that of padding."""


CAUSAL = PackTraits()


def pack_traits_of_model(model: nn.Module, task: ModelTask) -> PackTraits:
    """Return how a model reads packs of a task."""
    padding_positions = (
        module.padding_idx
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
    )
    padding_position = next(padding_positions, None)
    first_position = 0 if padding_position is None else padding_position + 1
    return PackTraits(task.predicts == "masked", first_position)


def batch_with_documents_apart(
    batch: Mapping[str, Tensor], model: nn.Module, traits: PackTraits
) -> dict[str, Any]:
    """Return a packed batch in the form that the model accepts."""
    # An exported graph has no PyTorch parameters.
    parameter = next(model.parameters(), None)
    if parameter is None:
        return split_packed_documents_into_rows_or_copy_unpacked(batch)
    config = getattr(model, "config", None)
    # The prediction of a step has tensors without values.
    if getattr(config, "_attn_implementation", None) == ATTENTION and not isinstance(
        batch[DOCUMENTS], FakeTensor
    ):
        return replace_document_ids_by_windows(batch, config, traits)
    return replace_document_ids_by_mask(batch, parameter.dtype, config, traits)


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


def values_of_rows_as_packed(
    values_by_name: Mapping[str, Tensor], document_ids: Tensor
) -> dict[str, Tensor]:
    """Return values of documents in rows of their own, (documents, longest, ...), as packed."""
    sizes = torch.cat([row.bincount() for row in document_ids]).tolist()
    return {
        name: torch.cat([row[:size] for row, size in zip(rows, sizes)]).unflatten(
            0, document_ids.shape
        )
        for name, rows in values_by_name.items()
    }


def replace_document_ids_by_mask(
    batch: Mapping[str, Tensor],
    dtype: torch.dtype,
    config: Any = None,
    traits: PackTraits = CAUSAL,
) -> dict[str, Any]:
    """Return a batch for transformers' models: `attention_mask` instead of `document_ids`.

    Args:
        batch: has `document_ids`, (samples, length).
        dtype: the dtype of the weights.
        config: the model's config; None: of a model whose tokens see all earlier ones.
        traits: how the model reads packs.

    Returns:
        The batch with a mask (samples, 1, length, length) of that dtype, which is added to the
        scores of attention: 0 if a token attends to another, else the lowest finite value. For a
        model with several types of layers it is a mapping from type to mask.
    """
    documents = batch[DOCUMENTS]
    token_places = torch.arange(documents.shape[1], device=documents.device)
    distances = token_places[:, None] - token_places[None, :]
    is_visible = documents[:, None, :, None] == documents[:, None, None, :]
    if traits.sees_later_tokens:
        distances = distances.abs()
    else:
        is_visible = is_visible & (distances >= 0)
    hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=documents.device)

    def mask_of_type(attention_type: str, size: int) -> Tensor:
        is_near = is_visible
        if size and attention_type == "chunked_attention":
            chunks = batch["position_ids"] // size
            is_near = is_visible & (chunks[:, None, :, None] == chunks[:, None, None, :])
        elif size:
            is_near = is_visible & (distances < size)
        return torch.where(is_near, torch.zeros_like(hidden), hidden)

    return _batch_with_mask_of_each_type(batch, config, traits, mask_of_type)


def replace_document_ids_by_windows(
    batch: Mapping[str, Tensor], config: Any, traits: PackTraits
) -> dict[str, Any]:
    """Return a batch for a model whose attention is `document_attention.ATTENTION`."""

    def mask_of_type(attention_type: str, size: int) -> Tensor:
        documents = batch[DOCUMENTS]
        if size and attention_type == "chunked_attention":
            # Chunks of a document do not see each other, as documents.
            documents = documents * documents.shape[1] + batch["position_ids"] // size
            size = 0
        return window_and_document_ids(documents, size)

    return _batch_with_mask_of_each_type(batch, config, traits, mask_of_type)


def _batch_with_mask_of_each_type(
    batch: Mapping[str, Tensor],
    config: Any,
    traits: PackTraits,
    mask_of_type: Callable[[str, int], Tensor],
) -> dict[str, Any]:
    masks = {
        # Where tokens see later ones, the limit leaves out the token itself.
        attention_type: mask_of_type(attention_type, size + (size > 0 and traits.sees_later_tokens))
        for attention_type, size in _visible_token_limit_by_attention_type(config).items()
    }
    # transformers' models with `layer_types` take a mask for each type; others take one mask.
    (first_mask, *_) = masks.values()
    has_types = getattr(_text_config(config), "layer_types", None) and masks.keys() != {_FULL}
    model_batch = {name: value for name, value in batch.items() if name != DOCUMENTS}
    if traits.first_position:
        model_batch["position_ids"] = batch["position_ids"] + traits.first_position
    return {
        **model_batch,
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


def choose_document_form_or_refuse(model: nn.Module, recipe: Recipe) -> str:
    """Let the model attend within documents, or return the reason why a mask keeps them apart.

    Raises:
        InputError: the samples are too long for a mask, or the model does not respect it.
    """
    traits = pack_traits_of_model(model, recipe.model.traits)
    reason = document_mask_reason_or_empty(recipe) or _reason_against_document_attention(
        model, traits
    )
    if reason:
        if problem := too_long_for_mask_text_or_empty(recipe.data.sequence_length, reason):
            raise InputError(f"data.sequence_length: {problem}")
        require_model_separates_documents(model, traits)
    return reason


def _reason_against_document_attention(model: Any, traits: PackTraits) -> str:
    """Let the model attend within documents and return "", or the reason why it cannot."""
    name = type(model).__name__
    config = getattr(model, "config", None)
    former_attention = getattr(config, "_attn_implementation", None)
    if former_attention != "sdpa":
        return f"{name} has no sdpa attention of transformers"
    try:
        expected = _second_document_logits_alone(model)
        set_document_attention(model)
        separate_difference, joined_difference = _differences_beside_first_document(
            model, expected, lambda batch: replace_document_ids_by_windows(batch, config, traits)
        )
        if separate_difference <= max(joined_difference / 10, 1e-6):
            return ""
        reason = f"{name} gives a document other scores in a pack than alone with {ATTENTION}"
    # A model whose attention is not transformers' may raise any exception.
    except Exception as error:
        reason = f"{name} does not run {ATTENTION}: {' '.join(str(error).split())[:200]}"
    model.set_attn_implementation(former_attention)
    return reason


def packed_documents_text_or_none(mask_reason: str | None, sample_tokens: int) -> str | None:
    """Return how documents are kept apart: for a reason against attention, None without packs."""
    if mask_reason is None:
        return None
    if not mask_reason:
        return f"each attends alone ({ATTENTION}), without a mask"
    mebibytes = 4 * sample_tokens**2 / 2**20
    return (
        f"apart by a mask of {sample_tokens:,} x {sample_tokens:,} values (in float32 "
        f"{mebibytes:,.1f} MiB a sample): {mask_reason}"
    )


def set_document_attention(model: Any) -> None:
    """Make a model of transformers attend within documents; other batches are sdpa's, as before."""
    register_document_attention()
    model.set_attn_implementation(ATTENTION)


def require_model_separates_documents(model: nn.Module, traits: PackTraits = CAUSAL) -> None:
    """Check on a few tokens that a document has the scores in a masked pack that it has alone.

    Raises:
        InputError: it has others, or the model does not accept such a mask.
    """
    config = getattr(model, "config", None)
    name = type(model).__name__
    dtype = next(model.parameters()).dtype
    try:
        separate_difference, joined_difference = _differences_beside_first_document(
            model,
            _second_document_logits_alone(model),
            lambda batch: replace_document_ids_by_mask(batch, dtype, config, traits),
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


def _test_batch(model: nn.Module) -> dict[str, Tensor]:
    """Return two samples: different first documents, the same second document."""
    half = _TEST_TOKENS // 2
    # RoBERTa's own positions do not count tokens of padding.
    padding_id = getattr(getattr(model, "config", None), "pad_token_id", None)
    used_ids = torch.tensor([token_id for token_id in range(4) if token_id != padding_id])[:3]
    ids = used_ids[torch.arange(2 * _TEST_TOKENS).reshape(2, _TEST_TOKENS) % 3]
    ids[:, half:] = ids[0, half:]
    return {"input_ids": ids, "position_ids": (torch.arange(_TEST_TOKENS) % half).expand(2, -1),
            DOCUMENTS: (torch.arange(_TEST_TOKENS) // half).expand(2, -1)}  # fmt: skip


@torch.no_grad()
def _second_document_logits_alone(model: nn.Module) -> Tensor:
    half = _TEST_TOKENS // 2
    with _small_limits_and_evaluation_mode_until_end(model):
        # The model's own positions, which those of packs must be.
        logits: Tensor = model(_test_batch(model)["input_ids"][:, half:]).logits
    return logits


@torch.no_grad()
def _differences_beside_first_document(
    model: nn.Module,
    expected: Tensor,
    replace_ids: Callable[[Mapping[str, Tensor]], dict[str, Any]],
) -> tuple[float, float]:
    """Return the differences of the second documents' logits: documents apart, and joined."""
    batch = _test_batch(model)
    joined_batch = {**batch, DOCUMENTS: torch.zeros_like(batch[DOCUMENTS])}
    with _small_limits_and_evaluation_mode_until_end(model):
        separate, joined = (
            _largest_logit_difference_of_second(model(**replace_ids(tested)).logits, expected)
            for tested in (batch, joined_batch)
        )
    return separate, joined


def _largest_logit_difference_of_second(logits: Tensor, expected: Tensor) -> float:
    """Return the largest difference of the second documents' logits, relative to their maximum."""
    second = logits[:, _TEST_TOKENS // 2 :].float()
    return float((second - expected.float()).abs().max() / expected.float().abs().max())


@contextlib.contextmanager
def _small_limits_and_evaluation_mode_until_end(model: nn.Module) -> Iterator[None]:
    """Turn dropout off, and let a token see fewer others than the test's documents have."""
    config = _text_config(getattr(model, "config", None))
    former_limits = {name: getattr(config, name, None) for name in _LIMITS}
    training = model.training
    model.eval()
    try:
        for name, limit in former_limits.items():
            if limit:
                setattr(config, name, _TEST_TOKENS // 4)
        yield
    finally:
        for name, limit in former_limits.items():
            if limit:
                setattr(config, name, limit)
        model.train(training)

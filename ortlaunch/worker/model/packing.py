"""`data.attend_across_documents: false`: no attention between documents packed into one sample.

Models of PyTorch use a mask for that. An exported graph has no such mask, and gets each document in
a row of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ortlaunch.errors import InputError
from ortlaunch.worker.data import IGNORED

DOCUMENTS = "document_ids"
# Tokens in each sample of the test.
_TRIED = 8


def separated(batch: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return a packed batch in the form that the model accepts."""
    # An exported graph has no PyTorch parameters.
    parameter = next(model.parameters(), None)
    return one_a_row(batch) if parameter is None else with_mask(batch, parameter.dtype)


def one_a_row(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a packed batch with each document in a row of its own: (documents, longest).

    Any other batch is returned unchanged. The loss is the same, because neither the first token of
    a document nor padding is predicted.
    """
    if DOCUMENTS not in batch:
        return dict(batch)
    sizes = torch.cat([row.bincount() for row in batch[DOCUMENTS]]).tolist()
    given = {**batch, "attention_mask": torch.ones_like(batch[DOCUMENTS])}
    fill = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}
    return {
        name: pad_sequence(
            given[name].flatten().split(sizes), batch_first=True, padding_value=value
        )
        for name, value in fill.items()
    }


def with_mask(batch: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a batch for transformers' models: `attention_mask` instead of `document_ids`.

    Args:
        batch: has `document_ids`, (samples, length).
        dtype: the dtype of the weights.

    Returns:
        The batch with a mask (samples, 1, length, length) of that dtype, which is added to the
        scores of attention: 0 if a token attends to another, else the lowest finite value.
    """
    documents = batch[DOCUMENTS]
    places = torch.arange(documents.shape[1], device=documents.device)
    seen = (documents[:, None, :, None] == documents[:, None, None, :]) & (
        places[:, None] >= places[None, :]
    )
    hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=documents.device)
    mask = torch.where(seen, torch.zeros_like(hidden), hidden)
    return {
        **{name: value for name, value in batch.items() if name != DOCUMENTS},
        "attention_mask": mask,
    }


@torch.no_grad()
def require_separate(model: nn.Module) -> None:
    """Check on a few tokens that the first document does not influence the second.

    Raises:
        InputError: it does, or the model does not accept such a mask.
    """
    # Two samples: different first documents, the same second document.
    ids = torch.arange(2 * _TRIED).reshape(2, _TRIED) % 3
    ids[:, _TRIED // 2 :] = ids[0, _TRIED // 2 :]
    half = torch.arange(_TRIED) // (_TRIED // 2)
    batch = {"input_ids": ids, "position_ids": (torch.arange(_TRIED) % (_TRIED // 2)).expand(2, -1),
             DOCUMENTS: half.expand(2, -1)}  # fmt: skip
    name = type(model).__name__
    masked = with_mask(batch, next(model.parameters()).dtype)
    try:
        with _evaluating(model):
            apart, without = (
                _largest(model(**each).logits)
                for each in (masked, {**masked, "attention_mask": None})
            )
    # A model without such an argument may raise any exception.
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise InputError(
            f"data.attend_across_documents: {name} does not accept a document mask: {why}"
        ) from error
    # Other kernels may round a little: a hundredth of the influence without mask is no influence.
    if apart > max(without / 100, 1e-6):
        raise InputError(
            f"data.attend_across_documents: {name} lets a document attend to another despite "
            "the mask"
        )


def _largest(logits: Tensor) -> float:
    """Return the largest difference of the second documents' logits, relative to their maximum."""
    second = logits[:, _TRIED // 2 :].float()
    return float((second[0] - second[1]).abs().max() / second.abs().max())


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)

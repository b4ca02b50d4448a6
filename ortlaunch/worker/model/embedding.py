"""Task embedding: a vector for each text, and losses that compare vectors.

The losses are sentence-transformers' of the same names (version 6.2), computed over all ranks.
Shapes: S samples of this rank, A of all ranks, T texts of a sample, L tokens, W values of a vector.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ortlaunch.base.errors import InputError
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.compared_texts import Embedding
from ortlaunch.worker.model.text_loss_module import RowsOfRanks, TextLossModule


class TextEncoder(nn.Module):
    """A model of transformers with pooling: (texts, L) tokens to (texts, W) vectors."""

    def __init__(self, model: nn.Module, settings: Embedding) -> None:
        super().__init__()
        self.model = model
        self.pooling = settings.pooling
        self.normalize = settings.normalize

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        output = self.model(input_ids=input_ids, attention_mask=attention_mask)
        hidden = output.last_hidden_state
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        if self.pooling == "mean":
            mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
            vectors = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        else:
            # The first or last token that is no padding, on whichever side the padding is.
            positions = torch.arange(1, attention_mask.size(1) + 1, device=hidden.device)
            places = attention_mask * (positions if self.pooling == "last" else positions.flip(0))
            index = places.argmax(1)
            vectors = hidden.gather(1, index[:, None, None].expand(-1, 1, hidden.size(-1)))[:, 0]
        return functional.normalize(vectors, dim=-1) if self.normalize else vectors


class EmbeddingLossModule(TextLossModule):
    """The loss of a model's vectors, by `model.embedding`."""

    output_name = "embeddings"
    texts_without_margin = 2

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        settings = recipe.model.text_comparison
        assert isinstance(settings, Embedding)
        super().__init__(model, TextEncoder(model, settings))
        self.settings = settings
        self.loss_traits = settings.traits
        self.mini_batch = settings.mini_batch
        self.needed_values = ("input_ids", "attention_mask", "text_ids") + (
            ("labels",) if settings.traits.label else ()
        )
        config: Any = getattr(model, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            raise InputError(
                f"model.task: got embedding with {config.model_type}, which has a decoder; use a model "
                "that is an encoder, or a decoder, alone"
            )
        width = getattr(config, "hidden_size", None)
        if width and max(settings.dimensions, default=0) > width:
            raise InputError(
                f"model.embedding.dimensions: got {max(settings.dimensions)}, and the model's vectors "
                f"have {width} values"
            )

    def loss_of_outputs(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return embedding_loss(self.settings, outputs, batch, self.ranks)


def embedding_loss(
    settings: Embedding, embeddings: Tensor, batch: dict[str, Tensor], ranks: RowsOfRanks
) -> Tensor:
    """Return the loss of embeddings.

    Args:
        settings: the loss and its numbers.
        embeddings: (S, T, W).
        batch: `text_ids` (S, T), and `labels` where the loss needs them.
        ranks: gathers samples of other ranks.
    """
    loss_of_vectors = _LOSSES[settings.loss]
    if not settings.dimensions:
        return loss_of_vectors(settings, embeddings, batch, ranks)
    # As sentence-transformers' Matryoshka loss: a sum, of vectors of length 1.
    losses = [
        loss_of_vectors(
            settings, functional.normalize(embeddings[..., :size], dim=-1), batch, ranks
        )
        for size in sorted(settings.dimensions, reverse=True)
    ]
    return torch.stack(losses).sum()


def _ranking_loss(
    settings: Embedding, embeddings: Tensor, batch: dict[str, Tensor], ranks: RowsOfRanks
) -> Tensor:
    """InfoNCE: cross entropy of the right document among all documents of the batch."""
    vectors = functional.normalize(embeddings, dim=-1)
    all_vectors = ranks.gather(vectors)
    all_ids = ranks.gather(batch["text_ids"])
    samples = len(vectors)
    own_indices = torch.arange(samples, device=vectors.device) + ranks.rank * samples
    # Scores of all samples with all documents would be as large as the square of the batch.
    loss_of_part: Any = (
        functools.partial(checkpoint, _ranking_loss_of_part, use_reentrant=False)
        if settings.mini_batch
        else _ranking_loss_of_part
    )
    parts = zip(*(value.split(settings.mini_batch or samples) for value in (vectors, own_indices)))
    losses = [
        loss_of_part(settings, part_vectors, part_indices, all_vectors, all_ids)
        for part_vectors, part_indices in parts
    ]
    return torch.stack(losses).sum() / samples


def _ranking_loss_of_part(
    settings: Embedding, vectors: Tensor, own_indices: Tensor, all_vectors: Tensor, all_ids: Tensor
) -> Tensor:
    """Return the sum of the losses of P samples.

    Args:
        settings: temperature and direction.
        vectors: (P, T, W), of length 1.
        own_indices: (P,), the places of these samples among all.
        all_vectors: (A, T, W).
        all_ids: (A, T), equal for equal texts.
    """
    queries, positives = vectors[:, 0], vectors[:, 1]
    # All positives come first, then all first negatives, and so on.
    documents = all_vectors[:, 1:].transpose(0, 1).flatten(0, 1)
    is_right = _is_right_of_own(
        all_ids[:, 0], all_ids[:, 1], all_ids[own_indices, 0], all_ids[:, 1:].T.flatten()
    )
    loss = _cross_entropy_of_cosines(settings, queries @ documents.T, own_indices, is_right)
    if not settings.symmetric:
        return loss
    is_right = _is_right_of_own(
        all_ids[:, 1], all_ids[:, 0], all_ids[own_indices, 1], all_ids[:, 0]
    )
    scores = positives @ all_vectors[:, 0].T
    return (loss + _cross_entropy_of_cosines(settings, scores, own_indices, is_right)) / 2


def _is_right_of_own(
    paired_ids: Tensor, partner_ids: Tensor, own_ids: Tensor, candidate_ids: Tensor
) -> Tensor:
    """Return for each own text which candidates are its partner in any sample.

    Args:
        paired_ids: (A,) texts of all samples.
        partner_ids: (A,) the text that is right for each of them.
        own_ids: (S,) of `paired_ids`.
        candidate_ids: (C,) texts that are compared with each own one.

    Returns:
        (S, C).
    """
    distinct_ids, numbers = torch.cat([partner_ids, candidate_ids]).unique(return_inverse=True)
    partners, candidates = numbers.split([len(partner_ids), len(candidate_ids)])
    is_same = (own_ids[:, None] == paired_ids).int()  # (S, A)
    counts = is_same.new_zeros(len(own_ids), len(distinct_ids))
    counts.scatter_add_(1, partners.expand(len(own_ids), -1), is_same)
    return (counts > 0)[:, candidates]


def _cross_entropy_of_cosines(
    settings: Embedding, cosines: Tensor, own_indices: Tensor, is_right: Tensor
) -> Tensor:
    """Return the sum of the cross entropies of column own_indices[i] of row i; no other right column is a wrong one."""
    is_left_out = is_right.scatter(1, own_indices[:, None], False)
    scores = (cosines / settings.temperature).masked_fill(is_left_out, -torch.inf)
    return functional.cross_entropy(scores, own_indices, reduction="sum")


def _cosent_loss(
    settings: Embedding, embeddings: Tensor, batch: dict[str, Tensor], ranks: RowsOfRanks
) -> Tensor:
    """CoSENT: a pair with a lower score shall not have a higher cosine."""
    cosines = ranks.gather(functional.cosine_similarity(embeddings[:, 0], embeddings[:, 1], dim=-1))
    scores = ranks.gather(batch["labels"])
    differences = (cosines[:, None] - cosines[None]) / settings.temperature
    is_lower = scores[:, None] < scores[None]
    counted = differences.masked_fill(~is_lower, -torch.inf).flatten()
    return torch.logsumexp(torch.cat([counted.new_zeros(1), counted]), dim=0)


def _cosine_error_loss(
    settings: Embedding, embeddings: Tensor, batch: dict[str, Tensor], ranks: RowsOfRanks
) -> Tensor:
    cosines = functional.cosine_similarity(embeddings[:, 0], embeddings[:, 1], dim=-1)
    return functional.mse_loss(cosines, batch["labels"].to(cosines.dtype))


def _triplet_loss(
    settings: Embedding, embeddings: Tensor, batch: dict[str, Tensor], ranks: RowsOfRanks
) -> Tensor:
    query, positive, negative = embeddings.unbind(1)
    if settings.distance == "cosine":
        near, far = (
            1 - functional.cosine_similarity(query, other, dim=-1) for other in (positive, negative)
        )
    else:
        near, far = (
            torch.linalg.vector_norm(query - other, dim=-1) for other in (positive, negative)
        )
    return functional.relu(near - far + settings.margin).mean()


def _margin_error_loss(
    settings: Embedding, embeddings: Tensor, batch: dict[str, Tensor], ranks: RowsOfRanks
) -> Tensor:
    products = (embeddings[:, :1] * embeddings[:, 1:]).sum(-1)  # (S, T - 1)
    margins = products[:, :1] - products[:, 1:]
    return functional.mse_loss(margins, batch["labels"].to(margins.dtype))


_LOSSES: dict[str, Callable[[Embedding, Tensor, dict[str, Tensor], RowsOfRanks], Tensor]] = {
    "multiple-negatives-ranking": _ranking_loss,
    "cosent": _cosent_loss,
    "cosine-mse": _cosine_error_loss,
    "triplet": _triplet_loss,
    "margin-mse": _margin_error_loss,
}

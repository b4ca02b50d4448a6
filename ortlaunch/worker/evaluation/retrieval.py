"""Metrics of tasks that compare texts: how well documents are found, ranked and scored.

The outputs of all ranks are gathered on rank 0 in the order of the samples, so that no metric
depends on the number of ranks. Definitions are those of sentence-transformers' evaluators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ortlaunch.recipe.fields.compared_texts import Embedding
from ortlaunch.worker.evaluation.evaluated_model import EvaluatedModel
from ortlaunch.worker.evaluation.scores import import_torchmetrics_quietly
from ortlaunch.worker.model.embedding import embedding_loss
from ortlaunch.worker.model.text_loss_module import RowsOfRanks
from ortlaunch.worker.process_group.distributed import DistributedContext

_Array = NDArray[Any]
# Documents of a query that count in metrics "at 10".
_FIRST_DOCUMENTS = 10
# Samples that the loss of an evaluation compares, whatever the batches of the training were and of the
# evaluation are: it is then the same in the run, in `ortlaunch evaluate` and of runs with other batches.
_SAMPLES_OF_LOSS = 64
# Queries whose scores with all documents are computed at once.
_QUERIES_AT_ONCE = 1024


class _OutputsOfSamples:
    """Outputs and values of all samples, kept on each rank and joined on rank 0."""

    value_names: tuple[str, ...] = ()
    """Values of a batch that the metrics read beside the output."""
    output_name = ""

    def __init__(self, evaluated_model: EvaluatedModel) -> None:
        self._settings = evaluated_model.recipe.model.text_comparison
        self._kept: dict[str, list[_Array]] = {}
        # Samples of each turn of this rank.
        self._turns: list[int] = []

    def count_micro_batch(self, output: Any, batch: Mapping[str, Tensor], is_counted: bool) -> None:
        """Keep the outputs of a batch; with `is_counted` false it only fills a rank's turn."""
        if output is None or self.output_name not in output:
            return
        values = {self.output_name: output[self.output_name]}
        values |= {name: batch[name] for name in self.value_names if name in batch}
        samples = len(output[self.output_name]) if is_counted else 0
        self._turns.append(samples)
        for name, value in values.items():
            wide = value.float() if value.is_floating_point() else value
            self._kept.setdefault(name, []).append(wide[:samples].cpu().numpy())

    def metrics_over_ranks(self, group: DistributedContext, loss: float) -> dict[str, float]:
        """Return the metrics by their names in the table (collective)."""
        rank_arrays = {name: np.concatenate(arrays) for name, arrays in self._kept.items()}
        by_rank = group.gather_arrays_on_rank_0({**rank_arrays, "turns": np.array(self._turns)})
        metrics: dict[str, float] = {}
        if rank_arrays and by_rank:
            # Ranks take turns, so the samples of a turn are those of rank 0, rank 1, and so on.
            begins = [np.cumsum([0, *arrays["turns"]]) for arrays in by_rank]
            values = {
                name: torch.from_numpy(
                    np.concatenate(
                        [
                            arrays[name][begin[turn] : begin[turn + 1]]
                            for turn in range(len(self._turns))
                            for arrays, begin in zip(by_rank, begins)
                        ]
                    )
                )
                for name in rank_arrays
            }
            metrics = self.metrics_of_all_samples(values)
        return dict(group.gather({k: v for k, v in metrics.items() if math.isfinite(v)})[0])

    def metrics_of_all_samples(self, values: dict[str, Tensor]) -> dict[str, float]:
        """Return the metrics of the values of all samples."""
        raise NotImplementedError


class EmbeddingScores(_OutputsOfSamples):
    """Retrieval of a query's right documents among all documents, or correlation with scores."""

    output_name = "embeddings"
    value_names = ("text_ids", "labels")

    def metrics_of_all_samples(self, values: dict[str, Tensor]) -> dict[str, float]:
        settings = self._settings
        assert isinstance(settings, Embedding)
        embeddings = values["embeddings"]
        metrics = {}
        if settings.traits.is_over_batch:
            size = _SAMPLES_OF_LOSS
            total = sum(
                float(
                    embedding_loss(
                        settings,
                        embeddings[begin : begin + size],
                        {
                            name: value[begin : begin + size]
                            for name, value in values.items()
                            if name != "embeddings"
                        },
                        RowsOfRanks(),
                    )
                )
                * len(embeddings[begin : begin + size])
                for begin in range(0, len(embeddings), size)
            )
            metrics["loss"] = total / len(embeddings)
        vectors = functional.normalize(embeddings, dim=-1)
        if settings.traits.label == "score":
            cosines = (vectors[:, 0] * vectors[:, 1]).sum(-1)
            return {**metrics, **_correlations(cosines, values["labels"])}
        metrics |= _retrieval_metrics(vectors, values["text_ids"])
        if vectors.size(1) > 2:
            cosines = (vectors[:, :1] * vectors[:, 1:3]).sum(-1)
            metrics["triplet_accuracy"] = float((cosines[:, 0] > cosines[:, 1]).double().mean())
        return metrics


def _correlations(predicted: Tensor, labels: Tensor) -> dict[str, float]:
    functions = import_torchmetrics_quietly().functional
    return {
        "pearson": float(functions.pearson_corrcoef(predicted.double(), labels.double())),
        "spearman": float(functions.spearman_corrcoef(predicted.double(), labels.double())),
    }


def _retrieval_metrics(vectors: Tensor, text_ids: Tensor) -> dict[str, float]:
    """Return how well each distinct query finds its right documents among all distinct documents.

    Args:
        vectors: (samples, texts, width), of length 1.
        text_ids: (samples, texts), equal for equal texts.
    """
    query_ids, query_index = np.unique(text_ids[:, 0].numpy(), return_inverse=True)
    document_ids, first_places, document_index = np.unique(
        text_ids[:, 1:].numpy(), return_index=True, return_inverse=True
    )
    queries = torch.empty(len(query_ids), vectors.size(-1))
    queries[torch.from_numpy(query_index)] = vectors[:, 0]
    documents = vectors[:, 1:].flatten(0, 1)[torch.from_numpy(first_places)]
    right_index = document_index.reshape(len(text_ids), -1)[:, 0]
    right_pairs = {*zip(query_index.tolist(), right_index.tolist())}
    right_counts = np.zeros(len(query_ids))
    for query, _ in right_pairs:
        right_counts[query] += 1
    count = min(_FIRST_DOCUMENTS, len(document_ids))
    nearest_documents = np.concatenate(
        [
            (part @ documents.T).topk(count).indices.numpy()
            for part in queries.split(_QUERIES_AT_ONCE)
        ]
    )
    hits = np.array(
        [
            [(query, document) in right_pairs for document in row]
            for query, row in enumerate(nearest_documents.tolist())
        ]
    )
    gains = 1 / np.log2(np.arange(2, _FIRST_DOCUMENTS + 2))
    best = np.cumsum(gains)[np.minimum(right_counts, _FIRST_DOCUMENTS).astype(int) - 1]
    reciprocal = np.where(hits.any(1), 1 / (hits.argmax(1) + 1), 0.0)
    return {
        "ndcg_at_10": float(((hits * gains[:count]).sum(1) / best).mean()),
        "mrr_at_10": float(reciprocal.mean()),
        "recall_at_10": float((hits.sum(1) / right_counts).mean()),
    }


class RankingScores(_OutputsOfSamples):
    """Order of each query's documents, and agreement of scores with labels."""

    output_name = "scores"
    value_names = ("labels", "query_id")

    def metrics_of_all_samples(self, values: dict[str, Tensor]) -> dict[str, float]:
        scores = values["scores"].double()
        assert self._settings is not None
        if self._settings.traits.label == "margins":
            labels = torch.zeros_like(scores)
            labels[:, 0] = 1.0
        else:
            labels = values["labels"].double()
        # Custom samples without it are queries of their own.
        query_ids = values.get("query_id", torch.arange(len(scores)))
        queries = query_ids[:, None].expand_as(scores).flatten()
        scores, labels = scores.flatten(), labels.flatten()
        functions = import_torchmetrics_quietly().functional
        is_binary = bool(((labels == 0) | (labels == 1)).all())
        if not is_binary:
            return _correlations(scores, labels)
        metrics = {}
        if 0 < labels.mean() < 1:
            classification = functions.classification
            metrics["average_precision"] = float(
                classification.binary_average_precision(scores.sigmoid(), labels.long())
            )
        _, query_index, counts = queries.unique(return_inverse=True, return_counts=True)
        by_query = query_index.argsort(stable=True).split(counts.tolist())
        ranked = [
            _by_place(scores[rows], labels[rows] > 0)
            for rows in by_query
            if 0 < labels[rows].sum() < len(rows)
        ]
        if ranked:
            retrieval = functions.retrieval
            for name, measure, options in (
                ("ndcg_at_10", retrieval.retrieval_normalized_dcg, {"top_k": _FIRST_DOCUMENTS}),
                ("mrr_at_10", retrieval.retrieval_reciprocal_rank, {"top_k": _FIRST_DOCUMENTS}),
                ("map", retrieval.retrieval_average_precision, {}),
            ):
                by_query_values = [float(measure(*pair, **options)) for pair in ranked]
                metrics[name] = sum(by_query_values) / len(by_query_values)
        return metrics


def _by_place(scores: Tensor, is_right: Tensor) -> tuple[Tensor, Tensor]:
    """Return positive scores in the same order, and which are right: torchmetrics leaves others out."""
    order = scores.argsort(descending=True, stable=True)
    return torch.arange(len(order), 0, -1).double(), is_right[order]

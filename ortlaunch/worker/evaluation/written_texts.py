"""Metrics of the texts that a model writes by itself: ROUGE, BLEU, chrF and exact match.

Only this module imports sacrebleu and rouge_score.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ortlaunch.base.errors import MissingDependency
from ortlaunch.recipe import Recipe
from ortlaunch.worker.data import IGNORED
from ortlaunch.worker.evaluation.evaluated_model import EvaluatedModel
from ortlaunch.worker.process_group.distributed import DistributedContext

_ROUGE = {"rouge1": "rouge1", "rouge2": "rouge2", "rougeL": "rouge_l"}


def import_text_metrics_if_model_writes(recipe: Recipe) -> tuple[Any, Any] | None:
    """Return sacrebleu and rouge_score's module of scorers; None where the model does not write.

    Raises:
        MissingDependency: one of them is not installed.
    """
    if recipe.train.generate is None:
        return None
    try:
        import sacrebleu
        from rouge_score import rouge_scorer
    except ImportError as error:
        raise MissingDependency(
            f'train.generate needs {error.name}: pip install "ortlaunch[metrics]"'
        ) from None
    return sacrebleu, rouge_scorer


class WrittenTexts:
    """The texts of one evaluation, beside those to write."""

    def __init__(self, evaluated_model: EvaluatedModel) -> None:
        self._plain = evaluated_model.plain
        self._packages = import_text_metrics_if_model_writes(evaluated_model.recipe)
        self._generate = evaluated_model.recipe.train.generate
        self._has_mesh = evaluated_model.group.mesh is not None
        self._pairs = list[tuple[str, str]]()

    def count_micro_batch(
        self, output: Any, batch: Mapping[str, torch.Tensor], is_counted: bool
    ) -> None:
        """Let the model write, in plain PyTorch; collective where ZeRO 3 or FSDP2 has split it."""
        if self._generate is None:
            return
        tokenizer, model = self._plain.tokenizer, self._plain.model
        # The weights are split, so that all ranks write as long as one does.
        is_split = self._has_mesh or hasattr(next(model.parameters()), "ds_id")
        generate: Any = model.generate
        written = generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=self._generate.max_new_tokens,
            num_beams=self._generate.beams,
            do_sample=False,
            use_cache=True,
            synced_gpus=is_split,
        )
        if is_counted:
            meant = [row[row != IGNORED] for row in batch["labels"]]
            texts = (
                [tokenizer.decode(row, skip_special_tokens=True).strip() for row in rows]
                for rows in (written, meant)
            )
            self._pairs += zip(*texts)

    def metrics_over_ranks(self, group: DistributedContext, loss: float) -> dict[str, float]:
        """Return the metrics by name (collective); none where the model does not write."""
        if self._packages is None:
            return {}
        sacrebleu, rouge_scorer = self._packages
        pairs = [pair for rank_pairs in group.gather(self._pairs) for pair in rank_pairs]
        written, meant = ([*texts] for texts in zip(*pairs))
        # As run_summarization.py's.
        scorer = rouge_scorer.RougeScorer([*_ROUGE], use_stemmer=True)
        scores = [scorer.score(target, text) for text, target in pairs]
        return {
            "exact_match": sum(text == target for text, target in pairs) / len(pairs),
            "bleu": sacrebleu.corpus_bleu(written, [meant]).score,
            "chrf": sacrebleu.corpus_chrf(written, [meant]).score,
            **{
                name: sum(score[rouge].fmeasure for score in scores) / len(pairs)
                for rouge, name in _ROUGE.items()
            },
        }

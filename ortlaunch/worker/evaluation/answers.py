"""Exact match and F1 of answers that are spans of a context, as SQuAD's script counts them.

The best span of each window is kept, and the score of "no answer". A question's answer is the best
span of all its windows, wherever they were evaluated. Where some question has no answer, the model
may give none: it does so where the least score of "no answer" exceeds that of the best span.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ortlaunch.worker.data.labelled.answer_windows import AnswerWindows
from ortlaunch.worker.evaluation.evaluated_model import EvaluatedModel
from ortlaunch.worker.evaluation.measure import SAMPLE_INDICES
from ortlaunch.worker.evaluation.scores import gather_uneven_values, import_torchmetrics_quietly
from ortlaunch.worker.process_group.distributed import DistributedContext

# run_qa.py's: the likeliest first and last tokens that are combined, and an answer's most tokens.
_BEST = 20
_MOST_TOKENS = 30
# Numbers of a window: its index, the score of no answer, of its best span, and the span.
_NUMBERS = 5


class AnswerSpans:
    """The best spans of one evaluation."""

    def __init__(self, evaluated_model: EvaluatedModel) -> None:
        samples = evaluated_model.samples
        # Custom data have no texts.
        self._samples = samples if isinstance(samples, AnswerWindows) else None
        self._numbers = list[float]()

    def count_micro_batch(
        self, output: Any, labels_by_name: Mapping[str, torch.Tensor], is_counted: bool
    ) -> None:
        """Keep the best span of each window; see MetricMeasure."""
        if self._samples is None or not is_counted:
            return
        sample_indices = labels_by_name[SAMPLE_INDICES].tolist()
        rows = (output[name].float().cpu() for name in ("start_logits", "end_logits"))
        for sample_index, start_logits, end_logits in zip(sample_indices, *rows):
            offsets, mark = self._samples.context_offsets_and_mark(sample_index, len(start_logits))
            self._numbers += [
                sample_index,
                float(start_logits[mark] + end_logits[mark]),
                *_best_span(start_logits, end_logits, torch.from_numpy(offsets)),
            ]

    def metrics_over_ranks(self, group: DistributedContext, loss: float) -> dict[str, float]:
        """Return the metrics by name (collective); none for custom data."""
        if self._samples is None:
            return {}
        numbers = torch.tensor(gather_uneven_values(group, self._numbers), dtype=torch.float64)
        windows_by_row: dict[int, list[list[float]]] = {}
        for window in sorted(numbers.reshape(-1, _NUMBERS).tolist()):
            windows_by_row.setdefault(self._samples.row_of_window(int(window[0])), []).append(
                window
            )
        questions = self._samples.questions
        may_be_none = not all(question.answers for question in questions)
        predicted = [
            {
                "id": str(row),
                "prediction_text": _answer_text(windows, questions[row].context, may_be_none),
            }
            for row, windows in windows_by_row.items()
        ]
        # SQuAD 2.0's script compares with the empty text where there is no answer.
        accepted = [
            {
                "id": str(row),
                "answers": {
                    "text": questions[row].answers or [""],
                    "answer_start": questions[row].starts or [0],
                },
            }
            for row in windows_by_row
        ]
        scores = import_torchmetrics_quietly().functional.text.squad(predicted, accepted)
        return {
            "exact_match": float(scores["exact_match"]) / 100,
            "answer_f1": float(scores["f1"]) / 100,
        }


def _best_span(
    start_logits: torch.Tensor, end_logits: torch.Tensor, offsets: torch.Tensor
) -> tuple[float, float, float]:
    """Return the score of the best span, its first character and its end; nan if there is none.

    Args:
        start_logits, end_logits: (tokens,).
        offsets: (2, tokens): characters of each token; -1 outside of the context.
    """
    count = min(_BEST, len(start_logits))
    starts, ends = (logits.topk(count).indices for logits in (start_logits, end_logits))
    token_counts = ends[None] - starts[:, None] + 1
    is_valid = (
        (offsets[0, starts] >= 0)[:, None]
        & (offsets[0, ends] >= 0)[None]
        & (token_counts >= 1)
        & (token_counts <= _MOST_TOKENS)
    )
    if not is_valid.any():
        return math.nan, 0.0, 0.0
    scores = (start_logits[starts][:, None] + end_logits[ends][None]).masked_fill(
        ~is_valid, -math.inf
    )
    start_place, end_place = divmod(int(scores.argmax()), count)
    return (
        float(scores[start_place, end_place]),
        float(offsets[0, starts[start_place]]),
        float(offsets[1, ends[end_place]]),
    )


def _answer_text(windows: list[list[float]], context: str, may_be_none: bool) -> str:
    """Return the answer to a question from the numbers of its windows."""
    spans = [window[2:] for window in windows if not math.isnan(window[2])]
    # As run_qa.py, which gives this word where no token of the context is among the likeliest.
    score, start, end = max(spans, key=lambda span: span[0]) if spans else (0.0, 0.0, 0.0)
    if may_be_none and min(window[1] for window in windows) > score:
        return ""
    return context[int(start) : int(end)] if spans else "empty"

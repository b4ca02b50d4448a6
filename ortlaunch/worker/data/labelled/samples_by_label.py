"""The table of samples by label: the class that makes them for each label of a model task."""

from __future__ import annotations

from ortlaunch.worker.data.labelled.answer_windows import AnswerWindows
from ortlaunch.worker.data.labelled.choice_texts import ChoiceTexts
from ortlaunch.worker.data.labelled.sequence_pairs import SequencePairs
from ortlaunch.worker.data.labelled_samples import (
    LabelledTexts,
    LabelSets,
    ScoredTexts,
    TaggedWords,
)

# Each is called with the source, the tokenizer, the length of a sample, and a function for progress;
# and by name with the fields of `data` that are the task's own (`data_fields` of its row).
SAMPLES_BY_LABEL: dict[str, type[LabelledTexts]] = {
    "class": LabelledTexts,
    "classes": LabelSets,
    "number": ScoredTexts,
    "word": TaggedWords,
    "span": AnswerWindows,
    "sequence": SequencePairs,
    "choice": ChoiceTexts,
}

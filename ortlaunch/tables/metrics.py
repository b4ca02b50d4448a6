"""The table of an evaluation's metrics: the class that measures each, its format, and its
direction.

Standard library only, for every side. A new metric is one row here, and the class that measures it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """The class that computes one or more metrics over an evaluation."""

    by: str
    """`module:class`; an instance is created with the engine (`worker/evaluation/measure.py`)."""
    needs_scores: bool = True
    """Whether it reads the model's scores, which otherwise are not outputs of the engine."""


@dataclass(frozen=True)
class BuiltInMetric:
    """One row of the table."""

    manual: str
    """Description for docs/reference/run-folder.md."""
    better: str
    """`min` or `max`."""
    shown: str
    """Format in a line of the log."""
    measures: Mapping[str, Measure]
    """Measure by model task; {}: the engine itself measures it for every task."""
    is_share: bool = False
    """Whether it lies between 0 and 1, as the axis of its curve does."""
    always: bool = True
    """Whether every evaluation of these tasks has the metric."""
    hub: str = ""
    """Name in a model card of the Hugging Face hub; "": the same name."""
    trainer: tuple[str, ...] = ()
    """Names in configs of Hugging Face's Trainer and its scripts, without `eval_`; a name of two
    metrics of a task means the later row."""


_WORDS = Measure("ortlaunch.worker.evaluation.word_scores:MaskedWords")
_MASKED = {"masked-lm": _WORDS, "pretraining": _WORDS}
# Perplexity follows from the loss, so the engine need not output scores.
_LOSS = Measure("ortlaunch.worker.evaluation.word_scores:LossPerplexity", needs_scores=False)
_PAIRS = Measure("ortlaunch.worker.evaluation.word_scores:SentencePairScore")
_SCORES = Measure("ortlaunch.worker.evaluation.scores:Scores")
_CLASSES = dict.fromkeys(
    ("sequence-classification", "token-classification", "image-classification", "multiple-choice"),
    _SCORES,
)
_CLASS_SETS = {
    "multi-label-classification": Measure(
        "ortlaunch.worker.evaluation.label_set_scores:LabelSetScores"
    )
}
_ANSWERS = {"question-answering": Measure("ortlaunch.worker.evaluation.answers:AnswerSpans")}
_TEXTS = {
    "seq2seq": Measure("ortlaunch.worker.evaluation.written_texts:WrittenTexts", needs_scores=False)
}
_TAGS = {"token-classification": _SCORES}
_FOUND = {
    "embedding": Measure("ortlaunch.worker.evaluation.retrieval:EmbeddingScores"),
    "reranker": Measure("ortlaunch.worker.evaluation.retrieval:RankingScores"),
}
_TRANSCRIPTS = {
    "speech-seq2seq": Measure("ortlaunch.worker.evaluation.scores:Transcripts", needs_scores=False)
}

# The order is that of a line of the log; the table of runs shows the first one that a run has.
METRICS = {
    "loss": BuiltInMetric(
        "By the run's engine, weighted as in training.", "min", "evaluation loss {:.4f}", {}
    ),
    "perplexity": BuiltInMetric(
        (
            "exp of the mean negative log likelihood per token; of masked tokens in masked "
            "language models."
        ),
        "min",
        "perplexity {:,.4g}",
        {"causal-lm": _LOSS, "span-corruption": _LOSS, **_MASKED},
    ),
    "ndcg_at_10": BuiltInMetric(
        "Normalized discounted gain of the first 10 documents of each query. Embeddings choose among "
        "all documents of the evaluation samples, a reranker among the query's own.",
        "max",
        "nDCG@10 {:.4f}",
        _FOUND,
        is_share=True,
        always=False,
        hub="ndcg",
    ),
    "mrr_at_10": BuiltInMetric(
        "Mean of 1 / place of the first right document, 0 beyond the 10th.",
        "max",
        "MRR@10 {:.4f}",
        _FOUND,
        is_share=True,
        always=False,
        hub="mrr",
    ),
    "recall_at_10": BuiltInMetric(
        "Share of a query's right documents among its first 10, of embeddings.",
        "max",
        "recall@10 {:.4f}",
        {"embedding": _FOUND["embedding"]},
        is_share=True,
        always=False,
        hub="recall",
    ),
    "map": BuiltInMetric(
        "Mean average precision of the order of each query's documents, of a reranker.",
        "max",
        "MAP {:.4f}",
        {"reranker": _FOUND["reranker"]},
        is_share=True,
        always=False,
    ),
    "average_precision": BuiltInMetric(
        "Of right pairs among all pairs, by a reranker's score.",
        "max",
        "average precision {:.4f}",
        {"reranker": _FOUND["reranker"]},
        is_share=True,
        always=False,
    ),
    "triplet_accuracy": BuiltInMetric(
        "Share of the rows whose query is nearer to the first document than to the second, by cosine.",
        "max",
        "accuracy of triplets {:.2%}",
        {"embedding": _FOUND["embedding"]},
        is_share=True,
        always=False,
    ),
    "masked_word_accuracy": BuiltInMetric(
        "Share of the masked tokens that the model predicts correctly.",
        "max",
        "accuracy of masked tokens {:.2%}",
        _MASKED,
        trainer=("accuracy",),
        is_share=True,
    ),
    "next_sentence_accuracy": BuiltInMetric(
        "Share of the sentence pairs.",
        "max",
        "accuracy of sentence pairs {:.2%}",
        {"pretraining": _PAIRS},
        is_share=True,
    ),
    "classification_accuracy": BuiltInMetric(
        "Share of the samples; of token-classification, of the words.",
        "max",
        "accuracy {:.2%}",
        _CLASSES,
        hub="accuracy",
        trainer=("accuracy",),
        is_share=True,
    ),
    "f1_micro": BuiltInMetric(
        "F1 of all classes of all samples together; a class is predicted where its logit is above 0.",
        "max",
        "micro F1 {:.4f}",
        _CLASS_SETS,
        hub="f1",
        trainer=("f1",),  # run_classification.py's is micro
        is_share=True,
    ),
    "mean_average_precision": BuiltInMetric(
        "Mean over the classes with a sample of scikit-learn's average precision; absent without.",
        "max",
        "mAP {:.4f}",
        _CLASS_SETS,
        always=False,
        hub="map",
        is_share=True,
    ),
    "f1_macro": BuiltInMetric(
        "Mean F1 of the classes that occur in labels or predictions.",
        "max",
        "F1 {:.4f}",
        {**_CLASSES, **_CLASS_SETS},
        hub="f1",
        trainer=("f1", "macro_f1"),
        is_share=True,
    ),
    "entity_precision": BuiltInMetric(
        "By tags (IOB, BILOU or IOBES): share of the given entities, right with all words and type.",
        "max",
        "precision {:.4f}",
        _TAGS,
        always=False,
        hub="precision",
        is_share=True,
    ),
    "entity_recall": BuiltInMetric(
        "Share of the meant ones.",
        "max",
        "recall {:.4f}",
        _TAGS,
        always=False,
        hub="recall",
        is_share=True,
    ),
    "entity_f1": BuiltInMetric(
        "Harmonic mean of both, as in conlleval and seqeval.",
        "max",
        "entity F1 {:.4f}",
        _TAGS,
        always=False,
        hub="f1",
        trainer=("f1",),  # run_ner.py's is seqeval's
        is_share=True,
    ),
    "entity_f1_strict": BuiltInMetric(
        "The same as in seqeval's mode strict: an entity with a fault in its tags is none, by IOB2, or "
        "BILOU and IOBES where the classes have their ends.",
        "max",
        "strict {:.4f}",
        _TAGS,
        always=False,
        is_share=True,
    ),
    "word_error_rate": BuiltInMetric(
        (
            "Words substituted, deleted and inserted, as a share of the transcripts' words, in what "
            "the model writes by itself (greedily); not for custom data."
        ),
        "min",
        "WER {:.2%}",
        _TRANSCRIPTS,
        always=False,
        hub="wer",
        trainer=("wer",),
    ),
    "exact_match": BuiltInMetric(
        (
            "Share of the questions whose answer is an accepted one, without case, articles and "
            "punctuation; of seq2seq with train.generate, of the texts written as meant."
        ),
        "max",
        "exact match {:.2%}",
        {**_ANSWERS, **_TEXTS},
        always=False,
        trainer=("exact_match", "exact"),
        is_share=True,
    ),
    "answer_f1": BuiltInMetric(
        "Mean F1 of the answers' words, each with the accepted answer nearest to it, as SQuAD's script.",
        "max",
        "F1 {:.4f}",
        _ANSWERS,
        always=False,
        hub="f1",
        trainer=("f1",),
        is_share=True,
    ),
    "bleu": BuiltInMetric(
        "sacrebleu's corpus BLEU, from 0 to 100, of what the model writes (train.generate).",
        "max",
        "BLEU {:.2f}",
        _TEXTS,
        always=False,
        trainer=("bleu",),
    ),
    "chrf": BuiltInMetric(
        "sacrebleu's corpus chrF, from 0 to 100.", "max", "chrF {:.2f}", _TEXTS, always=False
    ),
    **{
        name: BuiltInMetric(
            f"Mean F of {trainer.replace('rouge', 'ROUGE-')}, by rouge_score with its stemmer.",
            "max",
            f"{trainer.replace('rouge', 'ROUGE-')} {{:.4f}}",
            _TEXTS,
            always=False,
            trainer=(trainer,),
            is_share=True,
        )
        for name, trainer in (("rouge1", "rouge1"), ("rouge2", "rouge2"), ("rouge_l", "rougeL"))
    },
    "mse": BuiltInMetric(
        "Mean squared error.", "min", "MSE {:.4g}", {"sequence-regression": _SCORES}
    ),
    "pearson": BuiltInMetric(
        'Correlation with the labels; "nan" where either is constant.',
        "max",
        "Pearson {:.4f}",
        {"sequence-regression": _SCORES, **_FOUND},
        trainer=("pearsonr",),
    ),
    "spearman": BuiltInMetric(
        "Correlation of the ranks of scores and labels.",
        "max",
        "Spearman {:.4f}",
        _FOUND,
        always=False,
        hub="spearmanr",
        trainer=("spearmanr",),
    ),
}


def metrics_of_task(task: str) -> dict[str, BuiltInMetric]:
    """Return the metrics that an evaluation of a model task may have."""
    return {
        name: metric
        for name, metric in METRICS.items()
        if not metric.measures or task in metric.measures
    }


def measures_of_task(task: str) -> list[Measure]:
    """Return the measures of a model task's metrics, without duplicates."""
    return list(
        dict.fromkeys(
            metric.measures[task] for metric in METRICS.values() if task in metric.measures
        )
    )

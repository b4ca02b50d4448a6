"""Metrics of an evaluation compared with references, on any number of ranks."""

from __future__ import annotations

import contextlib
import copy
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from ortlaunch.base.errors import InputError
from ortlaunch.launch_plan import Mesh
from ortlaunch.rank import Rank
from ortlaunch.recipe.fields.best import KeepBest
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged
from ortlaunch.worker.data import IGNORED, Batches, UserSamples, collate
from ortlaunch.worker.engine.engine import build_engine
from ortlaunch.worker.evaluation.entities import entity_spans_of_tags
from ortlaunch.worker.evaluation.evaluation import seed_and_evaluate_loss_and_metrics_unless_stopped
from ortlaunch.worker.evaluation.scores import Scores, Transcripts
from ortlaunch.worker.evaluation.word_scores import (
    MaskedWords,
    SentencePairScore,
    language_model_metric_inputs,
)
from ortlaunch.worker.model.model import LossModule
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.supervision.progress import Progress
from ortlaunch.worker.training.best_evaluation import require_best_metrics_by_test_evaluation
from tests.makers import plan, recipe
from tests.ort import needs_ort


def test_words_and_pairs() -> None:
    """Only masked words count, with transformers' mean loss; sentence pairs have their own metric."""
    from transformers import BertConfig, BertForPreTraining

    torch.manual_seed(0)
    model = BertForPreTraining(
        BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
        )
    ).eval()
    ids = torch.randint(50, (4, 9))
    labels = torch.where(torch.rand(4, 9) < 0.4, ids, IGNORED)
    with torch.no_grad():
        output = model(ids)
        words = output.prediction_logits
        # One word and three pairs are correct by construction.
        labels[0, 0] = words[0, 0].argmax()
        pairs = output.seq_relationship_logits.argmax(-1)
        pairs[0] = 1 - pairs[0]
        told = {"labels": labels, "next_sentence_label": pairs}
        given = language_model_metric_inputs(output, told)
    counted = int((labels != IGNORED).sum())
    right = sum(int(words[i, j].argmax() == labels[i, j]) for i in range(4) for j in range(9))
    lost = (
        torch.nn.functional.cross_entropy(words.transpose(1, 2), labels, reduction="mean") * counted
    )
    found = {}
    for measure in (MaskedWords(None), SentencePairScore(None)):
        measure.count_micro_batch(given, told, True)
        # A batch that only fills a rank's turn must not count.
        measure.count_micro_batch(given, told, False)
        found |= measure.metrics_over_ranks(Alone(), 0.0)
    assert found["perplexity"] == pytest.approx(math.exp(float(lost) / counted), rel=1e-6)
    assert found["masked_word_accuracy"] == right / counted
    assert 0 < right < counted
    assert found["next_sentence_accuracy"] == 3 / 4


class Alone:
    """A group of one rank."""

    def gather_numbers(self, mine: list[float]) -> list[list[float]]:
        return [mine]


def scored(
    *batches: tuple[torch.Tensor, torch.Tensor], names: tuple[str, ...] = ()
) -> dict[str, float]:
    """Return the scores of a whole evaluation on one rank."""
    config = SimpleNamespace(id2label=dict(enumerate(names)))
    scores = Scores(SimpleNamespace(plain=SimpleNamespace(model=SimpleNamespace(config=config))))
    for logits, labels in batches:
        scores.count_micro_batch({"logits": logits}, {"labels": labels}, True)
    return scores.metrics_over_ranks(Alone(), 0.0)


def test_classes() -> None:
    """Macro F1 leaves out a class that is neither predicted nor labelled."""
    logits = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(40) % 4
    # Class 4 is never predicted.
    logits[:, 4] = -9
    found = scored(*zip(logits.split(15), labels.split(15)))
    given = logits.argmax(-1)
    assert found["f1_macro"] == pytest.approx(
        f1_by_hand(given.tolist(), labels.tolist()), rel=1e-12
    )
    assert found["classification_accuracy"] == pytest.approx(
        int((given == labels).sum()) / 40, rel=1e-12
    )


def test_the_word_error_rate() -> None:
    """Errors and words are summed over samples, as jiwer does; a turn that fills counts nothing."""
    words = ["", "the", "cat", "sat", "on", "mat", "a"]

    def decode(ids: torch.Tensor, skip_special_tokens: bool) -> str:
        return " ".join(words[number] for number in ids if number or not skip_special_tokens)

    alone = DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
    written = torch.tensor([[1, 2, 3, 0, 0], [6, 5, 5, 4, 0], [0, 0, 0, 0, 0]])
    asked: list[bool] = []
    model = SimpleNamespace(
        generate=lambda input_features, synced_gpus, **_: (
            asked.append(synced_gpus) or written[: len(input_features)]
        ),
        parameters=lambda: iter([torch.zeros(1)]),
        config=SimpleNamespace(max_target_positions=8),
    )
    plain = SimpleNamespace(model=model, tokenizer=SimpleNamespace(decode=decode))
    engine: Any = SimpleNamespace(plain=plain, group=alone)
    # No error; three, as "the" and "sat" are deleted and "mat" is inserted; two words deleted.
    meant = torch.tensor([[1, 2, 3, IGNORED, IGNORED], [1, 6, 5, 4, 3], [1, 2, *[IGNORED] * 3]])
    batch = {"labels": meant, "input_features": torch.zeros(3, 2, 2)}
    measure = Transcripts(engine)
    measure.count_micro_batch(None, batch, is_counted=True)
    measure.count_micro_batch(None, batch, is_counted=False)
    assert measure.metrics_over_ranks(alone, 0.0) == {"word_error_rate": (0 + 3 + 2) / 10}
    # Ranks that share weights write equally long.
    alone.mesh = Mesh(1, 2)
    Transcripts(engine).count_micro_batch(None, batch, is_counted=False)
    assert asked == [False, False, True]
    plain.tokenizer = None
    unknown = Transcripts(engine)
    unknown.count_micro_batch(None, batch, is_counted=True)
    assert unknown.metrics_over_ranks(alone, 0.0) == {}


def test_many_classes_make_no_table() -> None:
    """An evaluation of 200,000 classes fits into memory."""
    # Counts are kept per class: per pair of classes they would need 320 GB.
    labels = torch.tensor([0, 199_999])
    assert scored((functional.one_hot(labels, 200_000).float(), labels))["f1_macro"] == 1


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        (None, torch.zeros(3)),
        (torch.zeros(3, 2), torch.zeros(3)),
        (torch.zeros(3, 1), torch.zeros(3, dtype=torch.long)),
    ],
    ids=["no logits", "other numbers", "one output"],
)  # fmt: skip
def test_regressions_have_no_classes(logits: torch.Tensor | None, labels: torch.Tensor) -> None:
    """Logits that do not fit the labels give no scores."""
    assert scored((logits, labels)) == {}


@pytest.mark.parametrize(("size", "noise"), [(5, 1), (1e4, 1e-2), (1e6, 1), (1e-9, 1e-9)])
def test_numbers(size: float, noise: float) -> None:
    """Mean squared error and correlation equal NumPy's, for tiny and for large, similar values."""
    draw = torch.Generator().manual_seed(0)
    meant = size + torch.randn(50, generator=draw) * min(1, size)
    given = meant + torch.randn(50, generator=draw) * noise
    found = scored(*zip(given[:, None].split(20), meant.split(20)))
    x = given.double().numpy()
    y = meant.double().numpy()
    assert found["mse"] == pytest.approx(((x - y) ** 2).mean(), rel=1e-9, abs=0)
    assert found["pearson"] == pytest.approx(np.corrcoef(x, y)[0, 1], rel=1e-9)


def test_others_than_labelled_tasks_import_no_torchmetrics() -> None:
    """The module of evaluations does not import torchmetrics, which takes time."""
    code = (
        "import sys, ortlaunch.worker.evaluation.evaluation; "
        "sys.exit('torchmetrics' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.filterwarnings("error")
def test_what_does_not_vary_has_no_correlation() -> None:
    """The correlation with a constant is nan, without a warning."""
    given = torch.randn(50, generator=torch.Generator().manual_seed(0))
    for constant in (1.0, 0.1):
        found = scored(*zip(given[:, None].split(20), torch.full((50,), constant).split(20)))
        assert math.isnan(found["pearson"])


def test_tagged_words_are_counted_where_they_have_a_tag() -> None:
    """Only words with a tag count; a batch may have none."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 9, 4, generator=draw)
    labels = torch.randint(4, (6, 9), generator=draw)
    labels[torch.rand(6, 9, generator=draw) < 0.5] = IGNORED
    labels[4:] = IGNORED
    found = scored(*zip(logits.split(2), labels.split(2)))
    given = logits.argmax(-1)[labels != IGNORED]
    meant = labels[labels != IGNORED]
    assert found == {
        "classification_accuracy": pytest.approx(float((given == meant).double().mean())),
        "f1_macro": pytest.approx(f1_by_hand(given.tolist(), meant.tolist())),
    }


SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


class Ranks:
    """A group whose ranks run one after the other in this process.

    It records the values of each rank in a first round, and returns all of them in a second round.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.rank = 0
        self.device = torch.device("cpu")
        self.has_fsdp2 = False
        self.data_parallel = self
        self.sent = dict[tuple[int, int], list[float]]()
        self.call = 0

    def gather_numbers(self, mine: list[float]) -> list[list[float]]:
        self.call += 1
        self.sent[self.rank, self.call] = mine
        # A value that is not known yet is replaced by this rank's own.
        return [self.sent.get((rank, self.call), mine) for rank in range(self.size)]

    def evaluated(self, session: Any, samples: Any) -> list[dict[str, float] | None]:
        """Return the result of each rank."""
        # In the first round the values of later ranks are not known yet.
        for _ in range(2):
            found = []
            for rank in range(self.size):
                self.rank = rank
                self.call = 0
                found.append(seed_and_evaluate_loss_and_metrics_unless_stopped(session, samples))
        return found


def session_of(
    task: str,
    model: Any,
    rows: list[dict[str, torch.Tensor]],
    micro: int = 3,
    metric: str | None = None,
    **engine: Any,
) -> Any:
    made = recipe(
        train={"max_steps": 3, "metric": metric},
        model={"task": task, "config": {"model_type": "bert", **SIZES}},
        batch={"global_size": micro, "micro_size": micro}, engine={"name": "eager", **engine},
    )  # fmt: skip
    planned = plan(made)
    alone = DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
    batches = Batches(UserSamples(rows), planned.batch, 0)
    wrapped = LossModule(model.train())
    built = build_engine(
        made, planned, wrapped, alone, batches.read_micro_batch_and_count_tokens(0, 0, 0)
    )
    return SimpleNamespace(
        run=SimpleNamespace(confusion=None),
        engine=built,
        recipe=made,
        plan=planned,
        progress=Progress(rank=1),
        group=alone,
        batches=batches,
    )


@pytest.mark.parametrize("chunks", ["off", 2])
def test_one_number_on_any_ranks(chunks: str | int) -> None:
    """Metrics on 1, 2 and 4 ranks equal those of one batch, also with the loss in chunks."""
    # Eight samples with unequal labels, so that some last batches are short or empty. With chunks
    # the model returns no logits.
    from transformers import BertConfig, BertForPreTraining

    torch.manual_seed(0)
    model = BertForPreTraining(BertConfig(**SIZES, hidden_dropout_prob=0.5))
    ids = torch.randint(50, (8, 8))
    labels = torch.where(torch.arange(8) < torch.arange(8)[:, None] % 4 + 1, ids, IGNORED)
    with torch.no_grad():
        # Some predictions are correct.
        labels[:, 0] = model.eval()(ids).prediction_logits[:, 0].argmax(-1)
    rows = [
        {"input_ids": i, "labels": w, "next_sentence_label": torch.tensor(1)}
        for i, w in zip(ids, labels)
    ]
    with torch.no_grad():
        whole = model(**collate(rows))
    places = labels != IGNORED
    lost = torch.nn.functional.cross_entropy(whole.prediction_logits[places], labels[places])
    right = (whole.prediction_logits.argmax(-1) == labels)[places].float().mean()
    pairs = (whole.seq_relationship_logits.argmax(-1) == 1).float().mean()
    expected = {
        "perplexity": float(lost.exp()), "masked_word_accuracy": float(right), "next_sentence_accuracy": float(pairs)
    }  # fmt: skip
    session = session_of("pretraining", model, rows, chunked_loss=chunks)
    assert session.engine.record.chunked_loss.rows == (None if chunks == "off" else 2)
    for size in (1, 2, 4):
        session.group = Ranks(size)
        for found in session.group.evaluated(session, UserSamples(rows)):
            assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5), (
                size
            )
    assert model.training
    assert 0 < expected["masked_word_accuracy"] < 1


@pytest.mark.parametrize("task", ["sequence-classification", "image-classification"])
def test_classes_on_any_ranks(task: str, tmp_path: Path) -> None:
    """Accuracy, macro F1 and the table of classes on 1, 2 and 4 ranks equal those of a plain loop."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        ViTConfig,
        ViTForImageClassification,
    )

    torch.manual_seed(0)
    model: Any = BertForSequenceClassification(BertConfig(**SIZES, num_labels=3))  # type: ignore[call-arg]
    rows = [{"input_ids": torch.randint(50, (8,)), "labels": torch.tensor(i % 3)} for i in range(7)]
    if task == "image-classification":
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
        more = {"num_hidden_layers": 1, "image_size": 8, "patch_size": 4, "num_labels": 3}
        model = ViTForImageClassification(ViTConfig(**sizes, **more))
        rows = [{"pixel_values": torch.rand(3, 8, 8), "labels": row["labels"]} for row in rows]
    with torch.no_grad():
        inputs = next(iter(collate(rows).values()))
        given = model.eval()(inputs).logits.argmax(-1).tolist()
    meant = [int(row["labels"]) for row in rows]
    session = session_of(task, model, rows)
    session.run = RunDir(tmp_path)
    counts = [
        [sum(pair == (one, other) for pair in zip(meant, given)) for other in range(3)]
        for one in range(3)
    ]
    for size in (1, 2, 4):
        session.group = Ranks(size)
        for found in session.group.evaluated(session, UserSamples(rows)):
            right = sum(one == other for one, other in zip(given, meant)) / 7
            assert found["classification_accuracy"] == pytest.approx(right)
            assert found["f1_macro"] == pytest.approx(f1_by_hand(given, meant))
        names = ["LABEL_0", "LABEL_1", "LABEL_2"]
        assert read_json_or_raise_damaged(session.run.confusion) == {
            "classes": names,
            "counts": counts,
            "are_label_sets": False,
        }


def test_numbers_on_any_ranks() -> None:
    """Squared error and correlation on 1, 2 and 4 ranks equal NumPy's."""
    # Of 4 ranks, one has no sample.
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SIZES, num_labels=1))  # type: ignore[call-arg]
    rows = [
        {"input_ids": torch.randint(50, (8,)), "labels": torch.tensor(float(i))} for i in range(3)
    ]
    session = session_of("sequence-regression", model, rows, micro=1)
    with torch.no_grad():
        x = model.eval()(collate(rows)["input_ids"]).logits[:, 0].double().numpy()
        y = np.arange(3.0)
    expected = {"mse": ((x - y) ** 2).mean(), "pearson": np.corrcoef(x, y)[0, 1]}
    for size in (1, 2, 4):
        session.group = Ranks(size)
        for found in session.group.evaluated(session, UserSamples(rows)):
            assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5), (
                size
            )


def test_class_sets_on_any_ranks(tmp_path: Path) -> None:
    """F1 and mean average precision of sets of classes on 1, 2 and 4 ranks are scikit-learn's."""
    from sklearn.metrics import average_precision_score, f1_score
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(**SIZES, num_labels=5)  # type: ignore[call-arg]
    config.problem_type = "multi_label_classification"
    model = BertForSequenceClassification(config)
    torch.nn.init.normal_(model.classifier.weight, std=2.0)
    labels = torch.randint(2, (7, 5)).float()
    # No sample has the last class.
    labels[:, 4] = 0
    rows = [{"input_ids": torch.randint(50, (8,)), "labels": row} for row in labels]
    with torch.no_grad():
        logits = model.eval()(collate(rows)["input_ids"]).logits
    given, meant = logits > 0, labels.bool()
    used = (given | meant).any(0)
    assert given[:, :4].any()
    assert not given.all()
    expected = {
        "f1_micro": f1_score(meant, given, average="micro"),
        "f1_macro": f1_score(meant[:, used], given[:, used], average="macro"),
        "mean_average_precision": average_precision_score(meant[:, :4], logits[:, :4]),
    }
    session = session_of("multi-label-classification", model, rows)
    session.run = RunDir(tmp_path)
    counts = [[int(each[:, n].sum()) for each in (given & meant, meant, given)] for n in range(5)]
    for size in (1, 2, 4):
        session.group = Ranks(size)
        for found in session.group.evaluated(session, UserSamples(rows)):
            assert {name: found[name] for name in expected} == pytest.approx(expected), size
        assert read_json_or_raise_damaged(session.run.confusion) == {
            "classes": [f"LABEL_{n}" for n in range(5)],
            "counts": counts,
            "are_label_sets": True,
        }


def test_entities_on_any_ranks() -> None:
    """The metrics of entities on 1, 2 and 4 ranks equal those of all rows together."""
    from transformers import BertConfig, BertForTokenClassification

    torch.manual_seed(0)
    names = ["O", "B-X", "I-X"]
    model = BertForTokenClassification(BertConfig(**SIZES, id2label=dict(enumerate(names))))
    rows = [{"input_ids": torch.randint(50, (8,)), "labels": torch.arange(8) % 3} for _ in range(5)]
    with torch.no_grad():
        given = model.eval()(collate(rows)["input_ids"]).logits.argmax(-1).tolist()
    found = [entity_spans_of_tags(names[number] for number in row) for row in given]
    meant = entity_spans_of_tags(names[number] for number in rows[0]["labels"].tolist())
    right = sum(len(row & meant) for row in found)
    count = sum(map(len, found))
    expected = {
        "entity_precision": right / count, "entity_recall": right / 15, "entity_f1": 2 * right / (count + 15)
    }  # fmt: skip
    assert 0 < right < count
    session = session_of("token-classification", model, rows)
    for size in (1, 2, 4):
        session.group = Ranks(size)
        for each in session.group.evaluated(session, UserSamples(rows)):
            assert {name: each[name] for name in expected} == pytest.approx(expected), size


@pytest.mark.parametrize("inside", ["I-X", "X-X"])
def test_the_best_by_entities_that_there_are_none_of(inside: str) -> None:
    """`keep_best` by entities fails before step 1 if the labels are no tags."""
    from transformers import BertConfig, BertForTokenClassification

    model = BertForTokenClassification(BertConfig(**SIZES, id2label={0: "O", 1: "B-X", 2: inside}))
    rows = [{"input_ids": torch.randint(50, (8,)), "labels": torch.arange(8) % 3} for _ in range(5)]
    session = session_of("token-classification", model, rows)
    checkpoint = session.recipe.checkpoint.model_copy(
        update={"keep_best": KeepBest(metric="entity_f1")}
    )
    session.recipe = session.recipe.model_copy(update={"checkpoint": checkpoint})
    session.data = SimpleNamespace(evaluation=UserSamples(rows))
    told = (
        r"keep_best\.metric: got entity_f1; an evaluation .* has loss, "
        r"classification_accuracy, f1_macro$"
    )
    with contextlib.nullcontext() if inside == "I-X" else pytest.raises(InputError, match=told):
        require_best_metrics_by_test_evaluation(session)


@needs_ort
def test_metrics_are_of_the_engines_own_pass() -> None:
    """Engine ort returns the scores of its own pass, without another pass or export by PyTorch."""
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        BertForSequenceClassification,
        LlamaConfig,
        LlamaForCausalLM,
    )

    torch.manual_seed(0)
    # The last batch lacks one sample.
    ids = torch.randint(50, (5, 8))
    llama = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False))
    cases = (
        # Llama reads the size of a batch in Python.
        ("causal-lm", lambda _: llama, list(ids), {}),
        (
            "sequence-classification",
            BertForSequenceClassification,
            [torch.tensor(i % 3) for i in range(5)],
            {},
        ),
        ("masked-lm", BertForMaskedLM, list(ids), {}),
        ("masked-lm", BertForMaskedLM, list(ids), {"chunked_loss": 2}),
    )
    for task, kind, labels, engine in cases:
        model = kind(BertConfig(**SIZES, num_labels=3))  # type: ignore[call-arg]
        rows = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels)]
        session = session_of(task, copy.deepcopy(model), rows, **engine)
        expected = seed_and_evaluate_loss_and_metrics_unless_stopped(session, UserSamples(rows))
        passes: list[Any] = []
        model.register_forward_hook(lambda *_, passes=passes: passes.append(1))
        session = session_of(task, model, rows, name="ort", **engine)
        seconds = session.engine.evaluation_seconds_or_none
        # Plain PyTorch runs the first evaluation, because an export for it takes longer.
        passes.clear()
        assert seed_and_evaluate_loss_and_metrics_unless_stopped(
            session, UserSamples(rows)
        ) == pytest.approx(expected, rel=1e-5), task
        assert session.engine.record.plain_evaluations == 1
        assert len(passes) == 2
        assert 0 < seconds.plain_so_far < seconds.export
        # The next one exports the model.
        seconds.plain_so_far = 10 * seconds.export
        seed_and_evaluate_loss_and_metrics_unless_stopped(session, UserSamples(rows))
        passes.clear()
        assert seed_and_evaluate_loss_and_metrics_unless_stopped(
            session, UserSamples(rows)
        ) == pytest.approx(expected, rel=1e-5), task
        assert not passes, task


def f1_by_hand(given: list[int], meant: list[int]) -> float:
    """Return macro F1 as scikit-learn defines it."""
    each = []
    for kind in {*given, *meant}:
        hits = sum(one == other == kind for one, other in zip(given, meant))
        each.append(2 * hits / (given.count(kind) + meant.count(kind)))
    return sum(each) / len(each)

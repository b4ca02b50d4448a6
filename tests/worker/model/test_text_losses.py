"""Losses of embedding and reranker beside sentence-transformers', on the same weights and rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ortlaunch.base.errors import InputError
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.rules.model_rules import all_model_section_rules
from ortlaunch.worker.data import LoadedData, collate
from ortlaunch.worker.data.corpus import read_texts_with_fraction_of_corpus_read
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.model.embedding import _is_right_of_own
from ortlaunch.worker.model.model import LossModule, seed_and_build_loss_module_on_cpu
from tests.worker.models import BERT, recipe

pytestmark = pytest.mark.usefixtures("own_cache")
_WORDS = "the sum of two numbers is a value that the function returns to its caller".split()  # noqa: SIM905
_ROWS = 8
_STEPS = 20
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _text(number: int) -> str:
    generator = torch.Generator().manual_seed(number)
    size = int(torch.randint(2, 9, (1,), generator=generator))
    return " ".join(_WORDS[i] for i in torch.randint(0, len(_WORDS), (size,), generator=generator))


def _rows(columns: int, label: str) -> list[dict[str, Any]]:
    rows = []
    for number in range(_ROWS):
        row: dict[str, Any] = {str(c): _text(10 * number + c) for c in range(columns)}
        numbers = [(number * 7 + c * 3) % 11 / 10 for c in range(columns - 1)]
        counts = {"score": 1, "margins": columns - 2, "relevance": columns - 1}
        if label:
            row["label"] = numbers[: counts[label]]
        if label == "score":
            row["label"] = numbers[0]
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a BERT with one class, and its tokenizer."""
    from transformers import BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("model")
    data = LoadedData(recipe("masked-lm", {"config": BERT}))
    data.tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = {**BERT, **_NO_DROPOUT, "vocab_size": len(data.tokenizer), "num_labels": 1}
    BertForSequenceClassification(BertConfig(**config)).save_pretrained(folder)
    return folder


def _chosen(
    folder: Path, tmp_path: Path, task: str, settings: dict[str, Any], rows: list[dict[str, Any]]
) -> Recipe:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = [name for name in rows[0] if name != "label"]
    return recipe(
        task,
        {"pretrained": str(folder), task: settings},
        {
            "train": {"format": "jsonl", "path": [str(path)], "text_columns": columns},
            "tokenizer": str(folder),
        },
        batch={"global_size": _ROWS},
    )


def _built(chosen: Recipe) -> tuple[LossModule, dict[str, Tensor]]:
    data = LoadedData(chosen)
    module = seed_and_build_loss_module_on_cpu(chosen, data)
    return module, collate([data.train.sample(index, 0) for index in range(len(data.train))])


def _largest_difference_of_steps(ours: Any, our_loss: Any, theirs: Any, their_loss: Any) -> float:
    """Train both for some steps; return the largest difference of a loss or a gradient.

    In float64, because rounding of float32 grows from step to step.
    """
    ours.double()
    theirs.double()
    names = [name for name, _ in ours.named_parameters()]
    their_parameters = dict(theirs.named_parameters())
    found = 0.0
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (ours, theirs)]
    for _ in range(_STEPS):
        our_value, their_value = our_loss(), their_loss()
        for optimizer, loss in zip(optimizers, (our_value, their_value)):
            optimizer.zero_grad()
            loss.backward()
        found = max(found, abs(float(our_value) - float(their_value)))
        for name in names:
            gradients = [ours.get_parameter(name).grad, their_parameters[name].grad]
            if gradients[0] is not None or gradients[1] is not None:
                found = max(found, float((gradients[0] - gradients[1]).abs().max()))
        for optimizer in optimizers:
            optimizer.step()
    return found


_RANKING = {"loss": "multiple-negatives-ranking"}
_EMBEDDING_CASES: dict[str, tuple[dict[str, Any], int, str, Any]] = {
    "ranking": (_RANKING, 2, "", lambda model, losses: losses.MultipleNegativesRankingLoss(model)),
    "ranking, negatives": (
        {**_RANKING, "temperature": 0.1}, 4, "", lambda model, losses: losses.MultipleNegativesRankingLoss(model, 10.0),
    ),
    "symmetric": (
        {**_RANKING, "symmetric": True}, 3, "",
        lambda model, losses: losses.MultipleNegativesRankingLoss(
            model, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
        ),
    ),
    "cached": (
        {**_RANKING, "mini_batch": 3}, 3, "",
        lambda model, losses: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=4),
    ),
    "matryoshka": (
        {**_RANKING, "dimensions": [4, 16, 8]}, 3, "",
        lambda model, losses: losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [16, 8, 4]),
    ),
    "cosent": ({"loss": "cosent"}, 2, "score", lambda model, losses: losses.CoSENTLoss(model)),
    "cosine": ({"loss": "cosine-mse"}, 2, "score", lambda model, losses: losses.CosineSimilarityLoss(model)),
    "triplet": ({"loss": "triplet", "normalize": False}, 3, "", lambda model, losses: losses.TripletLoss(model)),
    "triplet, cosine": (
        {"loss": "triplet", "distance": "cosine", "margin": 0.5}, 3, "",
        lambda model, losses: losses.TripletLoss(model, losses.TripletDistanceMetric.COSINE, 0.5),
    ),
    "margin": ({"loss": "margin-mse"}, 4, "margins", lambda model, losses: losses.MarginMSELoss(model)),
    "first token": (
        {**_RANKING, "pooling": "cls"}, 2, "", lambda model, losses: losses.MultipleNegativesRankingLoss(model),
    ),
    "last token": (
        {**_RANKING, "pooling": "last", "query_prompt": "the sum ", "document_prompt": "value "}, 2, "",
        lambda model, losses: losses.MultipleNegativesRankingLoss(model),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", _EMBEDDING_CASES)
def test_embedding_losses_are_sentence_transformers(
    folder: Path, tmp_path: Path, case: str
) -> None:
    """Twenty steps of each loss have its losses and gradients, to 1e-6."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.modules import Pooling

    settings, columns, label, make_loss = _EMBEDDING_CASES[case]
    rows = _rows(columns, label)
    ours, batch = _built(_chosen(folder, tmp_path, "embedding", settings, rows))
    transformer = Transformer(str(folder), max_seq_length=32)
    pooling = {"last": "lasttoken"}.get(
        settings.get("pooling", "mean"), settings.get("pooling", "mean")
    )
    modules = [transformer, Pooling(BERT["hidden_size"], pooling_mode=pooling)]
    if settings.get("normalize", True):
        modules.append(Normalize())
    theirs = SentenceTransformer(modules=modules, device="cpu").train()
    prompts = [settings.get("query_prompt", ""), *[settings.get("document_prompt", "")] * columns]
    features = [theirs.tokenize([prompts[c] + row[str(c)] for row in rows]) for c in range(columns)]
    loss = make_loss(theirs, losses)
    numbers = torch.tensor([row.get("label", 0.0) for row in rows])
    difference = _largest_difference_of_steps(
        ours.model,
        lambda: ours(**batch),
        theirs[0].auto_model,
        lambda: loss([dict(each) for each in features], numbers),
    )
    assert difference <= 1e-6


_RERANKER_CASES: dict[str, tuple[int, str, str]] = {
    "binary-cross-entropy": (2, "relevance", "BinaryCrossEntropyLoss"),
    "mse": (2, "relevance", "MSELoss"),
    "listnet": (4, "relevance", "ListNetLoss"),
    "margin-mse": (3, "margins", "MarginMSELoss"),
}


@pytest.mark.parametrize("name", _RERANKER_CASES)
def test_reranker_losses_are_sentence_transformers(folder: Path, tmp_path: Path, name: str) -> None:
    """Twenty steps of each loss have its losses and gradients, to 1e-6."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder import losses

    columns, label, their_name = _RERANKER_CASES[name]
    rows = _rows(columns, label)
    ours, batch = _built(_chosen(folder, tmp_path, "reranker", {"loss": name}, rows))
    theirs = CrossEncoder(str(folder), device="cpu", max_length=32).train()
    loss = getattr(losses, their_name)(theirs)
    queries = [row["0"] for row in rows]
    numbers: Any = torch.tensor([row["label"] for row in rows]).squeeze(-1)
    if name == "listnet":
        texts: list[Any] = [queries, [[row[str(c)] for c in range(1, columns)] for row in rows]]
        numbers = list(torch.tensor([row["label"] for row in rows]))
    else:
        texts = [queries, *[[row[str(c)] for row in rows] for c in range(1, columns)]]
    difference = _largest_difference_of_steps(
        ours.model, lambda: ours(**batch), theirs.model, lambda: loss(texts, numbers)
    )
    assert difference <= 1e-6


def test_copies_of_a_right_document_are_no_wrong_ones(folder: Path, tmp_path: Path) -> None:
    """The same document, or another right one of the same query, is left out of the negatives."""
    rows = _rows(2, "")
    alone, batch = _built(_chosen(folder, tmp_path, "embedding", {}, rows[:1]))
    assert float(alone(**batch)) == 0.0
    copy = {**rows[1], "1": rows[0]["1"]}
    same_query = {**rows[2], "0": rows[0]["0"]}
    for other in (copy, same_query):
        module, batch = _built(_chosen(folder, tmp_path, "embedding", {}, [rows[0], other]))
        assert float(module(**batch)) == 0.0
    module, batch = _built(_chosen(folder, tmp_path, "embedding", {}, rows[:2]))
    assert float(module(**batch)) > 0.0


_BAD_ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "empty": ("embedding", {}, {"1": " "}, "1 is ' '; it must be text, not empty"),
    "no text": ("embedding", {}, {"1": None}, "1 is None; it must be text"),
    "more texts": ("embedding", {}, {"1": ["a", "b"]}, "has 3 texts, and the first row 2"),
    "no score": ("embedding", {"loss": "cosent"}, {}, "no column 'label'"),
    "score": (
        "embedding", {"loss": "cosent"}, {"label": "much"}, "label is 'much'; it must be a number",
    ),
    "share": (
        "reranker", {}, {"label": 3}, "label is 3; it must be a number from 0 to 1, or a list",
    ),
    "cosine": (
        "embedding", {"loss": "cosine-mse"}, {"label": 1.5}, "label is 1.5; it must be a number from -1 to 1",
    ),
    "too few": ("embedding", {"loss": "triplet"}, {}, "has 1 texts after the first; loss triplet takes 2"),
    "all right": ("reranker", {}, {}, "no column 'label', and one document"),
}  # fmt: skip


@pytest.mark.parametrize("case", _BAD_ROWS)
def test_bad_rows(folder: Path, tmp_path: Path, case: str) -> None:
    """A row that the loss cannot use is named with its line before the training."""
    task, settings, changes, message = _BAD_ROWS[case]
    label = {"label": 0.5} if "label" in changes else {}
    rows = [{**row, **label} for row in _rows(2, "")]
    place = 0 if case in ("no score", "too few", "all right") else 2
    rows[place] = {**rows[place], **changes}
    with pytest.raises(DataError, match=f"rows.jsonl:{place + 1}: ") as error:
        LoadedData(_chosen(folder, tmp_path, task, settings, rows)).read_samples_needed_by(_TRAINS)
    assert message in str(error.value)


class _Trains:
    evaluates = False


_TRAINS: Any = _Trains()


def test_a_tokenizer_learns_from_all_columns(folder: Path, tmp_path: Path) -> None:
    """The corpus of a tokenizer that is trained here is the texts of all columns."""
    rows = [{"0": "question", "1": ["answer", "reply"]}, {"0": "more", "1": ["of", "them"]}]
    source = _chosen(folder, tmp_path, "embedding", {}, rows).data.train
    texts = [text for text, _ in read_texts_with_fraction_of_corpus_read(source)]
    assert texts == ["question", "answer reply", "more", "of them"]


def test_too_long_dimensions(folder: Path, tmp_path: Path) -> None:
    chosen = _chosen(folder, tmp_path, "embedding", {"dimensions": [64]}, _rows(2, ""))
    with pytest.raises(InputError, match="got 64, and the model's vectors have 16 values"):
        _built(chosen)


def test_copies_of_another_right_document_are_no_wrong_ones(folder: Path, tmp_path: Path) -> None:
    """A right document of the query stays no wrong one where it is the document of another query."""
    rows = _rows(3, "")
    rows[1] = {**rows[1], "0": rows[0]["0"]}
    rows[2] = {**rows[2], "2": rows[1]["1"]}
    _, batch = _built(_chosen(folder, tmp_path, "embedding", {}, rows[:3]))
    ids = batch["text_ids"]
    is_right = _is_right_of_own(ids[:, 0], ids[:, 1], ids[:, 0], ids[:, 1:].T.flatten())
    assert is_right[:2].tolist() == [[True, True, False, False, False, True]] * 2
    assert is_right[2].tolist() == [False, False, True, False, False, False]


def test_a_cache_of_another_loss_is_not_used(folder: Path, tmp_path: Path) -> None:
    """Rows in the cache of a loss are checked again for one with other limits."""
    rows = [{**row, "label": 3} for row in _rows(2, "")]
    LoadedData(_chosen(folder, tmp_path, "reranker", {"loss": "mse"}, rows)).read_samples_needed_by(
        _TRAINS
    )
    with pytest.raises(DataError, match="it must be a number from 0 to 1"):
        LoadedData(_chosen(folder, tmp_path, "reranker", {}, rows)).read_samples_needed_by(_TRAINS)


class _TwoRanks:
    rank = 0

    def gather_numbers(self, numbers: list[float]) -> list[list[float]]:
        return [numbers, [numbers[0] + 2]]


def test_an_evaluation_has_as_many_passes_as_the_longest_rank(folder: Path, tmp_path: Path) -> None:
    """A pass of a divided model is collective, so that a rank with fewer texts runs more passes."""
    module, batch = _built(_chosen(folder, tmp_path, "embedding", {"mini_batch": 8}, _rows(2, "")))
    passes: list[int] = []
    text_module: Any = module.eval()
    text_module._encoders[0].register_forward_hook(lambda *_: passes.append(1))
    text_module.join_ranks(_TwoRanks())
    text_module(**batch)
    assert len(passes) == 2 + 2


def test_custom_samples_without_ids_of_texts(folder: Path, tmp_path: Path) -> None:
    """The error says what custom samples need."""
    module, batch = _built(_chosen(folder, tmp_path, "embedding", {}, _rows(2, "")))
    del batch["text_ids"]
    with pytest.raises(InputError, match="lacks text_ids: custom samples have input_ids"):
        module(**batch)


@pytest.mark.parametrize(
    ("task", "settings", "changes", "message"),
    [
        ("embedding", {}, {"input_ids": (4, 8)}, r"of shape (4, 8); it must be (samples, texts"),
        (
            "embedding",
            {"loss": "cosent"},
            {"labels": (4, 1)},
            "labels of shape (4, 1); with 2 texts",
        ),
        ("reranker", {}, {"labels": (4, 1)}, "in a sample it must be (4, 2)"),
        ("reranker", {"loss": "margin-mse"}, {"labels": (4, 2)}, "in a sample it must be (4, 1)"),
    ],
)
def test_custom_samples_of_other_shapes(
    folder: Path,
    tmp_path: Path,
    task: str,
    settings: dict[str, Any],
    changes: dict[str, tuple[int, ...]],
    message: str,
) -> None:
    """The error has the shape of the batch and the right one."""
    row = {**_rows(2, "")[0], "label": 1}
    rows = [{**row, "2": "x", "label": [1, 0]} if task == "reranker" else row] * 4
    loss = {"loss": "cosent"} if task == "embedding" and "labels" in changes else settings
    module, batch = _built(_chosen(folder, tmp_path, task, {**settings, **loss}, rows))
    for name, shape in changes.items():
        batch[name] = torch.ones(shape, dtype=torch.long)
    with pytest.raises(InputError) as error:
        module(**batch)
    assert message in str(error.value)


def test_sources_with_other_counts_of_texts(folder: Path, tmp_path: Path) -> None:
    """A mixture of pairs and triplets is refused at the start, with the source."""
    sources = []
    for columns in (2, 3):
        path = tmp_path / f"rows{columns}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in _rows(columns, "")))
        names = [str(column) for column in range(columns)]
        source = {"format": "jsonl", "path": [str(path)], "text_columns": names}
        sources.append({"source": source})
    data = {"train": sources, "tokenizer": str(folder)}
    mixed = recipe("embedding", {"pretrained": str(folder)}, data, batch={"global_size": _ROWS})
    with pytest.raises(DataError, match=r"train\[1\].source: a sample has 3 texts, .* 2; give all"):
        LoadedData(mixed).read_samples_needed_by(_TRAINS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"batch": {"global_size": 1}},
            "got 1: loss multiple-negatives-ranking compares the samples",
        ),
        ({"batch": {"global_size": 8, "micro_size": 2}}, "got 2: loss multiple-negatives-ranking"),
    ],
)
def test_batches_that_compare_too_little(changes: dict[str, Any], message: str) -> None:
    problems = [text for _, text in all_model_section_rules(_pairs(changes))]
    assert len(problems) == 1
    assert problems[0].startswith(message)


def test_a_reranker_has_one_output() -> None:
    config = {**BERT, "num_labels": 3}
    made = recipe("reranker", {"config": config}, {"train": "python-pairs"})
    assert [text for _, text in all_model_section_rules(made)] == ["got 3; reranker has one output"]


def _pairs(changes: dict[str, Any]) -> Recipe:
    return recipe("embedding", {"config": BERT}, {"train": "python-pairs"}, **changes)

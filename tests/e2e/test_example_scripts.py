"""Tasks of transformers' example scripts: losses and metrics of a plain loop over their own features.

The features are prepared as the scripts in examples/pytorch do it, from the same rows, tokenizer and
weights. Only the order of the samples is ortlaunch's.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ortlaunch.launch_plan import BatchPlan
from ortlaunch.recipe import Recipe
from ortlaunch.worker.data import Batches, LoadedData
from tests.e2e.runs import Run, Train, ended_well

# All of them start processes and train.
pytestmark = pytest.mark.slow

STEPS = 20
_TEXT = "the a cat dog bird fish sat ran flew swam on in over under house tree river sky old red"
WORDS = [*_TEXT.split(), *["small", "who", "where", "what", "did", "?", ".", "was", "it"]]
BERT = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "initializer_range": 0.2,
}  # fmt: skip
TWO_RANKS = ("--launcher=torchrun", "--nproc-per-node=2")


class Example(NamedTuple):
    """A task's recipe and the features that its example script makes of the same rows."""

    recipe: dict[str, Any]
    features: list[dict[str, torch.Tensor]]
    model: Any
    metrics: Callable[[Any, Any], dict[str, float]]
    """The script's metrics of a model and its output for all features."""


def bert_tokenizer(folder: Path) -> Any:
    """Return a tokenizer of whole words in BERT's form, and save it in a folder."""
    from transformers import BertTokenizerFast

    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])
    )
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=64)
    tokenizer.save_pretrained(folder)
    return tokenizer


def recipe_of(task: str, folder: Path, rows: list[dict[str, Any]], **data: Any) -> dict[str, Any]:
    """Return a recipe of 20 steps on rows, which are its evaluation data, too."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = {"format": "jsonl", "path": [str(path)], **data.pop("columns", {})}
    return {
        "name": "example",
        "model": {"task": task, "pretrained": str(folder)},
        "data": {"train": corpus, "evaluation": corpus, "tokenizer": str(folder), **data},
        "batch": {"global_size": 8, "micro_size": 2},
        "optimizer": {"name": "adamw", "learning_rate": 1e-3, "weight_decay": 0.0},
        "schedule": {"name": "constant"},
        "engine": {"name": "eager"},
        "train": {"max_steps": STEPS, "evaluate_every_steps": 10, "max_grad_norm": None},
        "checkpoint": {"every_steps": 5},
        "log": {"every_steps": 1},
    }


def many_labels(folder: Path) -> Example:
    """run_classification.py: a list of names becomes a vector of floats for BCEWithLogitsLoss."""
    from transformers import AutoModelForSequenceClassification, BertConfig

    chance = torch.Generator().manual_seed(0)
    names = ["animal", "place", "verb"]
    rows = []
    for _ in range(29):
        words = [WORDS[i] for i in torch.randint(len(WORDS), (3,), generator=chance)]
        kinds = {"animal": WORDS[2:6], "verb": WORDS[6:10], "place": WORDS[14:18]}
        labels = [name for name, members in kinds.items() if {*members} & {*words}]
        rows.append({"text": " ".join(words), "label": labels})
    assert [] in [row["label"] for row in rows]
    tokenizer = bert_tokenizer(folder)
    torch.manual_seed(0)
    config = BertConfig(
        **BERT, id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)}
    )
    config.problem_type = "multi_label_classification"
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)

    def feature(row: dict[str, Any]) -> dict[str, torch.Tensor]:
        encoded = tokenizer(row["text"], padding="max_length", max_length=16, truncation=True)
        # multi_labels_to_ids
        ids = [0.0] * len(names)
        for label in row["label"]:
            ids[names.index(label)] = 1.0
        return {**{k: torch.tensor(v) for k, v in encoded.items()}, "labels": torch.tensor(ids)}

    features = [*map(feature, rows)]

    def metrics(_: Any, output: Any) -> dict[str, float]:
        from sklearn.metrics import f1_score

        meant = torch.stack([each["labels"] for each in features])
        given = output.logits > 0
        return {f"f1_{mean}": f1_score(meant, given, average=mean) for mean in ("micro", "macro")}

    made = recipe_of("multi-label-classification", folder, rows, sequence_length=16)
    return Example(made, features, model, metrics)


def answers(folder: Path) -> Example:
    """run_qa.py on rows like SQuAD 2.0's: windows with a stride, and questions without answer."""
    from transformers import AutoModelForQuestionAnswering, BertConfig

    chance = torch.Generator().manual_seed(0)

    def words(count: int) -> list[str]:
        return [WORDS[i] for i in torch.randint(21, (count,), generator=chance)]

    rows: list[dict[str, Any]] = []
    for number in range(23):
        before, answer, after = words(2 + 7 * (number % 4)), words(1 + number % 3), words(4)
        start = len(" ".join(before)) + 1
        spans = {"text": [" ".join(answer)], "answer_start": [start]}
        rows.append(
            {
                "question": f"  what {words(1)[0]} ?",
                "context": " ".join([*before, *answer, *after]),
                "answers": {"text": [], "answer_start": []} if number % 5 == 4 else spans,
            }
        )
    tokenizer = bert_tokenizer(folder)
    torch.manual_seed(0)
    model = AutoModelForQuestionAnswering.from_config(BertConfig(**BERT))
    model.save_pretrained(folder)
    features: list[dict[str, torch.Tensor]] = []
    # The row of each feature, and its offsets in the context, else None.
    kept: list[tuple[int, list[tuple[int, int] | None]]] = []
    for number, row in enumerate(rows):
        encoded = tokenizer(
            row["question"].lstrip(), row["context"], truncation="only_second", max_length=20,
            stride=6, return_overflowing_tokens=True, return_offsets_mapping=True,
            padding="max_length",
        )  # fmt: skip
        for window, ids in enumerate(encoded["input_ids"]):
            offsets = [
                offset if sequence == 1 else None
                for offset, sequence in zip(
                    encoded["offset_mapping"][window], encoded.sequence_ids(window)
                )
            ]
            first = last = ids.index(tokenizer.cls_token_id)
            inside = [i for i, offset in enumerate(offsets) if offset]
            for text, start in zip(row["answers"]["text"], row["answers"]["answer_start"]):
                if offsets[inside[0]][0] <= start and offsets[inside[-1]][1] >= start + len(text):
                    first = max(i for i in inside if offsets[i][0] <= start)
                    last = min(i for i in inside if offsets[i][1] >= start + len(text))
            feature = {k: torch.tensor(encoded[k][window]) for k in tokenizer.model_input_names}
            positions = {"start_positions": first, "end_positions": last}
            features.append({**feature, **{k: torch.tensor(v) for k, v in positions.items()}})
            kept.append((number, offsets))
    assert len(features) > len(rows) + 5

    def metrics(_: Any, output: Any) -> dict[str, float]:
        spans, empty = [dict[float, str]() for _ in rows], [math.inf] * len(rows)
        for (row, offsets), starts, ends in zip(kept, output.start_logits, output.end_logits):
            empty[row] = min(empty[row], float(starts[0] + ends[0]))
            best = [logits.argsort(descending=True)[:20].tolist() for logits in (starts, ends)]
            for first, last in itertools.product(*best):
                if offsets[first] and offsets[last] and first <= last < first + 30:
                    text = rows[row]["context"][offsets[first][0] : offsets[last][1]]
                    spans[row][float(starts[first] + ends[last])] = text
        given = [
            "" if none - max(found) > 0 else found[max(found)] for found, none in zip(spans, empty)
        ]
        exact, f1 = 0.0, 0.0
        for text, row in zip(given, rows):
            # Of one answer without punctuation; "a" and "the" do not count.
            (found, meant) = (
                [word for word in each.split() if word not in ("a", "an", "the", ".")]
                for each in (text, *(row["answers"]["text"] or [""]))
            )
            same = sum((Counter(found) & Counter(meant)).values())
            exact += found == meant
            f1 += 2 * same / (len(found) + len(meant)) if found and meant else found == meant
        assert {"", *given} != {""}
        return {"exact_match": exact / len(rows), "answer_f1": f1 / len(rows)}

    made = recipe_of("question-answering", folder, rows, sequence_length=20, stride=6)
    return Example(made, features, model, metrics)


def summaries(folder: Path, family: str = "t5") -> Example:
    """run_summarization.py: a prefix, labels padded with -100, generation by beams."""
    from rouge_score import rouge_scorer
    from sacrebleu import corpus_bleu, corpus_chrf
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    chance = torch.Generator().manual_seed(0)
    rows = []
    for number in range(27):
        words = [WORDS[i] for i in torch.randint(21, (3 + number % 9,), generator=chance)]
        rows.append({"article": " ".join(words), "summary": " ".join(words[:3])})
    tokenizer = bert_tokenizer(folder)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0,
                             "initializer_factor": 0.5}  # fmt: skip
    if family != "t5":
        sizes = {"max_position_embeddings": 64, "dropout": 0.0, "init_std": 0.3}
        for half in ("encoder", "decoder"):
            own = {"layers": 2, "attention_heads": 2, "ffn_dim": 64}
            sizes |= {f"{half}_{name}": size for name, size in own.items()}
    end = tokenizer.sep_token_id
    config = AutoConfig.for_model(
        family, vocab_size=64, d_model=32, **sizes, decoder_start_token_id=0, pad_token_id=0,
        eos_token_id=end, forced_eos_token_id=None if family == "t5" else end,
    )  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_config(config)
    model.save_pretrained(folder)
    inputs = tokenizer(
        [f"what did {row['article']}" for row in rows], max_length=9, padding="max_length",
        truncation=True, return_tensors="pt",
    )  # fmt: skip
    labels = tokenizer(
        text_target=[row["summary"] for row in rows], max_length=8, padding="max_length",
        truncation=True, return_tensors="pt",
    )["input_ids"]  # fmt: skip
    labels[labels == tokenizer.pad_token_id] = -100
    read = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    features = [
        {**{name: values[i] for name, values in read.items()}, "labels": labels[i]}
        for i in range(len(rows))
    ]

    def metrics(model: Any, _: Any) -> dict[str, float]:
        ids = model.generate(**read, max_new_tokens=6, num_beams=2, do_sample=False)
        meant = tokenizer.batch_decode(labels.clamp(min=0), skip_special_tokens=True)
        given = [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
        scorer = rouge_scorer.RougeScorer(["rouge1", "rougeL"], use_stemmer=True)
        rouge = [scorer.score(target, text) for target, text in zip(meant, given)]
        assert rouge[0].keys() == {"rouge1", "rougeL"}
        return {
            "rouge1": sum(each["rouge1"].fmeasure for each in rouge) / len(rows),
            "rouge_l": sum(each["rougeL"].fmeasure for each in rouge) / len(rows),
            "bleu": corpus_bleu(given, [meant]).score,
            "chrf": corpus_chrf(given, [meant]).score,
        }

    columns = {
        "text_column": "article", "target_column": "summary", "source_prefix": "what did "
    }  # fmt: skip
    made = recipe_of(
        "seq2seq", folder, rows, columns=columns, sequence_length=9, target_length=8, cut_long=True
    )
    made["train"]["generate"] = {"max_new_tokens": 6, "beams": 2}
    return Example(made, features, model, metrics)


def choices(folder: Path) -> Example:
    """run_swag.py: each ending after the same text; a batch is (samples, choices, length)."""
    from transformers import AutoModelForMultipleChoice, BertConfig

    chance = torch.Generator().manual_seed(0)
    rows = []
    for number in range(25):
        start, *ends = (
            " ".join(WORDS[i] for i in torch.randint(21, (3 + number % 5,), generator=chance))
            for _ in range(4)
        )
        rows.append(
            {"start": start, "label": number % 3} | {f"e{i}": e for i, e in enumerate(ends)}
        )
    tokenizer = bert_tokenizer(folder)
    torch.manual_seed(0)
    model = AutoModelForMultipleChoice.from_config(BertConfig(**BERT))
    model.save_pretrained(folder)
    features = []
    for row in rows:
        encoded = tokenizer(
            [row["start"]] * 3, [row[f"e{i}"] for i in range(3)], max_length=14,
            padding="max_length", truncation=True, return_tensors="pt",
        )  # fmt: skip
        features.append({**encoded, "labels": torch.tensor(row["label"])})

    def metrics(_: Any, output: Any) -> dict[str, float]:
        right = output.logits.argmax(-1) == torch.tensor([row["label"] for row in rows])
        return {"classification_accuracy": float(right.double().mean())}

    columns = {"context_column": "start", "choice_columns": ["e0", "e1", "e2"]}
    made = recipe_of("multiple-choice", folder, rows, columns=columns, sequence_length=14)
    return Example(made, features, model, metrics)


EXAMPLES: dict[str, Callable[[Path], Example]] = {
    "multi-label": many_labels,
    "questions": answers,
    "summaries": summaries,
    "choices": choices,
    **{name: functools.partial(summaries, family=name) for name in ("bart", "pegasus", "marian")},
}
# The families of one task, beside T5.
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in ("bart", "pegasus", "marian") else name
         for name in EXAMPLES]  # fmt: skip


def plain_losses(example: Example) -> list[float]:
    """Return the losses of a plain loop over the features, which trains the example's model."""
    recipe = Recipe.model_validate(example.recipe)
    samples = LoadedData(recipe).train
    assert len(samples) == len(example.features)
    batches = Batches(samples, BatchPlan(8, 8, 1, 1, None), recipe.seed)
    optimizer = torch.optim.AdamW(example.model.train().parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        features = [example.features[i] for i in batches.sample_indices_of_step(step)]
        batch = {name: torch.stack([each[name] for each in features]) for name in features[0]}
        loss = example.model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def trained(
    home: Path, train: Train, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Example, list[float], Run]]:
    """A function that trains a task's example once: by a plain loop, and by ortlaunch on a rank."""
    kept: dict[str, tuple[Example, list[float], Run]] = {}

    def of_task(name: str) -> tuple[Example, list[float], Run]:
        if name not in kept:
            example = EXAMPLES[name](tmp_path_factory.mktemp(name))
            kept[name] = (
                example,
                plain_losses(example),
                ended_well(train(name, example.recipe)),
            )
        return kept[name]

    return of_task


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_the_script(name: str, trained: Any, train: Train) -> None:
    """20 losses on one and two ranks are within 1e-5 of a plain loop over the script's features."""
    example, expected, run = trained(name)
    assert run.losses() == pytest.approx(expected, abs=1e-5)
    two = ended_well(train(f"{name}-two", example.recipe, *TWO_RANKS))
    assert two.losses() == pytest.approx(expected, abs=1e-5)
    batch = {name: torch.stack([f[name] for f in example.features]) for name in example.features[0]}
    with torch.no_grad():
        metrics = example.metrics(example.model.eval(), example.model(**batch))
    for each in (run, two):
        found = {name: each.values(f"evaluation_{name}")[-1][1] for name in metrics}
        assert found == pytest.approx(metrics, abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_in_another_world(name: str, trained: Any, train: Train) -> None:
    """A run that two ranks began, and one goes on with, has the losses of the script."""
    example, expected, _ = trained(name)
    recipe = {**example.recipe, "train": {**example.recipe["train"], "max_steps": 10}}
    ended_well(train(f"{name}-again", recipe, *TWO_RANKS))
    ended = ended_well(train(f"{name}-again", example.recipe))
    assert ended.losses() == pytest.approx(expected, abs=1e-5)

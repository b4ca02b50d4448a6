"""Chats in a stream: the samples of chats that are read at once, and exact resumes in any world."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base.cache import take_cache_notes
from ortlaunch.launch_plan import BatchPlan
from ortlaunch.recipe.fields.data import Data
from ortlaunch.worker.data import Batches, LoadedData
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data_audit import audit_training_and_evaluation_samples
from tests.worker.data.test_chats import cache
from tests.worker.test_data_audit import chat, made, text

__all__ = ["cache"]
SHUFFLE = 8
GLOBAL = 6


@pytest.fixture(autouse=True)
def no_notes_of_others() -> Iterator[None]:
    """Notes on cut chats must not appear in the tests of other files."""
    yield
    take_cache_notes()


def write_files(folder: Path, count: int = 3) -> None:
    """Write files of chats; in each third one is one whose answer is cut off."""
    for number in range(count):
        rows = [{**chat(), "source": "web"} for _ in range(20 + 5 * number)]
        rows[3]["messages"][1]["content"] = text(240)
        (folder / f"part{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def loaded(files: Path, folder: Path, **fields: Any) -> LoadedData:
    """Return the data of a recipe that streams the files."""
    folder.mkdir(exist_ok=True)
    train = {"format": "jsonl", "path": [str(files)], "messages_column": "messages"}
    recipe = made(folder, [{"messages": []}], sequence_length=192)
    stream = fields.pop("stream", {"buffer": "1MiB", "shuffle": SHUFFLE})
    data = {**recipe.data.model_dump(), "train": {**train, "stream": stream}, **fields}
    whole = recipe.model_copy(update={"data": Data.model_validate(data)})
    return LoadedData(whole, stream_folder=folder / "stream" if stream else None)


def trained(data: LoadedData, steps: range, world: int = 1, positions: Any = ()) -> tuple[Any, Any]:
    """Return the samples of each step, over all ranks, and the position after them."""
    batches = Batches(data.train, BatchPlan(GLOBAL, GLOBAL // world, 1, world, None), 7)
    batches.begin_step_after_positions(steps.start, steps.start * GLOBAL)
    batches.seek_streams(positions)
    found = []
    for step in steps:
        taken = []
        for rank in range(world):
            batch = batches.read_micro_batch_and_count_tokens(step, 0, rank)
            rows = zip(*(value.tolist() for value in batch.values()))
            taken += [dict(zip(batch, row)) for row in rows]
        after = batches.release_streamed_samples_and_return_positions((step + 1) * GLOBAL)
        found.append(taken)
    batches.close_streams()
    return found, json.loads(json.dumps(after))


def chats_of(samples: list[Any]) -> list[tuple[tuple[int, int], ...]]:
    """Return tokens and labels of each chat of samples, which several chats may share."""
    chats = []
    for sample in samples:
        parts = sample.get("document_ids") or [bit - 1 for bit in sample["attention_mask"]]
        for part in range(max(parts) + 1):
            pairs = zip(parts, sample["input_ids"], sample["labels"])
            found = tuple((token, label) for owner, token, label in pairs if owner == part)
            # Padding of packs is a part without labels.
            chats += [found] if any(label >= 0 for _, label in found) else []
    return chats


@pytest.mark.parametrize("packing", [False, True])
def test_each_chat_once_an_epoch_in_any_world(
    packing: bool, tmp_path: Path, cache: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Chats and labels are those of chats read at once; a resume in another world is exact."""
    write_files(tmp_path)
    files = tmp_path / "part*.jsonl"
    whole, _ = trained(loaded(files, tmp_path / "a", packing=packing), range(30))
    said = capfd.readouterr().out
    assert (
        "part0.jsonl: 1 of 20 chats have no answer within data.sequence_length (192), and" in said
    )
    at_once = loaded(files, tmp_path / "b", stream=None).train
    samples = [at_once.sample(index, 0) for index in range(len(at_once))]
    expected = chats_of([{key: value.tolist() for key, value in one.items()} for one in samples])
    taken = [sample for step in whole for sample in step]
    found = chats_of(taken)
    assert len(expected) == 72
    assert sorted(found[:72]) == sorted(expected)
    assert len({*found}) == 72
    samples_of_an_epoch = next(n for n in range(99) if len(chats_of(taken[:n])) == 72)
    assert (samples_of_an_epoch < 50) == packing
    positions: Any = ()
    for world, steps in ((2, range(4)), (3, range(4, 15)), (1, range(15, 16)), (2, range(16, 30))):
        data = loaded(files, tmp_path / str(steps.start), packing=packing)
        again, positions = trained(data, steps, world, positions)
        assert again == whole[steps.start : steps.stop]


def test_the_first_chats_are_held_out(tmp_path: Path, cache: Any) -> None:
    """`evaluation: {samples: 7}` are the first chats of the first file; no epoch trains on them."""
    write_files(tmp_path)
    data = loaded(tmp_path / "part*.jsonl", tmp_path / "a", evaluation={"samples": 7})
    rows = [*map(json.loads, (tmp_path / "part0.jsonl").read_text().splitlines())]
    held_out = data.evaluation
    assert held_out is not None
    # The answer of the fourth one is cut off.
    assert len(held_out) == 6
    part = audit_training_and_evaluation_samples(data)[0]
    assert (
        "the columns source are not in the text"
        in {each.name: each.text for each in part.findings}["unwritten_columns"]
    )
    whole, _ = trained(data, range(24))
    taken = chats_of([sample for step in whole for sample in step])
    assert len({*taken[:66]}) == len({*taken}) == 66
    texts = [data.tokenizer.decode([token for token, _ in one]) for one in taken]
    for number, row in enumerate(rows):
        found = any(row["messages"][2]["content"] in text for text in texts)
        assert found == (number >= 7), number


def test_a_bad_chat_of_a_stream_ends_it(tmp_path: Path, cache: Any) -> None:
    """Parts that the template does not write are found there, too, and the audit sees chats."""
    bad = {"messages": [*chat()["messages"][:-1], {**chat()["messages"][-1], "name": "Ann"}]}
    rows = [*(chat() for _ in range(20)), bad]
    (tmp_path / "part.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = loaded(tmp_path / "part.jsonl", tmp_path / "a")
    with pytest.raises(DataError, match=r"part.jsonl:21: message 3 has name, and .*\[name\]"):
        trained(data, range(9))

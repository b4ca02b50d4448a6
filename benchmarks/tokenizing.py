"""Tokenizing a corpus into token ids on disk: ortlaunch beside `datasets.map` of the same tokenizer, in turns.

    python benchmarks/tokenizing.py [--megabytes 100] [--turns 3]

The corpus is Python's own documentation and sources, repeated to the size; the tokenizer a BPE trained on it. Each turn
is a process of its own with empty caches; libraries are loaded before its clock starts. `datasets` works by as many
processes as there are cores, in batches of 1000 (its default), and gets the texts without special tokens, too. Last,
one of ortlaunch's turns is killed (SIGKILL) in its middle and started again: what is left to do, and its tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

WAYS = ("ortlaunch", "datasets")


def corpus(path: Path, megabytes: int) -> None:
    """Documents with a blank line after each, so many megabytes."""
    from pydoc_data.topics import topics

    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [*topics.values(), *(source.read_text(encoding="utf-8", errors="ignore") for source in sources)]
    whole = "\n\n".join(texts)
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < megabytes * 10**6:
            file.write(whole + "\n\n")


def turn(way: str, path: str, tokenizer: str) -> None:
    """One way, in this process; prints seconds, tokens and the largest memory of it and of its children."""
    import datasets
    from transformers import AutoTokenizer

    from ortlaunch.recipe.fields.data import Corpus
    from ortlaunch.worker.data.tokens import tokenized

    words = AutoTokenizer.from_pretrained(tokenizer)
    print("begins", flush=True)
    began, cpu = time.perf_counter(), cpu_seconds()
    if way == "ortlaunch":
        tokens = len(tokenized(Corpus(format="text", path=(path,)), words, end_of_text=False))
    else:
        found = datasets.load_dataset("text", data_files=path, split="train", sample_by="paragraph")
        mapped = found.map(
            lambda rows: {"input_ids": words(rows["text"], add_special_tokens=False)["input_ids"]},
            batched=True, num_proc=len(os.sched_getaffinity(0)), remove_columns=["text"],
        )  # fmt: skip
        seconds, used = time.perf_counter() - began, cpu_seconds() - cpu
        tokens = sum(len(row) for batch in mapped.iter(1000) for row in batch["input_ids"])
        began, cpu = time.perf_counter() - seconds, cpu_seconds() - used  # counting them is not its work
    memory = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    measured = {"seconds": time.perf_counter() - began, "cpu": cpu_seconds() - cpu}
    print(json.dumps({**measured, "tokens": tokens, "memory": memory}))


def cpu_seconds() -> float:
    """Of this process and its children that have ended: what a busy machine does not change much."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main(megabytes: int, turns: int) -> None:
    """A B A B ..., and medians."""
    from ortlaunch.recipe.fields.data import Data
    from ortlaunch.worker.data.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        path, words = Path(folder, "corpus.txt"), Path(folder, "tokenizer")
        corpus(path, megabytes)
        os.environ["ORTLAUNCH_CACHE"] = str(Path(folder, "first"))
        data = {"train": "python-docs", "tokenizer": {"train": "bpe", "vocab_size": 8000}, "sequence_length": 8}
        load_tokenizer(Data.model_validate(data)).save_pretrained(words)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        cpu: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(turns):
            for way in WAYS:
                own = {"ORTLAUNCH_CACHE": f"{folder}/{number}", "HF_DATASETS_CACHE": f"{folder}/{number}-datasets"}
                words_of = [sys.executable, __file__, "--turn", way, str(path), str(words)]
                said = subprocess.run(words_of, env={**os.environ, **own}, check=True, capture_output=True, text=True)
                found = json.loads(said.stdout.splitlines()[-1])
                seconds[way].append(found["seconds"])
                cpu[way].append(found["cpu"])
                rate = found["tokens"] / found["seconds"]
                line = (
                    f"{found['seconds']:7.2f} s, CPU {found['cpu']:.2f} s, {found['tokens']:>12,} tokens, {rate:,.0f}/s"
                )
                print(f"{way:10} {line} {found['memory'] / 1024:7.0f} MiB", flush=True)
        for name, taken in (("time", seconds), ("CPU time", cpu)):
            medians = {way: statistics.median(each) for way, each in taken.items()}
            print(f"{name}, datasets / ortlaunch: {medians['datasets'] / medians['ortlaunch']:.2f}")
        own = {**os.environ, "ORTLAUNCH_CACHE": f"{folder}/killed"}
        killed(own, ["--turn", "ortlaunch", str(path), str(words)], statistics.median(seconds["ortlaunch"]), found)


def killed(environ: dict[str, str], words: list[str], seconds: float, whole: dict[str, float]) -> None:
    """A turn that is killed when half of its time is over, and the one that goes on."""
    command = [sys.executable, __file__, *words]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it begins
        time.sleep(seconds / 2)
        process.kill()
    said = subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout.splitlines()
    found = json.loads(said[-1])
    same = "as many" if found["tokens"] == whole["tokens"] else f"NOT AS MANY, {found['tokens']:,}"
    print(
        f"killed after {seconds / 2:.1f} s, started again: {found['seconds']:.2f} s of {seconds:.2f} s, {same} tokens"
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    if sys.argv[1:2] == ["--turn"]:
        turn(*sys.argv[2:5])
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--megabytes", type=int, default=100, help="of the corpus")
        parser.add_argument("--turns", type=int, default=3)
        asked = parser.parse_args()
        main(asked.megabytes, asked.turns)

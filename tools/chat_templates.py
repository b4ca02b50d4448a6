"""Compare the tokens and labels of chats with TRL's, on chat templates of a folder.

    pip install trl
    python tools/chat_templates.py [FOLDER]

FOLDER has *.jinja files; without it those that TRL ships. A tokenizer is made for each, with the
template's marks as tokens. Labels are compared where a template has generation marks, or TRL has a
marked copy of it (NAME_training.jinja). A row that is refused here alone is read again with the
fields that the message names, until it is accepted: its outcome has them.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from trl.data_utils import _tokenize

os.environ["ORTLAUNCH_CACHE"] = tempfile.mkdtemp()

from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.worker.data.chats.samples import ANSWER, load_or_tokenize_chats_marking_trained_text
from ortlaunch.worker.data.file_rows import DataError

TRL_TEMPLATES = Path(trl.__file__).parent / "chat_templates"
ROWS_OF_A_FORM = 5
RANDOM = random.Random(1)
WORDS = re.findall(
    r"\w+", "the quick brown fox jumps over a lazy dog, rain in Bonn and so on, it is fine in Paris"
)
MARK = re.compile(
    r"<[|\uff5c][^<>{}' \n]*?[|\uff5c]>|</?(?:think|tool_call|tool_response|tools)>|</?s>"
    r"|<(?:start|end)_of_turn>|\[/?[A-Z_]+\]|<turn\|>|<\|turn>"
)
# Marks that end an answer, in the order in which a template's one is looked for.
ENDS = ("<|return|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>", "<turn|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|endoftext|>", "<|end|>", "<|user|>")  # fmt: skip


def words(count: int) -> str:
    return " ".join(RANDOM.choices(WORDS, k=count))


def said(role: str, **more: Any) -> dict[str, Any]:
    """Return a message of a few words."""
    return {"role": role, "content": words(RANDOM.randint(2, 9)), **more}


def tool(name: str) -> dict[str, Any]:
    city = {"type": "string", "description": "a city"}
    days = {"type": "integer", "description": "a number"}
    parameters = {
        "type": "object",
        "properties": {"city": city, "days": days},
        "required": ["city"],
    }
    return {
        "type": "function",
        "function": {"name": name, "description": words(4), "parameters": parameters},
    }


TOOLS = [tool("weather"), tool("forecast")]


def called(
    content: Any = "", names: tuple[str, ...] = ("weather",), as_text: bool = False, **more: Any
) -> list[Any]:
    """Return an answer with calls, and a result of each."""
    values = [{"city": words(1), "days": RANDOM.randint(1, 9)} for _ in names]
    calls = [
        {"id": f"call0000{index}", "type": "function",
         "function": {"name": name, "arguments": json.dumps(value) if as_text else value}}
        for index, (name, value) in enumerate(zip(names, values))
    ]  # fmt: skip
    results = [said("tool", name=name, tool_call_id=call["id"]) for name, call in zip(names, calls)]
    return [{"role": "assistant", "content": content, "tool_calls": calls, **more}, *results]


def with_tools(*messages: Any) -> dict[str, Any]:
    return {"tools": TOOLS, "messages": [*messages]}


def row_makers(thoughts_key: str) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return a function for each form of a row."""

    def thoughts() -> dict[str, Any]:
        return {thoughts_key: words(5)}

    def user() -> dict[str, Any]:
        return said("user")

    def answer(**more: Any) -> dict[str, Any]:
        return said("assistant", **more)

    return {
        "plain": lambda: {"messages": [user(), answer()]},
        "system": lambda: {"messages": [said("system"), user(), answer()]},
        "turns": lambda: {"messages": [user(), answer(), user(), answer()]},
        "call": lambda: with_tools(user(), *called(), answer()),
        "last call": lambda: with_tools(said("system"), user(), *called()[:1]),
        "null content": lambda: with_tools(user(), *called(None), answer()),
        "arguments as text": lambda: with_tools(user(), *called(as_text=True), answer()),
        "two calls": lambda: with_tools(user(), *called(names=("weather", "forecast")), answer()),
        "content and call": lambda: with_tools(user(), *called(words(4)), answer()),
        "thoughts": lambda: {"messages": [user(), answer(**thoughts())]},
        "thoughts twice": lambda: {
            "messages": [user(), answer(**thoughts()), user(), answer(**thoughts())]
        },
        "thoughts and call": lambda: with_tools(
            user(), *called(**thoughts()), answer(**thoughts())
        ),
    }


def tokenizer_of_template(template: str) -> Any:
    """Return a byte-level tokenizer that has the marks of a template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    marks = sorted({*MARK.findall(template), "<s>", "</s>", "<unk>"})
    options: dict[str, Any] = {
        "special_tokens": marks,
        "initial_alphabet": pre_tokenizers.ByteLevel.alphabet(),
    }
    backend.train_from_iterator(
        [" ".join(WORDS)] * 3, trainers.BpeTrainer(vocab_size=700, show_progress=False, **options)
    )
    names = {
        "bos_token": "<s>",
        "unk_token": "<unk>",
        "eos_token": next((mark for mark in ENDS if mark in marks), "</s>"),
    }
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **names)


# A template that writes all parts of a row.
TOKENIZER_OF_ALL_PARTS = tokenizer_of_template((TRL_TEMPLATES / "qwen3_training.jinja").read_text())


def our_tokens(
    tokenizer: Any, row: dict[str, Any], fields: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """Return our token ids, and which of them count.

    Raises:
        DataError: the row is refused.
    """
    path = Path(tempfile.mkdtemp()) / "row.jsonl"
    path.write_text(json.dumps(row) + "\n")
    source = Corpus(format="jsonl", path=(str(path),), messages_column="messages", **fields)
    documents = load_or_tokenize_chats_marking_trained_text(source, tokenizer, lambda text: None)
    tokens = documents.tokens[0 : len(documents.tokens)].astype(int)
    return (tokens & (ANSWER - 1)).tolist(), (tokens >= ANSWER).astype(int).tolist()


def fields_named_as_remedy(message: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a source with those that a message of a refusal names, first the least."""
    if "train_parts: [answers, tool_calls]" in message and "train_parts" not in fields:
        return {**fields, "train_parts": ("answers", "tool_calls")}
    if "train_on: last" in message and "train_on" not in fields:
        return {**fields, "train_on": "last"}
    if match := re.search(r"ignore_fields: \[(.*?)\]", message):
        names = tuple(match[1].split(", "))
        return {**fields, "ignore_fields": (*fields.get("ignore_fields", ()), *names)}
    if match := re.search(r"roles: \{(\w+): null\}", message):
        return {**fields, "roles": {**fields.get("roles", {}), match[1]: None}}
    return fields


def is_accepted(tokenizer: Any, row: dict[str, Any]) -> bool:
    try:
        our_tokens(tokenizer, row, {})
    except DataError:
        return False
    return True


def row_with_calls_alone(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of which each message has one call, before its result."""
    messages = []
    results = {item.get("tool_call_id"): item for item in row["messages"]}
    for message in row["messages"]:
        for call in message.get("tool_calls", ()):
            messages += [{**message, "tool_calls": [call]}, results[call["id"]]]
        if message["role"] != "tool" and not message.get("tool_calls"):
            messages.append(message)
    return {**row, "messages": messages}


def our_tokens_with_remedies(
    tokenizer: Any, row: dict[str, Any]
) -> tuple[tuple[list[int], list[int]] | None, str]:
    """Return our tokens, and how the row was refused: messages, and the fields that helped."""
    fields: dict[str, Any] = {}
    refusals = list[str]()
    while True:
        try:
            return our_tokens(tokenizer, row, fields), "; ".join(refusals)
        except DataError as error:
            message = re.sub(
                r"^.*?jsonl:1: |message \d+ (?:of messages: )?|'.*?' ?", "", str(error)
            )
            more = fields_named_as_remedy(str(error), fields)
            if more == fields:
                helped = "does not help"
                if "as a message of its own" in str(error):
                    row, remedy = row_with_calls_alone(row), "each call alone"
                    helped = "helps" if is_accepted(tokenizer, row) else helped
                else:
                    remedy = "the template of another model"
                    helped = "helps" if is_accepted(TOKENIZER_OF_ALL_PARTS, row) else helped
                return None, "; ".join([*refusals, f"{message[:90]} -> {remedy} {helped}"])
            names = {name: more[name] for name in more if more[name] != fields.get(name)}
            refusals.append(f"{message[:70]} -> {names}")
            fields = more


def their_tokens(
    tokenizer: Any, row: dict[str, Any], template: str, has_marks: bool
) -> tuple[list[int], list[int]] | None:
    """Return TRL's; None: refused, which may be any error of the template."""
    try:
        found = _tokenize(
            tokenizer, json.loads(json.dumps(row["messages"])), chat_template=template,
            return_assistant_tokens_mask=has_marks, tools=row.get("tools"),
        )  # fmt: skip
    except Exception:
        return None
    return [*found["input_ids"]], [*found.get("assistant_masks", ())]


def outcome(tokenizer: Any, row: dict[str, Any], template: str, marked_template: str) -> str:
    """Return how our tokens and labels of a row compare with TRL's."""
    ours, refusals = our_tokens_with_remedies(tokenizer, row)
    theirs = their_tokens(tokenizer, row, template, has_marks=marked_template == template)
    if refusals:
        if not theirs:
            return f"refused by both: {refusals}"
        compared = "equal tokens" if ours and ours[0] == theirs[0] else "other tokens"
        return f"refused by us, {'then ' + compared if ours else 'in all'}: {refusals}"
    if not theirs:
        return "refused by TRL"
    assert ours
    if ours[0] != theirs[0]:
        return "other tokens"
    marked = their_tokens(tokenizer, row, marked_template, True) if marked_template else None
    if not marked or marked[0] != ours[0]:
        return "equal tokens"
    differing = {
        tokenizer.decode([token])
        for token, *labels in zip(ours[0], ours[1], marked[1])
        if labels[0] != labels[1]
    }
    return (
        f"equal tokens, other labels: {sorted(differing)}"
        if differing
        else "equal tokens and labels"
    )


def main() -> None:
    logging.disable(logging.WARNING)
    folder = Path(sys.argv[1]) if sys.argv[1:] else TRL_TEMPLATES
    total = Counter[str]()
    for path in sorted(folder.glob("*.jinja")):
        template = path.read_text()
        copy = path.with_name(f"{path.stem}_training.jinja")
        has_marks = re.search(r"\{%-?\s*generation", template)
        marked_template = template if has_marks else copy.read_text() if copy.exists() else ""
        keys = ("thinking", "reasoning_content", "reasoning")
        names = (key for key in keys if re.search(rf"""(?:\.|['"]){key}\b""", template))
        tokenizer = tokenizer_of_template(template)
        of_template = Counter[str]()
        for form, make in row_makers(next(names, "reasoning")).items():
            counts = Counter(
                outcome(tokenizer, make(), template, marked_template) for _ in range(ROWS_OF_A_FORM)
            )
            of_template += Counter(
                {text.partition(": ")[0]: count for text, count in counts.items()}
            )
            for text, count in counts.items():
                print(f"{path.stem}: {form}: {count} {text}", flush=True)
        print(f"{path.stem}: all: {dict(of_template)}", flush=True)
        total += of_template
    print(f"all: {dict(total)}")


if __name__ == "__main__":
    main()

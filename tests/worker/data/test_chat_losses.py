"""Parts of a chat that its template leaves out are named with row and remedy, before step 1."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from pyarrow import Table, parquet

from ortlaunch.base.cache import take_cache_notes
from ortlaunch.base.errors import InputError
from ortlaunch.recipe.fields.data import Corpus, Data
from ortlaunch.worker.data.chats.findings import load_or_find_row_findings
from ortlaunch.worker.data.chats.rows import read_chats_with_fraction_of_corpus_read
from ortlaunch.worker.data.chats.samples import ANSWER, load_or_tokenize_chats_marking_trained_text
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.tokenizer import load_tokenizer_with_added_tokens_or_none
from tests.worker.data.test_chats import (
    CALL,
    CALLED,
    CHATML,
    TOOLS,
    WRITES_TOOLS,
    cache,
    corpus,
    marked,
    plain,
    tokenizer_of,
)

__all__ = ["cache"]
ASK = {"role": "user", "content": "Weather there?"}
RAIN = {"role": "assistant", "content": "Rain."}
# Thoughts and calls around the content, as Qwen3's template writes them.
CALLS_TEXT = (
    "{% for call in message.tool_calls or [] %}{{ '<call>' + call.function.name + ' ' }}"
    "{{ call.function.arguments | tojson }}{{ '</call>' }}{% endfor %}"
)
THOUGHTS_TEXT = (
    "{% if message.thinking %}{{ '<think>' + message.thinking + '</think>' }}{% endif %}"
)
WRITES_ALL = (
    WRITES_TOOLS
    + "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    + "{% if message.role == 'assistant' %}{GEN}"
    + THOUGHTS_TEXT
    + "{{ message.content }}"
    + CALLS_TEXT
    + "{{ '<|im_end|>' }}{END}{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    + "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Thoughts of the last message alone, as Qwen3's.
LAST_THOUGHTS = WRITES_ALL.replace(
    "{% if message.thinking %}", "{% if loop.last and message.thinking %}"
)
SECOND_CALL = {**CALL["tool_calls"][0], "id": "b"}


def call_of(arguments: Any, **more: Any) -> dict[str, Any]:
    """Return an answer with a call."""
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function, **more}]}


def read(folder: Path, *rows: Any, template: str = plain(WRITES_ALL), **fields: Any) -> list[str]:
    """Return the text of each row, with what is learned in brackets."""
    columns = {"messages_column": "messages", **fields}
    tokenizer = tokenizer_of("byte-level", template)
    documents = load_or_tokenize_chats_marking_trained_text(
        corpus(folder, *rows, **columns), tokenizer, print
    )
    texts, begin = [], 0
    for end in documents.ends.tolist():
        text, was_learned = "", False
        for token in (*documents.tokens[begin:end].astype(int).tolist(), -1):
            is_learned = token >= ANSWER
            text += "[]"[was_learned] if is_learned != was_learned else ""
            text += tokenizer.decode([token & (ANSWER - 1)]) if token >= 0 else ""
            was_learned = is_learned
        texts.append(text)
        begin = end
    return texts


LEAVE = r"or leave them out by ignore_fields: "
LOSSES: dict[str, tuple[Any, str, str]] = {
    "calls": (CALLED, CHATML, rf"message 2 has tool_calls, and .* not write them: .* {LEAVE}\[tool_calls\]"),
    "second call": (
        [ASK, {**CALL, "tool_calls": [*CALL["tool_calls"], SECOND_CALL]}, RAIN],
        WRITES_ALL.replace("in message.tool_calls or []", "in (message.tool_calls or [])[:1]"),
        "message 2 has call 2 of tool_calls, and .* each call as a message of its own, before its result$",
    ),
    "arguments": (
        CALLED,
        WRITES_ALL.replace("call.function.arguments | tojson", "''"),
        "message 2 has arguments of tool_calls, and",
    ),
    "tools": ({"messages": CALLED, "tools": TOOLS}, WRITES_ALL.removeprefix(WRITES_TOOLS), "the row has tools, and"),
    "thoughts": (
        [ASK, {**RAIN, "reasoning_content": "It rains."}],
        CHATML,
        r"message 2 has reasoning_content, and .*: use a template that keeps the thoughts of all answers, or leave "
        r"them out by ignore_fields: \[reasoning_content\]",
    ),
    "thoughts of an earlier answer": (
        [ASK, {**RAIN, "thinking": "Wet."}, ASK, {**RAIN, "thinking": "Still."}],
        LAST_THOUGHTS,
        "message 2 has thinking, and .*: use a template that keeps the thoughts of all answers, or train_on: last, or",
    ),
    "thoughts in a content": (
        [ASK, {**RAIN, "content": "<think>Wet.</think>Rain."}],
        CHATML.replace("message['content']", "message['content'].split('</think>')[-1]"),
        "message 2 has the begin of a content, '<think>Wet.</think>Rain.', in role assistant, and",
    ),
    "name": ([{**ASK, "name": "Ann"}, RAIN], CHATML, r"message 1 has name, and .*\[name\]"),
    "flag": ([ASK, {**RAIN, "weight": 0}], CHATML, "message 2 has weight, and .*: give train_key: weight, or"),
    "image": (
        [{**ASK, "content": [{"type": "image_url", "image_url": {}}]}, RAIN],
        CHATML,
        r"message 1 of messages: its content has a part of type image_url, .* ignore_fields: \[image_url\]",
    ),
    "image of the row": ({"messages": [ASK, RAIN], "images": ["a"]}, CHATML, r"the row has images.*\[images\]"),
    "system of the row": (
        {"messages": [ASK, RAIN], "system": "Be brief."}, CHATML, "the row has system, .* give system_column: system,",
    ),
    "unknown role": (
        [{**ASK, "role": "human"}, RAIN],
        CHATML,
        r"message 1 has the role 'human', which .* as roles: \{human: user\}, or .* roles: \{human: null\}",
    ),
    "developer": (
        [{**ASK, "role": "developer"}, RAIN], CHATML, r"message 1 has the role .*, as roles: \{developer: system\}, or",
    ),
    "dropped role": (
        CALLED,
        WRITES_ALL.replace("{% for message in messages %}", "{% for message in messages if message.role != 'tool' %}"),
        r"message 3 has a content, 'rain', in role tool, and .* roles: \{tool: null\}",
    ),
    "null content": ([ASK, {**RAIN, "content": None}], CHATML, "message 2 of messages: content is None; it must be"),
    "truncated call": (
        [ASK, call_of('{"at": "Bo')],
        WRITES_ALL,
        "message 2 of messages: the arguments of its call of weather are cut off .*: complete them, or leave",
    ),
    "no generation marks": (
        [ASK, RAIN, ASK, RAIN],
        CHATML + "{{ messages | length if messages | length > 2 }}",
        r"the chat template renders message 4 differently when .* put {% generation %} and .*train_on: last\), or .*"
        r"\(train_parts: \[answers, tool_calls\]\)$",
    ),
    "two calls with one id": (
        [ASK, {**CALL, "tool_calls": [SECOND_CALL, SECOND_CALL]}, RAIN],
        WRITES_ALL,
        "message 2 has two calls with the id 'b': give each its own",
    ),
    "two tools with one name": (
        {"messages": CALLED, "tools": [*TOOLS, *TOOLS]},
        WRITES_ALL,
        "tools has two tools named 'weather': rename one",
    ),
    "result of no call": (
        [ASK, call_of({"at": "Bonn"}, id="a"), {"role": "tool", "content": "rain", "tool_call_id": "z"}, RAIN],
        WRITES_ALL,
        "message 3 is the result of a call with the id 'z', and no message before has such a call",
    ),
    "empty answer": (
        [ASK, {**RAIN, "content": " "}],
        CHATML,
        "messages: the answer of message 2 is empty: its content is ' ', and it has no tool_calls; leave",
    ),
    "tools that are no JSON": ({"messages": CALLED, "tools": "[{"}, WRITES_ALL, r"tools is .*, which is no JSON: Exp"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_not_written_is_refused(name: str, tmp_path: Path) -> None:
    """The error has file and line, the part and a remedy."""
    row, template, message = LOSSES[name]
    with pytest.raises(DataError, match=rf"chats.jsonl:2: {message}"):
        read(tmp_path, [ASK, RAIN], row, template=plain(template))


def test_the_audit_tells_of_columns_and_of_ends(tmp_path: Path) -> None:
    """A result that no answer follows, and columns beside the chat, are findings with a row."""
    rows = [[ASK, RAIN], {"messages": CALLED[:3], "id": 7, "source": "web"}]
    source = corpus(tmp_path, *rows, messages_column="messages")
    tokenizer = tokenizer_of("byte-level", plain(WRITES_ALL))
    findings = load_or_find_row_findings(source, tokenizer)
    assert [*findings] == ["unwritten_columns", "trailing_results"]
    assert "jsonl:2: the columns id, source are not" in findings["unwritten_columns"]
    assert "ignore_fields: [id, source]" in findings["unwritten_columns"]
    assert "jsonl:2: the chat ends with the result of a tool" in findings["trailing_results"]
    assert "(1 of 2 do)" in findings["trailing_results"]
    ignored = source.model_copy(update={"ignore_fields": ("id", "source")})
    assert [*load_or_find_row_findings(ignored, tokenizer)] == ["trailing_results"]
    named = tokenizer_of("byte-level", "{{ id }}{{ source }}")
    assert [*load_or_find_row_findings(source, named)] == ["trailing_results"]


def test_what_may_be_left_out(tmp_path: Path) -> None:
    """Ignored fields, thoughts of answers that are not learned, and links between calls."""
    row = {
        "messages": [
            {**ASK, "name": "Ann"},
            {**call_of({"at": "Bonn"}, id="a"), "thinking": "Look."},
            {"role": "tool", "name": "weather", "content": "rain", "tool_call_id": "a"},
            {**RAIN, "thinking": "Wet."},
        ],
        "images": ["a.png"],
    }
    (text,) = read(
        tmp_path, row, template=plain(LAST_THOUGHTS), ignore_fields=("name", "images"), train_on="last",
    )  # fmt: skip
    assert text.endswith(
        "rain<|im_end|>\n<|im_start|>assistant\n[<think>Wet.</think>Rain.<|im_end|>]\n"
    )
    with pytest.raises(DataError, match="no row has a column or key nick"):
        read(tmp_path, [ASK, RAIN], ignore_fields=("nick",))


def test_answers_of_turns_that_a_template_rewrites(tmp_path: Path) -> None:
    """As Qwen3's: thoughts, and marks around none, are those of the last answer alone."""
    rewrites = plain(WRITES_ALL).replace(
        THOUGHTS_TEXT,
        "{% if loop.last %}{{ '<think>' + (message.thinking or '') + '</think>' }}{% endif %}",
    )
    call = {**call_of({"at": "Bonn"}), "thinking": "Look."}
    chat = [ASK, RAIN, ASK, call, {"role": "tool", "content": "rain"}, {**RAIN, "thinking": "Wet."}]
    (text,) = read(tmp_path, chat, template=rewrites, train_parts=["answers", "tool_calls"])
    assert [piece.split("]")[0] for piece in text.split("[")[1:]] == [
        "Rain.<|im_end|>",
        '<call>weather {"at": "Bonn"}</call><|im_end|>',
        "Rain.<|im_end|>",
    ]
    for template, parts, turns in (
        (rewrites, ["answers", "thoughts"], 1),
        # An answer that has no prompt of its own, and ends that depend on what follows.
        (rewrites.replace("message.role + '\n' }}", "message.role }}"), ["answers"], 2),
        (rewrites.replace("'<|im_end|>' }}{% else", "'<|im_end|>' if loop.last else '</s>' }}{% else"), ["answers"], 2),
    ):  # fmt: skip
        with pytest.raises(DataError, match="jsonl:1: the chat template renders message 2 diff"):
            read(tmp_path, [ASK, RAIN] * turns + chat[:2], template=template, train_parts=parts)


def test_an_answer_without_its_ignored_calls_is_empty(tmp_path: Path) -> None:
    """A null content is that of the calls, also if these are left out."""
    with pytest.raises(DataError, match=r"jsonl:1: .* message 2 is empty: .*train_on: last"):
        read(tmp_path, CALLED, ignore_fields=["tool_calls"])
    (text,) = read(tmp_path, CALLED, ignore_fields=["tool_calls"], train_on="last")
    assert text.count("[") == 1


@pytest.mark.parametrize("form", [marked, plain])
@pytest.mark.parametrize(
    ("parts", "learned"),
    [
        (["answers"], ["Let me look.", "Rain.<|im_end|>"]),
        (["tool_calls"], ['<call>weather {"at": "Bonn"}</call><|im_end|>']),
        (["thoughts"], ["<think>Look.</think>", "<think>Wet.</think>"]),
        (["thoughts", "tool_calls"],
         ["<think>Look.</think>", '<call>weather {"at": "Bonn"}</call><|im_end|>', "<think>Wet.</think>"]),
    ],
)  # fmt: skip
def test_parts_of_answers_are_learned(
    form: Any, parts: list[str], learned: list[str], tmp_path: Path
) -> None:
    """Thoughts, contents and calls count alone, with the marks that the template writes for them."""
    said = {**call_of({"at": "Bonn"}), "content": "Let me look.", "thinking": "Look."}
    chat = [ASK, said, {"role": "tool", "content": "rain"}, {**RAIN, "thinking": "Wet."}]
    (text,) = read(tmp_path, chat, template=form(WRITES_ALL), train_parts=parts)
    assert [piece.split("]")[0] for piece in text.split("[")[1:]] == learned


def test_thoughts_are_separated_from_calls_or_refused(tmp_path: Path) -> None:
    """Without a content between them; a template that hides where thoughts are is refused."""
    thought = [ASK, {**call_of({"at": "Bonn"}), "thinking": "Look."}]
    (text,) = read(tmp_path, thought, train_parts=["tool_calls"])
    assert '</think>[<call>weather {"at": "Bonn"}</call><|im_end|>]' in text
    twice = WRITES_ALL.replace("+ message.thinking", "+ message.thinking + message.thinking")
    with pytest.raises(
        DataError, match="jsonl:1: thoughts, content and calls of message 2 cannot be"
    ):
        read(tmp_path, thought, template=plain(twice), train_parts=["tool_calls"])


def test_forms_of_calls_and_thoughts(tmp_path: Path) -> None:
    """Arguments as text or object, older calls, other keys of thoughts: one text for all."""
    thought = {"reasoning_content": "Look."}
    older = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "weather", "arguments": '{"at": "Bonn"}'},
    }
    answers = [
        {**call_of({"at": "Bonn"}), "thinking": "Look."},
        {**call_of('{"at": "Bonn"}'), **thought},
        {**call_of({"at": "Bonn"}), "tool_calls": json.dumps(call_of({"at": "Bonn"})["tool_calls"]), **thought},
        {**older, "reasoning": "Look."},
    ]  # fmt: skip
    texts = read(tmp_path, *([ASK, answer, {"role": "function", "content": "rain"}, RAIN] for answer in answers[3:]),
                 *([ASK, answer, {"role": "tool", "content": "rain"}, RAIN] for answer in answers[:3]))  # fmt: skip
    assert len({*texts}) == 1
    assert '[<think>Look.</think><call>weather {"at": "Bonn"}</call><|im_end|>]' in texts[0]
    # A template that puts texts together takes arguments as JSON.
    joins = WRITES_ALL.replace("call.function.arguments | tojson", "' ' + call.function.arguments")
    assert (
        '  {"at": "Bonn"}</call>'
        in read(tmp_path, [ASK, answers[0], RAIN], template=plain(joins))[0]
    )


def test_arguments_of_the_template(tmp_path: Path) -> None:
    """A row's own variables; one that the template does not name is refused."""
    template = "{{ style }} " + plain(CHATML)
    row = {"messages": [ASK, RAIN], "chat_template_kwargs": {"style": "long"}}
    assert read(tmp_path, row, template=template)[0].startswith("long <|im_start|>user")
    row["chat_template_kwargs"] = {"styl": "long"}
    with pytest.raises(DataError, match=r"jsonl:1: chat_template_kwargs: styl has no effect"):
        read(tmp_path, row, template=template)


def test_the_date_of_a_template_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is continued on another day writes the date of its first day, which is printed."""
    template = "{{ strftime_now('%d %b') if strftime_now is defined }} " + plain(CHATML)
    tokenizer_of("byte-level", None).save_pretrained(tmp_path)
    data = Data(train="python-chats", tokenizer=str(tmp_path), chat_template=template)
    monkeypatch.setattr(time, "strftime", lambda form: f"today in {form}")
    tokenizer = load_tokenizer_with_added_tokens_or_none(data)
    tokenizer.save_pretrained(tmp_path / "kept")
    monkeypatch.setattr(time, "strftime", lambda form: "tomorrow")
    for day in (tokenizer, load_tokenizer_with_added_tokens_or_none(data, tmp_path / "kept")):
        text = day.apply_chat_template([ASK], tokenize=False)
        assert text.startswith("today in %d %b <|im_start|>user")
    (note,) = [line for line in take_cache_notes() if "today's date" in line]
    assert "a new run on another day has other tokens" in note


def test_default_arguments_are_within_the_template(tmp_path: Path) -> None:
    """`template_arguments` are in the exported template; a row's own come first."""
    template = "\n{% macro begin() %}{{ style }}{% endmacro %}{{ begin() }} " + plain(CHATML)
    tokenizer_of("byte-level", None).save_pretrained(tmp_path)
    fields = {"train": "python-chats", "tokenizer": str(tmp_path), "chat_template": template}
    data = Data(**fields, template_arguments={"style": "it's"})
    tokenizer = load_tokenizer_with_added_tokens_or_none(data)
    for values, style in (({}, "it's"), ({"style": "long"}, "long")):
        text = tokenizer.apply_chat_template([ASK], tokenize=False, **values)
        assert text.startswith(f"\n{style} <|im_start|>user")
    for name in ("styl", "messages", "eos_token"):
        wrong = data.model_copy(update={"template_arguments": {name: 1}})
        with pytest.raises(InputError, match=f"data.template_arguments: {name} has no effect"):
            load_tokenizer_with_added_tokens_or_none(wrong)


def test_a_column_of_tools_has_any_name(tmp_path: Path) -> None:
    """Tools are given to the template from the column that the source names."""
    row = {"messages": [ASK, RAIN], "functions": json.dumps(TOOLS)}
    (text,) = read(tmp_path, row, tools_column="functions")
    assert json.dumps(TOOLS) in text
    with pytest.raises(DataError, match=r"the row has functions, .* give tools_column: functions"):
        read(tmp_path, row)


def test_flags_where_a_template_marks_two_passages_of_an_answer(tmp_path: Path) -> None:
    """Flags of messages decide on all passages of their answer."""
    two = WRITES_ALL.replace(
        "</think>' }}{% endif %}", "</think>' }}{% endif %}{% endgeneration %}{% generation %}"
    )
    chat = [ASK, {**RAIN, "thinking": "Wet.", "weight": 0}, ASK, {**RAIN, "content": "Sun."}]
    (text,) = read(tmp_path, chat, template=marked(two), train_key="weight")
    assert [piece.split("]")[0] for piece in text.split("[")[1:]] == ["Sun.<|im_end|>"]


def test_ends_and_begins_of_answers(tmp_path: Path) -> None:
    """An end mark after another one of a call counts; a prompt may begin thoughts that are absent."""
    ends_call = (
        plain(WRITES_ALL).replace("</call>", "<|im_start|>").replace("<|im_end|>'", "' + eos_token")
    )
    (text,) = read(tmp_path, [ASK, call_of({"at": "Bonn"})], template=ends_call)
    assert text.endswith('[<call>weather {"at": "Bonn"}<|im_start|></s>]\n')
    thinks = plain(CHATML).replace("assistant\\n' }}{% endif", "assistant\\n<think>' }}{% endif")
    assert "<think>" in thinks
    (text,) = read(tmp_path, [ASK, RAIN], template=thinks)
    assert text.endswith("<|im_start|>assistant\n[Rain.<|im_end|>]\n")


def test_keys_that_parquet_adds_are_absent(tmp_path: Path) -> None:
    """Parquet gives all calls of a column the arguments that one of them has: the others are null."""
    first = [ASK, call_of({"at": "Bonn"}), RAIN]
    second = [ASK, {**call_of({"day": 3}), "content": "Look."}, RAIN]
    path = tmp_path / "rows.parquet"
    parquet.write_table(Table.from_pylist([{"messages": first}, {"messages": second}]), path)
    source = Corpus(format="parquet", path=(str(path),), messages_column="messages")
    chats = [chat.messages for chat, _ in read_chats_with_fraction_of_corpus_read(source)]
    assert chats == [[ASK, {**first[1], "content": ""}, RAIN], second]

"""Chats: only answers have labels, as in transformers; bad rows are named by file and line."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ortlaunch.base.cache import take_cache_notes
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.worker.data.chats.rows import read_chats_with_fraction_of_corpus_read
from ortlaunch.worker.data.chats.samples import (
    ANSWER,
    ChatSamples,
    load_or_tokenize_chats_marking_trained_text,
)
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.samples import IGNORED
from ortlaunch.worker.data.token_cache import Documents

# The published templates of Llama 2 and ChatML; and a plain one without generation prompt and end
# mark. GEN and END stand for the generation marks.
LLAMA = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ "
    "raise_exception('Conversation roles must "
    "alternate user/assistant/user/assistant/...') }}{% endif %}{% if loop.index0 == 0 and "
    "system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] "
    "%}{% else %}"
    "{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == "
    "'assistant' %}"
    "{GEN}{{ ' ' + content.strip() + ' ' + eos_token }}{END}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if "
    "message['role'] == 'assistant' %}"
    "{GEN}{{ message['content'] + '<|im_end|>' }}{END}{% else %}{{ message['content'] + "
    "'<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif "
    "%}"
)
PLAIN = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{GEN}{{ 'A: "
    "' + message['content'] + '\\n' }}"
    "{END}{% else %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endif %}{% endfor "
    "%}"
)
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a dog? "},
    {"role": "assistant", "content": " A näïve animal, the dog.\nIt barks."},
    {"role": "user", "content": "The dog?"},
    {"role": "assistant", "content": "A"},
]


def marked(template: str) -> str:
    """Return the template with {% generation %} around answers."""
    return template.replace("{GEN}", "{% generation %}").replace("{END}", "{% endgeneration %}")


def plain(template: str) -> str:
    return template.replace("{GEN}", "").replace("{END}", "")


def tokenizer_of(kind: str, template: str | None) -> Any:
    """Return a byte-level tokenizer as GPT-2's and Llama 3's, or one with "▁" as Llama 2's."""
    if kind == "byte-level":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        letters = pre_tokenizers.ByteLevel.alphabet()
    else:
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        backend.decoder = decoders.Metaspace()
        letters = []
    # The marks of ChatML must be single tokens, as in its own tokenizers.
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    text = [
        "What is a dog? [INST] [/INST] <<SYS>> <</SYS>> A näïve animal, "
        "the dog. It barks. Be brief.\n user assistant"
    ]
    options = {
        "vocab_size": 400,
        "special_tokens": special,
        "initial_alphabet": letters,
        "show_progress": False,
    }
    backend.train_from_iterator(text * 3, trainers.BpeTrainer(**options))
    words = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **words)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))


def corpus(folder: Path, *rows: Any, **columns: Any) -> Corpus:
    """Return a corpus of a file with these rows; a list is a row of messages."""
    lines = [json.dumps({"messages": row} if isinstance(row, list) else row) + "\n" for row in rows]
    (folder / "chats.jsonl").write_text("".join(lines))
    columns = columns or {"messages_column": "messages"}
    return Corpus(format="jsonl", path=(str(folder / "chats.jsonl"),), **columns)


@pytest.mark.parametrize("kind", ["byte-level", "spaces"])
@pytest.mark.parametrize(
    "template",
    [LLAMA, CHATML, PLAIN, CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"],
    ids=["llama 2", "chatml", "plain", "ends with a mark of its own, as Phi-3's"],
)
def test_answers_are_those_that_transformers_marks(
    template: str, kind: str, tmp_path: Path
) -> None:
    """Token ids and answers are those of apply_chat_template, with and without generation marks."""
    source = corpus(tmp_path, TURNS, TURNS[1:3], [*TURNS[1:], *TURNS[1:3]])
    by_marks, found = (
        load_or_tokenize_chats_marking_trained_text(
            source, tokenizer_of(kind, form(template)), print
        )
        for form in (marked, plain)
    )
    tokenizer = tokenizer_of(kind, marked(template))
    begin = 0
    for end, turns in zip(by_marks.ends.tolist(), (TURNS, TURNS[1:3], [*TURNS[1:], *TURNS[1:3]])):
        theirs = tokenizer.apply_chat_template(
            turns, return_dict=True, return_assistant_tokens_mask=True
        )
        tokens = by_marks.tokens[begin:end]
        assert (tokens & (ANSWER - 1)).tolist() == theirs["input_ids"]
        # transformers' own assistant mask.
        mask = (tokens >= ANSWER).astype(int).tolist()
        assert mask == theirs["assistant_masks"]
        texts = tokenizer.decode(
            [each for each, chosen in zip(theirs["input_ids"], mask) if chosen]
        )
        assert "barks" in texts
        assert "What" not in texts
        begin = end
    assert found.ends.tolist() == by_marks.ends.tolist()
    assert found.tokens[:].tolist() == by_marks.tokens[:].tolist()


def test_samples_have_one_length(tmp_path: Path) -> None:
    """Chats are cut or padded to one length; chats that are cut before any answer are left out."""
    tokenizer = tokenizer_of("byte-level", plain(CHATML))
    long = [{"role": "user", "content": "dog " * 50}, {"role": "assistant", "content": "no"}]
    documents = load_or_tokenize_chats_marking_trained_text(
        corpus(tmp_path, TURNS[1:3], long, TURNS[3:]), tokenizer, print
    )
    samples = ChatSamples(documents, 40, padding_id=2, recipe_key="data.train")
    assert len(samples) == 2
    longer = int((np.diff(documents.ends, prepend=0) > 40).sum())
    assert take_cache_notes() == [
        f"data.train: {longer} of 3 chats are longer than data.sequence_length (40) and cut "
        "off; 1 without an answer before that are left out"
    ]
    sample = samples.sample(1, 0)
    size = int(sample["attention_mask"].sum())
    ids = sample["input_ids"]
    labels = sample["labels"]
    # All tensors have the full length; the end is padding without labels.
    assert {len(value) for value in sample.values()} == {40}
    assert sample["attention_mask"].tolist() == [1] * size + [0] * (40 - size)
    assert ids[size:].tolist() == [2] * (40 - size)
    assert tokenizer.decode(labels[labels != IGNORED]) == "A<|im_end|>"
    assert (labels == ids)[labels != IGNORED].all()
    with pytest.raises(
        DataError, match=r"data.train: no chat has an answer within its first 5 tokens"
    ):
        ChatSamples(documents, 5, padding_id=2, recipe_key="data.train")


def test_answers_are_looked_for_in_little_memory() -> None:
    """The search for answers needs less than a byte for each token."""
    # A corpus may be larger than memory. Here every third chat ends with an answer.
    ends = np.cumsum(np.full(3000, 1000))
    tokens = np.zeros(ends[-1], np.uint32)
    tokens[ends[::3] - 1] |= np.uint32(ANSWER)
    tracemalloc.start()
    try:
        samples = ChatSamples(Documents(tokens, ends), 1000, padding_id=2, recipe_key="data.train")
        assert tracemalloc.get_traced_memory()[1] < len(tokens) / 3
    finally:
        tracemalloc.stop()
    assert samples.kept.tolist() == list(range(0, 3000, 3))
    # The notes of this test must not appear in the next one.
    take_cache_notes()


def test_prompt_and_response(tmp_path: Path) -> None:
    """A prompt column and a response column give chats of one turn."""
    tokenizer = tokenizer_of("spaces", plain(LLAMA))
    # The same texts once as two columns, once as messages.
    row = {"ask": TURNS[1]["content"], "say": TURNS[2]["content"]}
    pair = load_or_tokenize_chats_marking_trained_text(
        corpus(tmp_path, row, prompt_column="ask", response_column="say"), tokenizer, print
    )
    assert (
        pair.tokens[:].tolist()
        == load_or_tokenize_chats_marking_trained_text(
            corpus(tmp_path, TURNS[1:3]), tokenizer, print
        )
        .tokens[:]
        .tolist()
    )


def test_columns_of_alpaca(tmp_path: Path) -> None:
    """Input and system columns join the prompt where a row has them, in a file of one array."""
    path = tmp_path / "alpaca.json"
    rows = [
        {"ask": "A", "more": "B", "say": "C", "rule": "D"},
        {"ask": "A", "more": "", "say": "C"},
    ]
    path.write_text(json.dumps(rows, indent=1))
    columns = {"prompt_column": "ask", "response_column": "say", "system_column": "rule"}
    source = Corpus(format="jsonl", path=(str(path),), input_column="more", **columns)
    first, second = [chat.messages for chat, _ in read_chats_with_fraction_of_corpus_read(source)]
    assert first == [
        {"role": "system", "content": "D"},
        {"role": "user", "content": "A\nB"},
        {"role": "assistant", "content": "C"},
    ]
    assert [each["content"] for each in second] == ["A", "C"]
    assert (
        len(
            list(
                read_chats_with_fraction_of_corpus_read(source.model_copy(update={"most_rows": 1}))
            )
        )
        == 1
    )
    wrong = Corpus(format="jsonl", path=(str(path),), input_column="inputs", **columns)
    with pytest.raises(DataError, match="no row has a column inputs"):
        list(read_chats_with_fraction_of_corpus_read(wrong))


def test_messages_of_sharegpt(tmp_path: Path) -> None:
    """Keys and roles get the names that a chat template reads; other roles keep theirs."""
    row = {
        "talk": [{"from": "human", "value": "A"}, {"from": "gpt", "value": "B"}],
        "rule": "C",
    }
    source = corpus(
        tmp_path, row, messages_column="talk", system_column="rule", role_key="from",
        content_key="value", roles={"human": "user", "gpt": "assistant"},
    )  # fmt: skip
    assert [chat.messages for chat, _ in read_chats_with_fraction_of_corpus_read(source)] == [
        [
            {"role": "system", "content": "C"},
            {"role": "user", "content": "A"},
            {"role": "assistant", "content": "B"},
        ]
    ]
    without = source.model_copy(update={"roles": {"human": None, "gpt": "assistant"}})
    assert [
        each["content"]
        for chat, _ in read_chats_with_fraction_of_corpus_read(without)
        for each in chat.messages
    ] == [
        "C",
        "B",
    ]
    wrong = source.model_copy(update={"content_key": "text"})
    with pytest.raises(DataError, match=r"message 1 of talk has no 'text'; it has from, value"):
        list(read_chats_with_fraction_of_corpus_read(wrong))


def test_built_in_chats() -> None:
    """`python-chats` has chats of one to three turns about the language reference."""
    chats = [chat for chat, _ in read_chats_with_fraction_of_corpus_read("python-chats")]
    assert len(chats) > 500
    assert {tuple(each["role"] for each in chat.messages) for chat in chats} == {
        ("user", "assistant") * turns for turns in (1, 2, 3)
    }


WRITES_CONTENT = "{% for m in messages %}{{ m.content }}{% endfor %}"
NO_TEMPLATE = (
    r"data.tokenizer has no chat template; set "
    r"data.chat_template to a Jinja file or its text"
)


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        (TURNS, None, NO_TEMPLATE),
        (TURNS, "{% for m in messages %}{{ m['content'] }", r"data.chat_template: line 1: unexpected '}'"),
        ({"other": 1}, CHATML, r"chats.jsonl:2: no column 'messages'; it has other"),
        ({"messages": "hello"}, CHATML, r"chats.jsonl:2: messages is 'hello'; it must be a list of messages"),
        ([], CHATML, r"chats.jsonl:2: messages is \[\]; it must be a list"),
        (["hello"], CHATML, r"chats.jsonl:2: message 1 of messages is 'hello'; it must have a role and a content"),
        ([{"from": "human", "value": "x"}], CHATML, r"jsonl:2: message 1 of messages has no 'role'; it has from, v"),
        ([*TURNS[:2], {"role": "assistant", "content": None}], CHATML, r"jsonl:2: message 3 of .*: content is None"),
        (TURNS[:2], CHATML, r"jsonl:2: messages has no message of role assistant to train on; it has system, user"),
        ([*TURNS[1:3], *TURNS[2:3]], LLAMA, r"jsonl:2: the chat template rejects it: Conversation roles must"),
        (TURNS, "{{ messages|length }}" + WRITES_CONTENT, r"jsonl:2: the chat template renders message 3 diff.*genera"),
        (TURNS, WRITES_CONTENT + "{% generation %}{% endgeneration %}x", r"jsonl:2: the chat template renders no"),
    ],
)  # fmt: skip
def test_bad_chats_are_named(row: Any, template: str | None, message: str, tmp_path: Path) -> None:
    """A broken template is an error; a chat that a template refuses is named by file and line."""
    source = corpus(tmp_path, *([TURNS[1:3]] if template else []), row)
    if template in (CHATML, LLAMA):
        template = plain(template)
    # These templates fail on any chat, so that the bad row is the first one.
    elif template and "jsonl:2" in message:
        source = corpus(tmp_path, row)
        message = message.replace("jsonl:2", "jsonl:1")
    with pytest.raises(DataError, match=message):
        load_or_tokenize_chats_marking_trained_text(
            source, tokenizer_of("byte-level", template), print
        )


def test_columns_of_pairs_hold_text(tmp_path: Path) -> None:
    """An empty response is refused."""
    source = corpus(tmp_path, {"ask": "a", "say": ""}, prompt_column="ask", response_column="say")
    with pytest.raises(DataError, match=r"chats.jsonl:1: say is empty; leave the row out"):
        list(read_chats_with_fraction_of_corpus_read(source))


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
# As OpenAI writes a call, without a content.
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"at": "Bonn"}}}
    ],
}
CALLED: list[Any] = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "Weather "}, {"type": "text", "text": "there?"}],
    },
    CALL,
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "Rain."},
]
WRITES_TOOLS = "{% if tools %}{{ style }} {{ tools | tojson }}\n{% endif %}"
CALLS_OF = "(message.tool_calls | tojson if message.tool_calls else '')"
WRITES_CALLS = CHATML.replace("message['content'] +", f"message['content'] + {CALLS_OF} +")


@pytest.mark.parametrize("form", [marked, plain])
@pytest.mark.parametrize("in_json", [False, True])
def test_a_template_writes_tools_and_calls(form: Any, in_json: bool, tmp_path: Path) -> None:
    """Tools, calls and other columns that a template names are written as by transformers."""
    tokenizer = tokenizer_of("byte-level", form(WRITES_TOOLS + WRITES_CALLS))
    row = {
        "messages": CALLED,
        "tools": json.dumps(TOOLS) if in_json else TOOLS,
        "style": "brief",
        "tokenize": 1,
    }
    found = load_or_tokenize_chats_marking_trained_text(
        corpus(tmp_path, row, messages_column="messages"), tokenizer, print
    )
    # The parts are joined, and no content is an empty one.
    text = [{"role": "user", "content": "Weather there?"}, {**CALL, "content": ""}, *CALLED[2:]]
    theirs = tokenizer.apply_chat_template(text, tools=TOOLS, style="brief", tokenize=False)
    tokens = found.tokens[0 : len(found.tokens)].astype(int).tolist()
    assert tokenizer.decode([each & (ANSWER - 1) for each in tokens]) == theirs
    learned = tokenizer.decode([each - ANSWER for each in tokens if each >= ANSWER])
    assert learned == f"{json.dumps(CALL['tool_calls'])}<|im_end|>Rain.<|im_end|>"


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        ({"messages": CALLED, "tools": TOOLS}, WRITES_CALLS, "the row has tools"),
        ({"messages": CALLED, "functions": TOOLS}, WRITES_CALLS, "the row has functions"),
        ({"messages": CALLED, "tools": TOOLS}, WRITES_TOOLS + CHATML, "message 2 has tool_calls"),
        ({"messages": CALLED}, CHATML, "message 2 has tool_calls"),
        ({"messages": [*CALLED[:1], {**CALL, "tool_calls": None, "function_call": {"name": "w"}}]}, CHATML,
         "message 2 has function_call"),
    ],
)  # fmt: skip
def test_tools_that_nothing_writes_are_refused(
    row: dict[str, Any], template: str, message: str, tmp_path: Path
) -> None:
    """Tools, or calls of them, that a template leaves out are errors with file and line."""
    plain_chat = {"messages": TURNS, "tools": []}
    source = corpus(tmp_path, plain_chat, row, messages_column="messages")
    with pytest.raises(
        DataError, match=f"jsonl:2: {message}, and the chat template does not write"
    ):
        load_or_tokenize_chats_marking_trained_text(
            source, tokenizer_of("byte-level", plain(template)), print
        )


def test_parts_of_a_content_that_are_no_text(tmp_path: Path) -> None:
    """A content with a picture is refused, and a missing one where no tool is called."""
    picture = [{"type": "image", "url": "x"}, {"type": "text", "text": "What?"}]
    for content, message in (
        (picture, r"its content has a part of type image, .* ignore_fields: \[image\]"),
        (None, "content is None; it must be text"),
        ([{"text": 1}], r"its content has a part {'text': 1}; it must have a text"),
    ):
        source = corpus(tmp_path, [{"role": "user", "content": content}, TURNS[2]])
        with pytest.raises(DataError, match=rf"jsonl:1: message 1 of messages: {message}"):
            list(read_chats_with_fraction_of_corpus_read(source))
    source = corpus(tmp_path, [{"role": "user", "content": picture}, TURNS[2]])
    without = source.model_copy(update={"ignore_fields": ("image",)})
    ((chat, _),) = read_chats_with_fraction_of_corpus_read(without)
    assert chat.messages[0]["content"] == "What?"

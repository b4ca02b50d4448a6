"""Findings on a source's chats that are no errors: columns and ends from which nothing is learned.

The first rows are read for it. The answer is kept beside the tokens, so that a later start needs
neither the files nor the hub.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ortlaunch.base.cache import (
    cache_file_path_by_hashed_key,
    create_private_cache_folder_or_refuse,
)
from ortlaunch.base.errors import DamagedFile
from ortlaunch.recipe.fields.data import Corpus, is_written_by_chat_template
from ortlaunch.run_folder.folder import read_json_or_raise_damaged, write_json_atomically
from ortlaunch.worker.data.chats.rows import Chat, read_chats_with_fraction_of_corpus_read
from ortlaunch.worker.data.corpus import corpus_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FOLDER = "row-findings"
_READ_CHATS = 1000
_COLUMN_FIELDS = (
    "system_column",
    "input_column",
    "prompt_column",
    "response_column",
    "tools_column",
)


def load_or_find_row_findings(
    source: str | Corpus, tokenizer: PreTrainedTokenizerBase
) -> dict[str, str]:
    """Return the findings of the first chats of a source, by name."""
    # The built-in chats have none.
    if isinstance(source, str):
        return {}
    template = str(tokenizer.chat_template) if is_written_by_chat_template(source) else ""
    create_private_cache_folder_or_refuse(_FOLDER)
    path = cache_file_path_by_hashed_key(_FOLDER, [corpus_fingerprint(source), template])
    try:
        findings: dict[str, str] = read_json_or_raise_damaged(path)
    except (DamagedFile, FileNotFoundError):
        chats = read_chats_with_fraction_of_corpus_read(source)
        findings = findings_of_first_chats(chats, source, template)
        write_json_atomically(path, findings)
    return findings


def findings_of_first_chats(
    chats_and_fractions: Iterable[tuple[Chat, float]], source: Corpus, template_text: str
) -> dict[str, str]:
    """Return the findings of the first chats, by name.

    Args:
        chats_and_fractions: chats, each with the share of the corpus read so far.
        source: their source.
        template_text: the chat template; "": a prompt writes the rows.
    """
    used_names = {*re.findall(r"\w+", template_text), "tools", "chat_template_kwargs"}
    used_names |= {str(getattr(source, name)) for name in _COLUMN_FIELDS}
    # Without names of columns a prompt has those of Alpaca.
    used_names |= {"instruction", "input", "output"} if source.prompt else set()
    unwritten_columns = dict[str, str]()
    trailing_locations = list[str]()
    chat_count = 0
    for chat, _ in itertools.islice(chats_and_fractions, _READ_CHATS):
        chat_count += 1
        for name, value in chat.columns.items():
            if name not in used_names and value not in (None, "", [], {}):
                unwritten_columns.setdefault(name, chat.location)
        if chat.messages[-1]["role"] in ("tool", "function"):
            trailing_locations.append(chat.location)
    findings = dict[str, str]()
    if unwritten_columns:
        names = ", ".join(unwritten_columns)
        findings["unwritten_columns"] = (
            f"{next(iter(unwritten_columns.values()))}: the columns {names} are not in the text: leave "
            f"them out by ignore_fields: [{names}], or use a template that names them"
        )
    if trailing_locations:
        findings["trailing_results"] = (
            f"{trailing_locations[0]}: the chat ends with the result of a tool, which no answer follows "
            f"({len(trailing_locations):,} of {chat_count:,} do): nothing is learned from it; give the "
            "answer, or leave the message out"
        )
    return findings

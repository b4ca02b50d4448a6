"""Convert LLaMA-Factory's data sets: names in its dataset_info.json, with formats and columns."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ortlaunch.errors import InputError
from ortlaunch.json_types import Json
from ortlaunch.other_tools import llama_v1
from ortlaunch.other_tools.draft import Draft, in_one_line, number, tree_of
from ortlaunch.other_tools.trainer import FORMATS
from ortlaunch.recipe.text.tree import Tree

_FILE = "dataset_info.json"
_FORMATTINGS = ("alpaca", "sharegpt", "openai")
# Columns beside text: without them the rows ask about what is not there.
_MEDIA = ("images", "videos", "audios")
# LLaMA-Factory's columns and tags: the recipe's key, and the default.
_PROMPTS = {
    "prompt": ("prompt_column", "instruction"),
    "query": ("input_column", "input"),
    "response": ("response_column", "output"),
    "system": ("system_column", None),
}
_MESSAGES = {"messages": ("messages_column", "conversations"), "system": ("system_column", None)}
_KEYS = {"role_tag": ("role_key", "from"), "content_tag": ("content_key", "value")}
# A tag of a role: its default, and the role here.
_ROLES = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "assistant"),
    "system_tag": ("system", "system"),
}
_READ = (
    "hf_hub_url",
    "file_name",
    "formatting",
    "subset",
    "split",
    "columns",
    "tags",
    "num_samples",
)
# Other names of the same data, which LLaMA-Factory reads where the hub cannot be reached.
_MIRRORS = ("ms_hub_url", "om_hub_url")
_BY_SIZE = "sources are mixed by their sizes; LLaMA-Factory shuffles all rows together"


class _Described(NamedTuple):
    """The data sets of a dataset_info.json."""

    folder: Path
    sets: Json


class _Refused(Exception):
    """A data set that no source of the recipe can be."""


def convert(draft: Draft, chats: bool, learned: Json) -> None:
    """Convert the data sets of training and evaluation.

    Args:
        draft: the conversion.
        chats: whether the rows are chats, not those of pre-training.
        learned: fields of each source for the loss of chats.
    """
    given = draft.pop("dataset_dir")
    most = draft.pop("max_samples")
    described = _described(
        draft.recipe.place.source, in_one_line(given) if given is not None else "data"
    )
    used = False
    listed = draft.pop("train_dataset")
    sets = llama_v1.data_sets(listed) if listed is not None else None
    if listed is not None and sets is not None:
        names = tree_of([*sets[1]], listed)
        used = _part(
            draft, ("train_dataset", "train"), names, _Described(*sets), (chats, None, learned)
        )
    else:
        draft.drop("train_dataset", listed, "there is no such file; give data.train")
    for key, part in (("dataset", "train"), ("eval_dataset", "evaluation")):
        node = draft.pop(key)
        if described is None:
            why = f"no {_FILE} is in the folder, nor in the config's folders; give data.{part}"
            draft.drop(key, node, why)
        elif node is not None:
            used |= _part(draft, (key, part), node, described, (chats, number(most), learned))
    for key, node, why in (
        ("dataset_dir", given, "data.train.path"),
        ("max_samples", most, "most_rows of each source"),
    ):
        if used:
            draft.needless(key, node, f"{why} has it")
        else:
            draft.drop(key, node, f"give {why}")


def _described(config: str, given: str) -> _Described | None:
    """Return the data sets of a folder: from the current folder, or from one above the config.

    Raises:
        InputError: the file is not JSON, or not UTF-8.
    """
    above = Path(config).absolute().parents
    for folder in (Path(), *(Path(os.path.relpath(each)) for each in above)):
        file = folder / given / _FILE
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except OSError:
            continue
        except UnicodeDecodeError as error:
            raise InputError(
                f"{file}: is not UTF-8: {error.reason} at byte {error.start}"
            ) from None
        except json.JSONDecodeError as error:
            place = f"{file}:{error.lineno}:{error.colno}"
            raise InputError(f"{place}: is not JSON: {error.msg}") from None
        return _Described(folder / given, found) if isinstance(found, dict) else None
    return None


def _part(
    draft: Draft,
    keys: tuple[str, str],
    node: Tree,
    described: _Described,
    options: tuple[bool, float | None, Json],
) -> bool:
    """Convert the data sets of one key; return whether the recipe has at least one of them."""
    key, part = keys
    names = node.plain() if node.kind == "list" else str(node.scalar).split(",")
    sources = []
    for name in (str(each).strip() for each in names):
        try:
            info = described.sets.get(name)
            if not isinstance(info, dict):
                raise _Refused(f"{described.folder / _FILE} has no {name}")
            sources.append(_source(info, described.folder, *options))
        except _Refused as error:
            draft.drop(f"{key} {name}", node, f"{error}; give a source of data.{part}")
            continue
        if media := [each for each in _MEDIA if each in (info.get("columns") or {})]:
            place = node.key_place or node.place
            why = "beside text they cannot be trained here"
            raise InputError(f"{place}: {key}: the rows of {name} have {media[0]}: {why}")
        for lost in _lost(info):
            draft.drop(f"{key} {name}.{lost}", node, "no counterpart")
    file = f"as {described.folder / _FILE} has it"
    if len(sources) > 1 and part == "train":
        parts = [{"source": each, "weight": None} for each in sources]
        draft.put("data.train", node, key, parts, _BY_SIZE)
    elif sources:
        draft.put(f"data.{part}", node, f"{key}, {file}", sources[0])
        for each in sources[1:]:
            draft.drop(f"{key} {each}", node, "data.evaluation is one corpus")
    return bool(sources)


def _source(info: Json, folder: Path, chats: bool, limit: float | None, learned: Json) -> Json:
    columns = info.get("columns") or {}
    source = {**_place(info, folder), **(_chats(info, columns) if chats else {}), **learned}
    if not chats and source["format"] != "text":
        source["text_column"] = columns.get("prompt", "instruction")
    limits = [each for each in (info.get("num_samples"), limit) if each]
    return {**source, "most_rows": int(min(limits))} if limits else source


def _place(info: Json, folder: Path) -> Json:
    """Return where the rows are: on the hub, or in a file."""
    if info.get("formatting", "alpaca") not in _FORMATTINGS:
        raise _Refused(f"its format is {info['formatting']}, none of {', '.join(_FORMATTINGS)}")
    if info.get("ranking"):
        raise _Refused("it has preferences, and there is no preference training here")
    if info.get("hf_hub_url"):
        given = {key: info[key] for key in ("subset", "split") if info.get(key)}
        return {"format": "hub", "name": info["hf_hub_url"], **given}
    file = str(info.get("file_name") or "")
    form = FORMATS.get(Path(file).suffix)
    if form is None:
        kinds = ", ".join(FORMATS)
        raise _Refused(f"its file {file!r} is none of {kinds}" if file else "it has no file")
    return {"format": form, "path": str(folder / file)}


def _chats(info: Json, columns: Json) -> Json:
    messages = info.get("formatting", "alpaca") != "alpaca"
    table = _MESSAGES if messages else _PROMPTS
    found = {
        ours: columns.get(theirs, usual)
        for theirs, (ours, usual) in table.items()
        if columns.get(theirs, usual)
    }
    if not messages:
        return found
    tags = info.get("tags") or {}
    keys = {ours: tags.get(theirs, usual) for theirs, (ours, usual) in _KEYS.items()}
    named = {tags.get(theirs, usual): role for theirs, (usual, role) in _ROLES.items()}
    return {**found, **keys, "roles": {name: role for name, role in named.items() if name != role}}


def _lost(info: Json) -> Iterator[str]:
    """Yield the keys of a data set that have no counterpart."""
    read = {*_PROMPTS, *_MESSAGES}
    yield from (f"columns.{key}" for key in info.get("columns") or {} if key not in read)
    yield from (key for key in info if key not in (*_READ, *_MIRRORS) and info[key])

"""Convert LLaMA-Factory's data sets: names in its dataset_info.json, with formats and columns."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ortlaunch.base.errors import InputError
from ortlaunch.base.json_types import Json
from ortlaunch.importers import llama_v1
from ortlaunch.importers.draft import (
    Draft,
    number_of_node,
    one_line_text,
    recipe_value_tree_located_at_node,
)
from ortlaunch.importers.trainer import FORMATS
from ortlaunch.recipe.text.tree import Tree

_DESCRIPTION_FILE = "dataset_info.json"
_FORMATTINGS = ("alpaca", "sharegpt", "openai")
# Columns beside text: without them the rows ask about what is not there.
_MEDIA = ("images", "videos", "audios")
# LLaMA-Factory's columns and tags: the recipe's key, and the default.
_PROMPT_COLUMNS = {
    "prompt": ("prompt_column", "instruction"),
    "query": ("input_column", "input"),
    "response": ("response_column", "output"),
    "system": ("system_column", None),
}
_MESSAGE_COLUMNS = {
    "messages": ("messages_column", "conversations"),
    "system": ("system_column", None),
}
_MESSAGE_KEYS = {"role_tag": ("role_key", "from"), "content_tag": ("content_key", "value")}
# A tag of a role: its default, and the role here.
_ROLES = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "assistant"),
    "system_tag": ("system", "system"),
}
_READ_KEYS = (
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
_MIRROR_KEYS = ("ms_hub_url", "om_hub_url")
_MIXTURE_REMARK = "sources are mixed by their sizes; LLaMA-Factory shuffles all rows together"


class _DescribedSets(NamedTuple):
    """The data sets of a dataset_info.json."""

    folder: Path
    data_sets: Json


class _RefusedDataSet(Exception):
    """A data set that no source of the recipe can be."""


def convert_data_sets_by_dataset_info(draft: Draft, has_chats: bool, loss_fields: Json) -> None:
    """Convert the data sets of training and evaluation.

    Args:
        draft: the conversion.
        has_chats: whether the rows are chats, not those of pre-training.
        loss_fields: fields of each source for the loss of chats.
    """
    folder_node = draft.take_key("dataset_dir")
    max_samples_node = draft.take_key("max_samples")
    described_sets = _read_dataset_info_file_or_none(
        draft.recipe_tree.location.source,
        one_line_text(folder_node) if folder_node is not None else "data",
    )
    has_source = False
    train_node = draft.take_key("train_dataset")
    listed_sets = (
        llama_v1.read_parent_folder_and_listed_data_sets_or_none(train_node)
        if train_node is not None
        else None
    )
    if train_node is not None and listed_sets is not None:
        names_node = recipe_value_tree_located_at_node([*listed_sets[1]], train_node)
        has_source = _convert_data_sets_of_key_and_tell_if_any(
            draft,
            ("train_dataset", "train"),
            names_node,
            _DescribedSets(*listed_sets),
            (has_chats, None, loss_fields),
        )
    else:
        draft.report_dropped("train_dataset", train_node, "there is no such file; give data.train")
    for key, recipe_part in (("dataset", "train"), ("eval_dataset", "evaluation")):
        node = draft.take_key(key)
        if described_sets is None:
            reason = f"no {_DESCRIPTION_FILE} is in the folder, nor in the config's folders; give data.{recipe_part}"
            draft.report_dropped(key, node, reason)
        elif node is not None:
            has_source |= _convert_data_sets_of_key_and_tell_if_any(
                draft,
                (key, recipe_part),
                node,
                described_sets,
                (has_chats, number_of_node(max_samples_node), loss_fields),
            )
    for key, node, reason in (
        ("dataset_dir", folder_node, "data.train.path"),
        ("max_samples", max_samples_node, "most_rows of each source"),
    ):
        if has_source:
            draft.report_needless(key, node, f"{reason} has it")
        else:
            draft.report_dropped(key, node, f"give {reason}")


def _read_dataset_info_file_or_none(config_path: str, folder_name: str) -> _DescribedSets | None:
    """Return the data sets of a folder: from the current folder, or from one above the config.

    Raises:
        InputError: the file is not JSON, or not UTF-8.
    """
    parent_folders = Path(config_path).absolute().parents
    for folder in (Path(), *(Path(os.path.relpath(parent)) for parent in parent_folders)):
        description_path = folder / folder_name / _DESCRIPTION_FILE
        try:
            content = json.loads(description_path.read_text(encoding="utf-8"))
        except OSError:
            continue
        except UnicodeDecodeError as error:
            raise InputError(
                f"{description_path}: is not UTF-8: {error.reason} at byte {error.start}"
            ) from None
        except json.JSONDecodeError as error:
            error_location = f"{description_path}:{error.lineno}:{error.colno}"
            raise InputError(f"{error_location}: is not JSON: {error.msg}") from None
        return _DescribedSets(folder / folder_name, content) if isinstance(content, dict) else None
    return None


def _convert_data_sets_of_key_and_tell_if_any(
    draft: Draft,
    config_key_and_recipe_part: tuple[str, str],
    set_names_node: Tree,
    described_sets: _DescribedSets,
    has_chats_row_limit_and_loss_fields: tuple[bool, float | None, Json],
) -> bool:
    """Convert the data sets of one key; return whether the recipe has at least one of them."""
    config_key, recipe_part = config_key_and_recipe_part
    names = (
        set_names_node.value_without_locations()
        if set_names_node.node_type == "list"
        else str(set_names_node.scalar).split(",")
    )
    sources = []
    for set_name in (str(name_text).strip() for name_text in names):
        try:
            set_description = described_sets.data_sets.get(set_name)
            if not isinstance(set_description, dict):
                raise _RefusedDataSet(
                    f"{described_sets.folder / _DESCRIPTION_FILE} has no {set_name}"
                )
            sources.append(
                _recipe_source_of_data_set(
                    set_description, described_sets.folder, *has_chats_row_limit_and_loss_fields
                )
            )
        except _RefusedDataSet as error:
            draft.report_dropped(
                f"{config_key} {set_name}",
                set_names_node,
                f"{error}; give a source of data.{recipe_part}",
            )
            continue
        if media_columns := [
            name_text for name_text in _MEDIA if name_text in (set_description.get("columns") or {})
        ]:
            location = set_names_node.key_location or set_names_node.location
            reason = "beside text they cannot be trained here"
            raise InputError(
                f"{location}: {config_key}: the rows of {set_name} have {media_columns[0]}: {reason}"
            )
        for lost_key in _keys_without_counterpart(set_description):
            draft.report_dropped(
                f"{config_key} {set_name}.{lost_key}", set_names_node, "no counterpart"
            )
    origin_text = f"as {described_sets.folder / _DESCRIPTION_FILE} has it"
    if len(sources) > 1 and recipe_part == "train":
        weighted_sources = [{"source": name_text, "weight": None} for name_text in sources]
        draft.set_recipe_key_unless_set_and_report(
            "data.train", set_names_node, config_key, weighted_sources, _MIXTURE_REMARK
        )
    elif sources:
        draft.set_recipe_key_unless_set_and_report(
            f"data.{recipe_part}", set_names_node, f"{config_key}, {origin_text}", sources[0]
        )
        for name_text in sources[1:]:
            draft.report_dropped(
                f"{config_key} {name_text}", set_names_node, "data.evaluation is one corpus"
            )
    return bool(sources)


def _recipe_source_of_data_set(
    set_description: Json,
    data_folder: Path,
    has_chats: bool,
    row_limit: float | None,
    loss_fields: Json,
) -> Json:
    columns = set_description.get("columns") or {}
    source = {
        **_hub_or_file_fields_of_source_or_refuse(set_description, data_folder),
        **(_chat_columns_keys_and_roles(set_description, columns) if has_chats else {}),
        **loss_fields,
    }
    if not has_chats and source["format"] != "text":
        source["text_column"] = columns.get("prompt", "instruction")
    row_limits = [
        row_count for row_count in (set_description.get("num_samples"), row_limit) if row_count
    ]
    return {**source, "most_rows": int(min(row_limits))} if row_limits else source


def _hub_or_file_fields_of_source_or_refuse(set_description: Json, data_folder: Path) -> Json:
    """Return where the rows are: on the hub, or in a file."""
    if set_description.get("formatting", "alpaca") not in _FORMATTINGS:
        raise _RefusedDataSet(
            f"its format is {set_description['formatting']}, none of {', '.join(_FORMATTINGS)}"
        )
    if set_description.get("ranking"):
        raise _RefusedDataSet("it has preferences, and there is no preference training here")
    if set_description.get("hf_hub_url"):
        hub_fields = {
            key: set_description[key] for key in ("subset", "split") if set_description.get(key)
        }
        return {"format": "hub", "name": set_description["hf_hub_url"], **hub_fields}
    file_name = str(set_description.get("file_name") or "")
    file_format = FORMATS.get(Path(file_name).suffix)
    if file_format is None:
        suffixes_text = ", ".join(FORMATS)
        raise _RefusedDataSet(
            f"its file {file_name!r} is none of {suffixes_text}" if file_name else "it has no file"
        )
    return {"format": file_format, "path": str(data_folder / file_name)}


def _chat_columns_keys_and_roles(set_description: Json, columns: Json) -> Json:
    has_messages = set_description.get("formatting", "alpaca") != "alpaca"
    column_table = _MESSAGE_COLUMNS if has_messages else _PROMPT_COLUMNS
    column_fields = {
        recipe_field: columns.get(config_field, usual_name)
        for config_field, (recipe_field, usual_name) in column_table.items()
        if columns.get(config_field, usual_name)
    }
    if not has_messages:
        return column_fields
    tags = set_description.get("tags") or {}
    key_fields = {
        recipe_field: tags.get(config_field, usual_name)
        for config_field, (recipe_field, usual_name) in _MESSAGE_KEYS.items()
    }
    role_by_tag = {
        tags.get(config_field, usual_name): role
        for config_field, (usual_name, role) in _ROLES.items()
    }
    return {
        **column_fields,
        **key_fields,
        "roles": {name: role for name, role in role_by_tag.items() if name != role},
    }


def _keys_without_counterpart(set_description: Json) -> Iterator[str]:
    """Yield the keys of a data set that have no counterpart."""
    read_columns = {*_PROMPT_COLUMNS, *_MESSAGE_COLUMNS}
    yield from (
        f"columns.{key}" for key in set_description.get("columns") or {} if key not in read_columns
    )
    yield from (
        key
        for key in set_description
        if key not in (*_READ_KEYS, *_MIRROR_KEYS) and set_description[key]
    )

"""Convert LLaMA-Factory's data sets: names in its dataset_info.json, with formats and columns."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ortlaunch.base.errors import InputError
from ortlaunch.importers import llama_v1
from ortlaunch.importers.draft import (
    Draft,
    number_or_none,
    recipe_value_tree_located_at_node,
)
from ortlaunch.importers.llama_v1 import DescribedSets
from ortlaunch.importers.rules import (
    ConfigKey,
    Rule,
    Rules,
    apply_rule_and_tell_if_converted,
    convert_section_by_rules,
    drop,
    needless,
    put,
)
from ortlaunch.importers.trainer import FORMATS

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
    "tools": ("tools_column", None),
}
_MESSAGE_COLUMNS = {
    "messages": ("messages_column", "conversations"),
    "system": ("system_column", None),
    "tools": ("tools_column", None),
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
# Keys of a data set that are read, and other names of the same data, which LLaMA-Factory reads where
# the hub cannot be reached.
_SET_RULES: Rules = {
    **dict.fromkeys(("hf_hub_url", "file_name", "formatting", "subset", "split"), ()),
    **dict.fromkeys(("tags", "num_samples", "ms_hub_url", "om_hub_url"), ()),
    "columns": dict.fromkeys((*_PROMPT_COLUMNS, *_MESSAGE_COLUMNS), ()),
}
_MIXTURE_REMARK = "sources are mixed by their sizes; LLaMA-Factory shuffles all rows together"


class _SourceForm(NamedTuple):
    """The form of all sources of a config."""

    has_chats: bool
    loss_fields: dict[str, object]
    row_limit: float | None


def rules_by_dataset_info(draft: Draft, has_chats: bool, loss_fields: dict[str, object]) -> Rules:
    """Return the rules of the data sets of training and evaluation.

    Args:
        draft: the conversion.
        has_chats: whether the rows are chats, not those of pre-training.
        loss_fields: fields of each source for the loss of chats.
    """
    data_folder = str(draft.config_value("dataset_dir") or "data")
    sets = _read_dataset_info_file_or_none(draft.recipe_tree.location.source, data_folder)
    row_limit = number_or_none(draft.config_value("max_samples"))
    form = _SourceForm(has_chats, loss_fields, row_limit)
    reason = f"no {_DESCRIPTION_FILE} is in the folder, nor in the config's folders; give data."
    return {
        "train_dataset": lambda key: _data_sets_rule(
            llama_v1.read_parent_folder_and_listed_data_sets_or_none(key.node),
            "train",
            form._replace(row_limit=None),
            "there is no such file; give data.train",
        ),
        "dataset": _data_sets_rule(sets, "train", form, f"{reason}train"),
        "eval_dataset": _data_sets_rule(sets, "evaluation", form, f"{reason}evaluation"),
        "dataset_dir": _setting_of_sources("data.train.path"),
        "max_samples": _setting_of_sources("most_rows of each source"),
    }


def _setting_of_sources(recipe_text: str) -> Rule:
    """Return the rule of a key that each source has."""
    return lambda key: (
        needless(f"{recipe_text} has it")
        if key.draft.recipe_tree.find_subtree(("data", "train"))
        else drop(f"give {recipe_text}")
    )


def _read_dataset_info_file_or_none(config_path: str, folder_name: str) -> DescribedSets | None:
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
        return DescribedSets(folder / folder_name, content) if isinstance(content, dict) else None
    return None


def _data_sets_rule(
    sets: DescribedSets | None, recipe_part: str, form: _SourceForm, reason_without_sets: str
) -> Rule:
    """Return the rule of a key with names of data sets, or with a file of them."""

    def data_sets_rule(key: ConfigKey) -> Rule:
        if sets is None:
            return drop(reason_without_sets)
        names = key.value if isinstance(key.value, list) else str(key.value).split(",")
        if key.path == "train_dataset":
            names = [*sets.descriptions]
        possible_sources = [
            _convert_data_set_to_source_or_report(key, str(name).strip(), sets, recipe_part, form)
            for name in names
        ]
        sources = [source for source in possible_sources if source is not None]
        if len(sources) > 1 and recipe_part == "train":
            weighted_sources = [{"source": source, "weight": None} for source in sources]
            return put("data.train", weighted_sources, _MIXTURE_REMARK)
        others_rule = drop("data.evaluation is one corpus") if len(sources) > 1 else ()
        return (put(f"data.{recipe_part}", sources[0]), others_rule) if sources else ()

    return data_sets_rule


def _convert_data_set_to_source_or_report(
    key: ConfigKey, set_name: str, sets: DescribedSets, recipe_part: str, form: _SourceForm
) -> dict[str, object] | None:
    """Return a data set's source, and report its settings without a counterpart; None: refused."""
    description: Any = sets.descriptions.get(set_name)
    set_key = key._replace(path=f"{key.path} {set_name}")
    if reason := _reason_against_data_set(description, sets.folder):
        reason = reason.format(set_name)
        apply_rule_and_tell_if_converted(
            set_key, drop(f"{reason}; give a source of data.{recipe_part}")
        )
        return None
    columns = description.get("columns") or {}
    media_names = [name for name in _MEDIA if name in columns]
    if media_names:
        reason = f"have {media_names[0]}: beside text they cannot be trained here"
        location = key.node.key_location or key.node.location
        raise InputError(f"{location}: {key.path}: the rows of {set_name} {reason}")
    set_node = recipe_value_tree_located_at_node(description, key.node)
    convert_section_by_rules(set_key._replace(node=set_node), _SET_RULES)
    source = {
        **_hub_or_file_fields(description, sets.folder),
        **(
            _chat_columns_keys_and_roles(
                description.get("formatting", "alpaca"), columns, description.get("tags") or {}
            )
            if form.has_chats
            else {}
        ),
        **form.loss_fields,
    }
    if not form.has_chats and source["format"] != "text":
        source["text_column"] = columns.get("prompt", "instruction")
    row_limits = [*filter(None, (description.get("num_samples"), form.row_limit))]
    return {**source, "most_rows": int(min(row_limits))} if row_limits else source


def _reason_against_data_set(description: object, data_folder: Path) -> str:
    """Return the reason why no source of the recipe can be a data set; "": one can."""
    if not isinstance(description, dict):
        return f"{data_folder / _DESCRIPTION_FILE} has no {{}}"
    formatting = description.get("formatting", "alpaca")
    if formatting not in _FORMATTINGS:
        return f"its format is {formatting}, none of {', '.join(_FORMATTINGS)}"
    if description.get("ranking"):
        return "it has preferences, and there is no preference training here"
    file_name = str(description.get("file_name") or "")
    if description.get("hf_hub_url") or Path(file_name).suffix in FORMATS:
        return ""
    return (
        f"its file {file_name!r} is none of {', '.join(FORMATS)}" if file_name else "it has no file"
    )


def _hub_or_file_fields(description: dict[str, object], data_folder: Path) -> dict[str, object]:
    """Return where the rows are: on the hub, or in a file."""
    if description.get("hf_hub_url"):
        names = [name for name in ("subset", "split") if description.get(name)]
        hub_fields = {name: description[name] for name in names}
        return {"format": "hub", "name": description["hf_hub_url"], **hub_fields}
    file_name = str(description["file_name"])
    return {"format": FORMATS[Path(file_name).suffix], "path": str(data_folder / file_name)}


def _chat_columns_keys_and_roles(
    formatting: str, columns: Mapping[str, str], tags: Mapping[str, str]
) -> Mapping[str, object]:
    has_messages = formatting != "alpaca"
    column_table = _MESSAGE_COLUMNS if has_messages else _PROMPT_COLUMNS
    column_fields = {
        recipe_field: columns.get(config_field, usual_name)
        for config_field, (recipe_field, usual_name) in column_table.items()
        if columns.get(config_field, usual_name)
    }
    if not has_messages:
        return column_fields
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

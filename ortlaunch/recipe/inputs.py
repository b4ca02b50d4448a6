"""Check the inputs of a recipe on this host before a start: data files, model folders, model types."""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from ortlaunch.base.errors import IS_LFS_POINTER, LFS_POINTER, InputError
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.recipe.fields.pretrained import read_local_model_config_or_none
from ortlaunch.recipe.fields.prompts import CHAT_TEMPLATES
from ortlaunch.recipe.first_rows import missing_column_and_media_file_problems
from ortlaunch.recipe.text.closest_names import closest_or_translated_name_or_none
from ortlaunch.recipe.text.paths import EXPANDED_VARIABLES
from ortlaunch.recipe.text.source_location import Problem
from ortlaunch.tables.families import FAMILIES, family_with_all_fields_or_none
from ortlaunch.tables.tasks import TASKS

LEARNING_RATE_KEY = "optimizer.learning_rate"
_PRETRAINED_FILE_NAMES = {
    "model.pretrained": re.compile(r"config\.json|(model|pytorch_model|adapter_model)\b.*"),
    "data.tokenizer": re.compile(r".*\.(json|txt|model|tiktoken)"),
}


def absent_or_lfs_pointer_input_problems(
    recipe: Recipe, task_name: str = "train"
) -> Iterator[Problem]:
    """Yield data files, and local folders of models and tokenizers, that are absent on this host.

    Files of them that are pointers of git-lfs are absent, too.

    They may be created later, or be on other hosts.
    """
    for key, corpus in _key_and_source_pairs_of_task(recipe, task_name):
        for pattern in (corpus.path or ()) if isinstance(corpus, Corpus) else ():
            # Only a rank reads URLs, of a streamed corpus.
            matching_paths = (
                ["://"] if "://" in pattern else file_or_sorted_pattern_matches(pattern)
            )
            if os.path.isdir(pattern) and corpus.format == "folder":
                continue
            if os.path.isdir(pattern):
                message = f"got {pattern}, which is a folder; give its files: {os.path.join(pattern, '*')}"
                yield (f"{key}.path",), message
            elif not matching_paths:
                message = f"got {pattern}, which matches no file here (current folder: {current_folder_for_message()})"
                yield (f"{key}.path",), message + _remedy_for_missing_path(pattern)
            yield from (
                ((f"{key}.path",), reason)
                for reason in lfs_pointer_and_unreadable_file_messages(matching_paths)
            )
    template = recipe.data.chat_template
    is_known_or_text = template is None or "{" in template or template in CHAT_TEMPLATES
    if template is not None and not is_known_or_text and not os.path.isfile(template):
        names = ", ".join(CHAT_TEMPLATES)
        message = (
            f"got {template}, and no such file exists (the text of a template contains {{{{ }}}}; "
            f"known by name: {names})"
        )
        yield ("data.chat_template",), message + _remedy_for_missing_path(template)
    for key, value in (
        ("model.pretrained", recipe.model.pretrained),
        ("data.tokenizer", recipe.data.tokenizer),
    ):
        if not isinstance(value, str) or os.path.exists(value):
            yield from (
                ((key,), reason)
                for reason in lfs_pointer_and_unreadable_file_messages(
                    pretrained_files_in_folder(key, str(value))
                )
            )
            continue
        # Any other value may be the name of a model on the Hugging Face Hub.
        if value.startswith(("/", "./", "../", "~")) or "$" in value or "://" in value:
            yield (
                (key,),
                f"got {value}, and no such folder exists here{_remedy_for_missing_path(value)}",
            )


def column_and_vocabulary_problems(recipe: Recipe, task_name: str = "train") -> Iterator[Problem]:
    """Yield files on this host whose contents do not fit the recipe.

    These are columns and media files that the first rows of a source lack, and local weights with
    fewer rows than the tokenizer has tokens.
    """
    for key, corpus in _key_and_source_pairs_of_task(recipe, task_name):
        if isinstance(corpus, Corpus):
            for pattern in corpus.path or ():
                # One file shows the columns of all.
                files = file_or_sorted_pattern_matches(pattern)[:1]
                for path in [pattern] if corpus.format == "folder" else files:
                    yield from missing_column_and_media_file_problems(recipe, key, corpus, path)
    yield from _vocabulary_below_tokenizer_problems(recipe)
    yield from _dimensions_above_width_problems(recipe)


def _key_and_source_pairs_of_task(recipe: Recipe, task_name: str) -> list[tuple[str, str | Corpus]]:
    # An evaluation reads no training data.
    return [
        keyed_source
        for keyed_source in recipe.data.key_and_source_pairs()
        if not TASKS[task_name].evaluates or not keyed_source[0].startswith("data.train")
    ]


def rounded_vocabulary_size(vocabulary_size: int) -> int:
    """Return the vocabulary rounded up to a multiple of 8, which tensor cores need for full speed."""
    return (vocabulary_size + 7) // 8 * 8


def _vocabulary_below_tokenizer_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a vocabulary of local weights with fewer rows than a local tokenizer has tokens."""
    config = Path(str(recipe.model.pretrained), "config.json")
    tokenizer = Path(str(recipe.data.tokenizer), "tokenizer.json")
    try:
        model_vocabulary_size = json.loads(config.read_bytes()).get("vocab_size")
        tokenizer_json = json.loads(tokenizer.read_bytes())
        vocabulary = tokenizer_json["model"]["vocab"]
        added = {token["content"] for token in tokenizer_json.get("added_tokens", ())}
        # A mapping to ids, or the pairs of a Unigram model.
        tokens = {*vocabulary} if isinstance(vocabulary, dict) else {word for word, _ in vocabulary}
    # Files of other forms are read by transformers alone.
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return
    tokens |= {*added, *recipe.data.special_tokens.values(), *recipe.data.added_tokens}
    embedding_rows = (recipe.model.config or {}).get("vocab_size", model_vocabulary_size)
    if isinstance(embedding_rows, int) and embedding_rows < len(tokens):
        message = f"got {embedding_rows}, and the tokenizer has {len(tokens)} words"
        yield (
            ("model.config.vocab_size",),
            f"{message}; {rounded_vocabulary_size(len(tokens))} adds new ones",
        )


def _dimensions_above_width_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a length of an embedding's beginning that exceeds the width of the model."""
    model = recipe.model
    largest = max(model.embedding.dimensions, default=0) if model.embedding else 0
    # A width is unknown, of a model on the hub too, where it stays None.
    stored = read_local_model_config_or_none(model.pretrained) if model.pretrained else {}
    fields = {**(stored or {}), **(model.config or {})}
    family = FAMILIES.get(str(fields.get("model_type")))
    own_name = family.own_names.get("hidden_size", "hidden_size") if family else "hidden_size"
    default = family.defaults.get("hidden_size") if family and not model.pretrained else None
    width = fields.get(own_name, default)
    if isinstance(width, int) and largest > width:
        yield (
            ("model.embedding.dimensions", f"model.config.{own_name}"),
            f"got {largest}, and the model's vectors have {width} values",
        )


def model_type_unknown_to_library_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a model type that the installed transformers does not have."""
    # The types are read from the source; transformers is not imported.
    model_type = (recipe.model.config or {}).get("model_type")
    spec = (
        importlib.util.find_spec("transformers")
        if model_type is not None and family_with_all_fields_or_none(model_type) is None
        else None
    )
    for folder in (spec and spec.submodule_search_locations) or ():
        texts = [
            path.read_text(encoding="utf-8") for path in Path(folder, "models/auto").glob("*.py")
        ]
        types = {
            name for text in texts for name in re.findall(r'"([\w.-]+)"\s*[,:]\s*"\w+Config"', text)
        }
        # Without any match the layout of the source is unknown, and nothing is concluded.
        if types and model_type not in types:
            closest_type = closest_or_translated_name_or_none(
                str(model_type), (*FAMILIES, *sorted(types))
            )
            guess_text = f"; did you mean {closest_type}?" if closest_type else ""
            yield (
                ("model.config.model_type",),
                f"got {model_type}, which the installed transformers does not know{guess_text}",
            )


def repeated_file_and_high_learning_rate_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield values that are valid and most likely mistakes."""
    for key, corpus in recipe.data.key_and_source_pairs():
        patterns = (corpus.path or ()) if isinstance(corpus, Corpus) else ()
        files = Counter(
            os.path.realpath(file)
            for pattern in patterns
            for file in file_or_sorted_pattern_matches(pattern)
        )
        for file, count in files.items():
            if count > 1:
                yield (f"{key}.path",), f"{file} is listed {count} times, and is read as often"
    rate = recipe.optimizer.learning_rate
    # Adaptive optimizers normalize the gradient, so that a step is about as large as the rate.
    if rate > 1 and recipe.optimizer.traits.adapts:
        yield (
            (LEARNING_RATE_KEY,),
            f"got {rate:g}: {recipe.optimizer.name} changes each weight by about this much per "
            "step; 1e-5 to 1e-2 is usual",
        )


def current_folder_for_message() -> str:
    """Return the current folder, for a message."""
    # The current folder may have been deleted.
    try:
        return os.getcwd()
    except OSError:
        return "a current folder that was deleted"


def file_or_sorted_pattern_matches(path_or_pattern: str) -> list[str]:
    """Return the file of this name, or the sorted files that match a pattern."""
    # A name may have the letters of a pattern.
    candidate_paths = (
        [path_or_pattern]
        if os.path.isfile(path_or_pattern)
        else sorted(glob.glob(path_or_pattern, recursive=True))
    )
    return [path for path in candidate_paths if os.path.isfile(path)]


def pretrained_files_in_folder(field_key: str, local_folder: str) -> list[str]:
    """Return the files of a folder that transformers reads for a field; [] if there is none.

    field_key: model.pretrained or data.tokenizer.
    """
    names = sorted(os.listdir(local_folder)) if os.path.isdir(local_folder) else []
    if any(name.endswith(".safetensors") for name in names):
        names = [name for name in names if not name.endswith(".bin")]
    return [
        os.path.join(local_folder, name)
        for name in names
        if _PRETRAINED_FILE_NAMES[field_key].fullmatch(name)
    ]


def lfs_pointer_and_unreadable_file_messages(file_paths: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each file that is a pointer of git-lfs, or that is not readable."""
    for path in file_paths:
        if not os.path.isfile(path):
            continue
        if not os.access(path, os.R_OK):
            yield f"{path} cannot be read by this user: check its owner and mode (ls -l)"
            continue
        with open(path, "rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                yield f"{path} {IS_LFS_POINTER}"


def refuse_lfs_pointers_and_unreadable_files(file_paths: Iterable[str]) -> None:
    """Refuse pointers of git-lfs, and files that are not readable.

    Raises:
        InputError: a file is one.
    """
    if reason := next(lfs_pointer_and_unreadable_file_messages(file_paths), None):
        raise InputError(reason)


def _remedy_for_missing_path(missing_path: str) -> str:
    """Return the text on a replacement for a path that does not exist."""
    if "://" in missing_path:
        return "; only paths on this machine's disks are supported: copy or mount it, and give that path"
    if missing_path.startswith("~") or "$" in missing_path:
        names = ", ".join(f"${name}" for name in EXPANDED_VARIABLES)
        return (
            f"; ~, {names} and the names in launch.forward are expanded, where they are set: give "
            "that variable a value, or write the full path"
        )
    return "" if os.path.isabs(missing_path) else ", nor beside the recipe"

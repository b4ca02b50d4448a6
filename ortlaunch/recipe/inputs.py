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

from ortlaunch.errors import IS_LFS_POINTER, LFS_POINTER, InputError
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.recipe.fields.families import FAMILIES
from ortlaunch.recipe.fields.prompts import CHAT_TEMPLATES
from ortlaunch.recipe.first_rows import first_row_problems
from ortlaunch.recipe.text.paths import EXPANDED
from ortlaunch.recipe.text.place import Problem
from ortlaunch.recipe.text.words import closest
from ortlaunch.tasks import TASKS

RATE = "optimizer.learning_rate"
_READ = {
    "model.pretrained": re.compile(r"config\.json|(model|pytorch_model|adapter_model)\b.*"),
    "data.tokenizer": re.compile(r".*\.(json|txt|model|tiktoken)"),
}


def missing_files(recipe: Recipe, task: str = "train") -> Iterator[Problem]:
    """Yield data files, and local folders of models and tokenizers, that are absent on this host.

    Files of them that are pointers of git-lfs are absent, too.

    They may be created later, or be on other hosts.
    """
    for key, corpus in _read_sources(recipe, task):
        for pattern in (corpus.path or ()) if isinstance(corpus, Corpus) else ():
            # Only a rank reads URLs, of a streamed corpus.
            found = ["://"] if "://" in pattern else matching_files(pattern)
            if os.path.isdir(pattern) and corpus.format == "folder":
                continue
            if os.path.isdir(pattern):
                what = f"got {pattern}, which is a folder; give its files: {os.path.join(pattern, '*')}"
                yield (f"{key}.path",), what
            elif not found:
                what = f"got {pattern}, which matches no file here (current folder: {current_folder()})"
                yield (f"{key}.path",), what + _remedy(pattern)
            yield from (((f"{key}.path",), why) for why in pointers(found))
    template = recipe.data.chat_template
    given = template is None or "{" in template or template in CHAT_TEMPLATES
    if template is not None and not given and not os.path.isfile(template):
        names = ", ".join(CHAT_TEMPLATES)
        what = (
            f"got {template}, and no such file exists (the text of a template contains {{{{ }}}}; "
            f"known by name: {names})"
        )
        yield ("data.chat_template",), what + _remedy(template)
    for key, value in (
        ("model.pretrained", recipe.model.pretrained),
        ("data.tokenizer", recipe.data.tokenizer),
    ):
        if not isinstance(value, str) or os.path.exists(value):
            yield from (((key,), why) for why in pointers(files_read(key, str(value))))
            continue
        # Any other value may be the name of a model on the Hugging Face Hub.
        if value.startswith(("/", "./", "../", "~")) or "$" in value or "://" in value:
            yield (key,), f"got {value}, and no such folder exists here{_remedy(value)}"


def wrong_contents(recipe: Recipe, task: str = "train") -> Iterator[Problem]:
    """Yield files on this host whose contents do not fit the recipe.

    These are columns and media files that the first rows of a source lack, and local weights with
    fewer rows than the tokenizer has tokens.
    """
    for key, corpus in _read_sources(recipe, task):
        if isinstance(corpus, Corpus):
            for pattern in corpus.path or ():
                # One file shows the columns of all.
                files = matching_files(pattern)[:1]
                for path in [pattern] if corpus.format == "folder" else files:
                    yield from first_row_problems(recipe, key, corpus, path)
    yield from _small_vocabulary(recipe)


def _read_sources(recipe: Recipe, task: str) -> list[tuple[str, str | Corpus]]:
    """Return the sources that a task reads, each with its key in the recipe."""
    # An evaluation reads no training data.
    return [
        each
        for each in recipe.data.sources()
        if not TASKS[task].evaluates or not each[0].startswith("data.train")
    ]


def padded_vocabulary(size: int) -> int:
    """Return the vocabulary rounded up to a multiple of 8, which tensor cores need for full speed."""
    return (size + 7) // 8 * 8


def _small_vocabulary(recipe: Recipe) -> Iterator[Problem]:
    """Yield a vocabulary of local weights with fewer rows than a local tokenizer has tokens."""
    config = Path(str(recipe.model.pretrained), "config.json")
    tokenizer = Path(str(recipe.data.tokenizer), "tokenizer.json")
    try:
        own = json.loads(config.read_bytes()).get("vocab_size")
        made = json.loads(tokenizer.read_bytes())
        vocabulary = made["model"]["vocab"]
        added = {each["content"] for each in made.get("added_tokens", ())}
        # A mapping to ids, or the pairs of a Unigram model.
        words = {*vocabulary} if isinstance(vocabulary, dict) else {word for word, _ in vocabulary}
    # Files of other forms are read by transformers alone.
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return
    words |= {*added, *recipe.data.special_tokens.values(), *recipe.data.added_tokens}
    rows = (recipe.model.config or {}).get("vocab_size", own)
    if isinstance(rows, int) and rows < len(words):
        what = f"got {rows}, and the tokenizer has {len(words)} words"
        yield ("model.config.vocab_size",), f"{what}; {padded_vocabulary(len(words))} adds new ones"


def unknown_type(recipe: Recipe) -> Iterator[Problem]:
    """Yield a model type that the installed transformers does not have."""
    # The types are read from the source; transformers is not imported.
    kind = (recipe.model.config or {}).get("model_type")
    spec = (
        importlib.util.find_spec("transformers")
        if kind is not None and kind not in FAMILIES
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
        if types and kind not in types:
            guess = closest(str(kind), (*FAMILIES, *sorted(types)))
            near = f"; did you mean {guess}?" if guess else ""
            yield (
                ("model.config.model_type",),
                f"got {kind}, which the installed transformers does not know{near}",
            )


def doubtful(recipe: Recipe) -> Iterator[Problem]:
    """Yield values that are valid and most likely mistakes."""
    for key, corpus in recipe.data.sources():
        patterns = (corpus.path or ()) if isinstance(corpus, Corpus) else ()
        files = Counter(
            os.path.realpath(file) for each in patterns for file in matching_files(each)
        )
        for file, count in files.items():
            if count > 1:
                yield (f"{key}.path",), f"{file} is listed {count} times, and is read as often"
    rate = recipe.optimizer.learning_rate
    name = recipe.optimizer.name
    # Adaptive optimizers normalize the gradient, so that a step is about as large as the rate.
    if rate > 1 and recipe.optimizer.traits.adapts:
        yield (
            (RATE,),
            f"got {rate:g}: {name} changes each weight by about this much per step; 1e-5 to "
            "1e-2 is usual",
        )


def current_folder() -> str:
    """Return the current folder, for a message."""
    # The current folder may have been deleted.
    try:
        return os.getcwd()
    except OSError:
        return "a current folder that was deleted"


def matching_files(pattern: str) -> list[str]:
    """Return the file of this name, or the sorted files that match a pattern."""
    # A name may have the letters of a pattern.
    found = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
    return [path for path in found if os.path.isfile(path)]


def files_read(key: str, folder: str) -> list[str]:
    """Return the files of a folder that transformers reads for a field; [] if there is none.

    key: model.pretrained or data.tokenizer.
    """
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    if any(name.endswith(".safetensors") for name in names):
        names = [name for name in names if not name.endswith(".bin")]
    return [os.path.join(folder, name) for name in names if _READ[key].fullmatch(name)]


def pointers(paths: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each file that is a pointer of git-lfs."""
    for path in paths:
        # A file that cannot be read is an error where it is read.
        if not (os.path.isfile(path) and os.access(path, os.R_OK)):
            continue
        with open(path, "rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                yield f"{path} {IS_LFS_POINTER}"


def require_no_pointers(paths: Iterable[str]) -> None:
    """Refuse pointers of git-lfs.

    Raises:
        InputError: a file is one.
    """
    if why := next(pointers(paths), None):
        raise InputError(why)


def _remedy(path: str) -> str:
    """Return the text on a replacement for a path that does not exist."""
    if "://" in path:
        return "; only paths on this machine's disks are supported: copy or mount it, and give that path"
    if path.startswith("~") or "$" in path:
        names = ", ".join(f"${name}" for name in EXPANDED)
        return (
            f"; ~, {names} and the names in launch.forward are expanded, where they are set: give "
            "that variable a value, or write the full path"
        )
    return "" if os.path.isabs(path) else ", nor beside the recipe"

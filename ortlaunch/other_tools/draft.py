"""The recipe under construction from another tool's config, and a report on every key. Pure.

Every key ends in exactly one list of the report; none is dropped silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ortlaunch.errors import InputError
from ortlaunch.recipe.fields.field_lookup import choices, everywhere, names_in, section_at
from ortlaunch.recipe.hints.keys_of_other_tools import DIALECTS, TRUE_BY_ITSELF, USUAL, WHOLE
from ortlaunch.recipe.text.place import HIDDEN, SECRET, Place, keys, without_secrets
from ortlaunch.recipe.text.tree import Tree
from ortlaunch.recipe.text.words import closest, normal
from ortlaunch.recipe.text.yaml_text import in_line

# Prefix of dialect entries for keys that need no setting here; the reason follows.
NONE = "none: "
# Assumed with bf16: path, value and reason, as `Draft.assume` accepts them.
_NO_BF16 = (
    "engine.name",
    "eager",
    "ONNX Runtime has bf16 on CUDA only; precision=fp32 engine.name=ort runs on it",
)


class Remark(NamedTuple):
    """The result for one key."""

    place: Place
    key: str
    value: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.key}: {self.value} -> {self.text}"


@dataclass
class ImportReport:
    """The results for all keys of a config."""

    taken: list[Remark] = field(default_factory=list)
    """Converted keys; the text is the recipe's key."""
    changed: list[Remark] = field(default_factory=list)
    """Converted keys whose meaning differs slightly here."""
    dropped: list[Remark] = field(default_factory=list)
    """Keys without a counterpart."""
    needless: list[Remark] = field(default_factory=list)
    """Keys for which nothing needs to be set."""
    empty: list[str] = field(default_factory=list)
    """Keys that are null, false or empty, so they request nothing."""
    assumed: list[str] = field(default_factory=list)
    """Keys that the config lacks, with the tool's own defaults."""


class Draft:
    """The keys that are not converted yet, and the recipe so far; each part has its location."""

    def __init__(self, config: Tree, tools: Sequence[str], command: Tree, base: Tree) -> None:
        """Begin a conversion.

        Args:
            config: the other tool's config.
            tools: names of dialects, by priority.
            command: keys of the command line, which replace the config's.
            base: keys of --base.
        """
        self.left = {str(key): node for key, node in config.children.items()}
        self.tools = tools
        self.account = ImportReport()
        self.command = command
        self.base = base
        self.recipe = Tree(config.place, kind="mapping")
        # Keys that the config leaves to the base; those of one tuple are alternatives.
        self.kept: list[tuple[str, ...]] = []
        # Applied at the end by `rest`, for only then is it known which keys the config sets.
        self._assumed: list[tuple[str, object, str]] = []

    def pop(self, key: str) -> Tree | None:
        """Remove and return a key that needs a conversion; None if it is absent or empty."""
        node = self.left.get(key)
        # An empty key stays, so that `rest` reports it.
        return None if node is None or is_empty(node) else self.left.pop(key)

    def value(self, key: str) -> Any:
        """Return the value of a key without removing it."""
        node = self.left.get(key)
        return None if node is None else node.plain()

    def expected(self, path: str) -> Any:
        """Return the value that the recipe will have at a path, as far as it is known."""
        trees = (tree.find(keys(path)) for tree in (self.command, self.recipe, self.base))
        there = next((tree for tree in trees if tree is not None), None)
        assumed = [value for each, value, _ in self._assumed if each == path]
        return there.plain() if there is not None else assumed[0] if assumed else None

    def put(
        self, path: str, node: Tree | None, key: str, value: object = None, why: str = ""
    ) -> None:
        """Set a key of the recipe.

        Args:
            path: the key of the recipe.
            node: the config's value; None: the config has none, and nothing is set.
            key: the config's key, for the report.
            value: the recipe's value; None: that of `node`.
            why: how the meaning differs here; "": it is the same.
        """
        if node is None:
            return None
        tree = node if value is None else tree_of(value, node)
        there = self.recipe.find(keys(path))
        # Two keys of the config with one counterpart: equal values are fine.
        if there is not None and there.plain() == tree.plain():
            return self.needless(key, node, f"{path} has it")
        if there is not None:
            return self.drop(key, node, f"{path} is set by another key already")
        self.recipe = self.recipe.put(keys(path), tree)
        written = path if value is None else f"{path}: {in_one_line(tree)}"
        self._remark(
            self.account.changed if why else self.account.taken,
            key,
            node,
            f"{written}; {why}" if why else written,
        )
        return None

    def move(self, path: str, key: str, value: object = None, why: str = "") -> None:
        """Set a key of the recipe by one of the config, if the config has it; as `put`."""
        self.put(path, self.pop(key), key, value, why)

    def leave_out(self, key: str, why: str) -> None:
        """Report a key for which nothing needs to be set, if the config has it."""
        self.needless(key, self.pop(key), why)

    def assume(self, path: str, value: object, why: str) -> None:
        """Set a key at the end, unless the config sets it."""
        self._assumed.append((path, value, why))

    # In the reports below, a node that is None is of a key that the config lacks: nothing is reported.

    def alter(self, key: str, node: Tree | None, why: str) -> None:
        """Report a key whose counterpart is set by other keys and differs slightly."""
        self._remark(self.account.changed, key, node, why)

    def drop(self, key: str, node: Tree | None, why: str) -> None:
        """Report a key without a counterpart."""
        self._remark(self.account.dropped, key, node, why)

    def needless(self, key: str, node: Tree | None, why: str) -> None:
        """Report a key for which nothing needs to be set."""
        self._remark(self.account.needless, key, node, why)

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Refuse a config with one of these keys, of kinds of training that ortlaunch does not have.

        Raises:
            InputError: it has one.
        """
        for key, why in reasons.items():
            if node := self.pop(key):
                raise refused(key, node, why)

    def without_adapters(self, why: str) -> None:
        """Report the keys of LoRA as unused, because all weights are trained."""
        for key in [each for each in self.left if each.startswith("lora_")]:
            self.leave_out(key, f"of no effect there: {why}")

    def rest(self) -> None:
        """Convert all other keys by the dialects and the recipe's names, then set the defaults."""
        for key, node in self.left.items():
            if node.scalar is False and normal(key) in TRUE_BY_ITSELF:
                self.drop(key, node, f"here it is always so: {TRUE_BY_ITSELF[normal(key)]}")
            elif is_empty(node):
                self.account.empty.append(key)
            elif _is_usual(key, node):
                self.needless(key, node, "the tool's default, which asks for nothing")
            else:
                self._by_tables(key, node)
        self.left = {}
        if self.expected("precision") == "bf16":
            self.assume(*_NO_BF16)
        for path, value, why in self._assumed:
            if self.recipe.find(keys(path)) is None:
                self.recipe = self.recipe.put(keys(path), tree_of(value, self.recipe))
                self.account.assumed.append(f"{path}: {value} ({why})")

    def _by_tables(self, key: str, node: Tree) -> None:
        # The tool's own dialect first: the same key may mean something else in another tool.
        ours = next(
            (DIALECTS[tool][normal(key)] for tool in self.tools if normal(key) in DIALECTS[tool]),
            None,
        )
        ours = ours or everywhere().get(normal(key)) or ""
        if ours.startswith(NONE):
            self.needless(key, node, ours.removeprefix(NONE))
        elif ours == WHOLE and number(node) == 1:
            self.needless(key, node, "1 stands for none")
        elif not is_key(ours):
            self.drop(key, node, f"no counterpart; nearest: {ours}" if ours else "no counterpart")
        elif choices(keys(ours)) and isinstance(node.scalar, str):
            self._by_word(key, node, ours)
        else:
            self.put(ours, node, key)

    def _by_word(self, key: str, node: Tree, ours: str) -> None:
        words = choices(keys(ours))
        found = closest(node.scalar, words)
        if found is None:
            return self.drop(key, node, f"{ours} has {', '.join(words)}")
        return self.put(ours, node, key, found)

    def _remark(self, where: list[Remark], key: str, node: Tree | None, text: str) -> None:
        if node is None:
            return
        # The report is printed and written into the recipe, so it must not have secrets.
        value = HIDDEN if SECRET.search(key) else " ".join(in_one_line(node).split())
        where.append(
            Remark(
                node.key_place or node.place,
                key,
                value if len(value) <= 80 else value[:77] + "...",
                text,
            )
        )


def refused(key: str, node: Tree, why: str) -> InputError:
    """Return an error for a kind of training that ortlaunch does not have."""
    return InputError(f"{node.key_place or node.place}: {key}: {in_one_line(node)}: {why}")


def is_key(path: str) -> bool:
    """Return whether a text is exactly a key of the recipe."""
    # Some dialect entries are sentences.
    where = keys(path) if path and " " not in path else ()
    return (
        bool(where)
        and section_at(where[:-1]) is not None
        and str(where[-1]) in names_in(where[:-1])
    )


def is_empty(node: Tree) -> bool:
    """Return whether a value is null, false or empty."""
    # 0 is a value: a warm-up of 0 steps differs from the default.
    if node.kind != "scalar":
        return not node.children
    return node.scalar is None or node.scalar is False or node.scalar == ""


def _is_usual(key: str, node: Tree) -> bool:
    """Return whether a value is the default of a key that has no counterpart."""
    usual, value = USUAL.get(normal(key)), node.plain()
    # Of a mapping each setting that is given counts.
    if isinstance(usual, dict) and isinstance(value, dict):
        return all(each in usual and usual[each] == value[each] for each in value)
    return usual is not None and value == usual


def tree_of(value: object, node: Tree) -> Tree:
    """Return a tree of a recipe's value, with the location of another tool's value."""
    if isinstance(value, Tree):
        return value
    if isinstance(value, dict):
        return Tree(
            node.place,
            kind="mapping",
            key_place=node.key_place,
            children={k: tree_of(v, node) for k, v in value.items()},
        )
    if isinstance(value, (list, tuple)):
        return Tree(
            node.place,
            kind="list",
            key_place=node.key_place,
            children={i: tree_of(v, node) for i, v in enumerate(value)},
        )
    return Tree(node.place, value, str(value), key_place=node.key_place)


def null(node: Tree) -> Tree:
    """Return an explicit null of the recipe, with the location of another tool's value."""
    return Tree(node.place, raw="null", key_place=node.key_place)


def in_one_line(node: Tree) -> str:
    """Return a value as one line of text, without secrets."""
    if node.kind == "scalar":
        return str(node.raw if node.raw is not None else node.scalar)
    text = in_line(without_secrets(node.plain()))
    return text if len(text) <= 80 else text[:77] + "..."


def number(node: Tree | None) -> float | None:
    """Return the number of a scalar; None for anything else."""
    # bool is a subclass of int.
    value = node.scalar if node is not None and node.kind == "scalar" else None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

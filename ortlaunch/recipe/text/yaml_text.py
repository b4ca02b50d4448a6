"""Parse one YAML document as a tree whose values have their place: file, line and column.

Rules of YAML 1.1 that would surprise a user are off, and syntax errors are explained.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import yaml

from ortlaunch.recipe.text.place import Key, KeyPath, Line, Place, SourceError, dotted
from ortlaunch.recipe.text.tree import Tree, merge

# In YAML 1.1, and so in PyYAML, a float needs a point, and its exponent a sign: `1e-5` and `1.5e3`
# are strings there, and floats here.
_FLOAT = re.compile(
    r"^[-+]?(?=[0-9_.]*[.eE])([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?$"
)
# In YAML 1.1 `24:00:00` is 86400 and `010` is 8. Nobody means that in a recipe, so they stay text.
_SURPRISING = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-9]+)+(\.[0-9]*)?)")
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SCALAR_TAGS = ("str", "int", "float", "bool", "null")
# YAML 1.1 gives a date, `=` and `<<` types of their own. As values they are text here.
_WORD_TAGS = ("timestamp", "value", "merge")
_LIBRARY = "tag:yaml.org,2002:"
# PyYAML may be built without libyaml.
_FAST_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# libyaml's composer recurses in C without a limit, so that deep nesting would crash the process. A
# text of fewer characters cannot nest that deep; longer ones are read by the slow loader.
_FAST_UP_TO = 10_000
# Limits far above any recipe. They bound the time that a wrong or hostile file needs.
MAX_CHARACTERS = 250_000
_MAX_DEPTH = 50
_MAX_VALUES = 20_000


def parse(text: str, source: str, problems: list[Line], within: KeyPath = ()) -> Tree:
    """Parse one YAML document; an empty one gives a scalar without raw text.

    Args:
        text: the document.
        source: the name of the file, for the places.
        problems: a line is added to it for every duplicate key.
        within: if the text is the value of an override, that override's key.

    Raises:
        SourceError: the text is not YAML, or is larger than a recipe can be.
    """
    try:
        loader, node = _composed(text, source)
    except SourceError as error:
        place, what = error.line
        raise SourceError(place, f"{dotted(within)}: {what}" if within else what) from None
    return (
        Tree(Place(source, 1, 1))
        if node is None
        else _Builder(loader, source, problems, within).build(node)
    )


def _composed(text: str, source: str) -> tuple[Any, yaml.Node | None]:
    start = Place(source, 1, 1)
    if len(text) > MAX_CHARACTERS:
        raise SourceError(start, f"has {len(text):,} characters, too many for a recipe")
    if strange := _UNPRINTABLE.search(text):
        before = text[: strange.start()]
        place = Place(source, before.count("\n") + 1, strange.start() - before.rfind("\n"))
        raise SourceError(place, f"is not YAML: it holds the character {strange[0]!r}; remove it")
    try:
        loader = _loader(text)(text)
        return loader, loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _explained(error, source, text) from None
    # The slow loader's composer recurses in Python.
    except RecursionError:
        raise SourceError(start, "is nested too deeply for a recipe") from None
    except yaml.YAMLError as error:
        raise SourceError(start, f"is not YAML: {str(error).splitlines()[0]}") from None


def _explained(error: yaml.MarkedYAMLError, source: str, text: str) -> SourceError:
    """Return the parser's error at the place to correct, with its usual cause."""
    # A no-break space is easily copied from a web page, and looks like a space.
    if blank := re.search(r":\xa0", text):
        place = Place(
            source,
            text.count("\n", 0, blank.start()) + 1,
            blank.start() - text.rfind("\n", 0, blank.start()),
        )
        return SourceError(
            place, "is not YAML: a no-break space follows this colon; write a plain space"
        )
    found = error.problem_mark or error.context_mark
    opened = error.context_mark
    lines = text.splitlines()
    line = lines[found.line] if found and found.line < len(lines) else ""
    same_line = bool(found and opened and found.line == opened.line)
    at_opening, what, hint = _diagnosis(
        error.problem or "syntax error", error.context or "", line, same_line
    )
    mark = opened if at_opening and opened else found
    place = Place(source, mark.line + 1, mark.column + 1) if mark else Place(source, 1, 1)
    return SourceError(place, f"is not YAML: {what}" + (f"; {hint}" if hint else ""))


def _diagnosis(what: str, context: str, line: str, same_line: bool) -> tuple[bool, str, str]:
    """Return (whether the error is placed at the opening quote or bracket, problem, remedy)."""
    if "quoted" in context and "unexpected" in what:
        return True, "this quote is never closed", "close it at the end of the value"
    if "quoted" in context:
        return (
            True,
            what,
            "in double quotes a backslash is an escape: use single quotes, or / in a path",
        )
    if "flow" in context and not same_line:
        bracket = "{" if "mapping" in context else "["
        return True, f"this {bracket} is never closed", "close it, or add the comma that is missing"
    if "flow" in context:
        return False, what, "a comma, a bracket or quotes are missing"
    if "\t" in line:
        return False, what, "this line holds a tab: indent with spaces"
    if "another document" in what or "<document start>" in what:
        return (
            False,
            "a second document begins here",
            "a recipe has one document, without `---` between its lines",
        )
    if "mapping values are not allowed" in what:
        return False, what, "quote a value that contains ': ', and check the indentation"
    if "alias" in what + context or "cannot start any token" in what:
        return (
            "alias" in context,
            what,
            "quote a value that begins with `*`, `@`, `%` or a backquote",
        )
    if "':'" in what:
        return False, what, "write `key: value`, with a space after the colon"
    if "block" in what + context:
        return False, what, "the keys of one section begin in the same column"
    return False, what, ""


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes a string if `parse` would read it as a number."""


_Dumper.add_implicit_resolver(_LIBRARY + "float", _FLOAT, list("-+.0123456789"))


def load_dumped(text: str) -> Any:
    """Return the plain values of a text that `dump` wrote.

    Raises: yaml.YAMLError: the text is not YAML.
    """
    return yaml.load(text, _loader(text))


def _loader(text: str) -> Any:
    return _FAST_LOADER if len(text) < _FAST_UP_TO else yaml.SafeLoader


def dump(value: Any) -> str:
    """Return plain values as YAML text that `parse` reads back, with keys in their order."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text


def in_line(value: Any) -> str:
    """Return a value on one line, in the form of a recipe or the command line."""
    text: str = yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=True,
        width=math.inf,
    )
    # PyYAML writes `...`, the end of a document, after a plain scalar.
    return text.removesuffix("...\n").rstrip()


class _Builder:
    """Builder of a Tree from YAML nodes, without YAML 1.1's surprising values."""

    def __init__(self, loader: Any, source: str, problems: list[Line], within: KeyPath) -> None:
        self.loader = loader
        self.source = source
        self.problems = problems
        self.open: list[yaml.Node] = []
        self.path = within
        self.values = 0

    def place(self, node: yaml.Node) -> Place:
        return Place(self.source, node.start_mark.line + 1, node.start_mark.column + 1)

    def build(self, node: yaml.Node) -> Tree:
        self.values += 1
        if any(node is parent for parent in self.open):
            raise self.refused(node, "this anchor contains itself")
        # A few aliases of aliases can expand to billions of values.
        if len(self.open) > _MAX_DEPTH or self.values > _MAX_VALUES:
            raise self.refused(node, "is nested too deeply, or expands too much, for a recipe")
        if isinstance(node, yaml.ScalarNode):
            return Tree(self.place(node), self.scalar(node), node.value, quoted=bool(node.style))
        if node.tag not in (_LIBRARY + "map", _LIBRARY + "seq"):
            raise self.no_tag(node)
        self.open.append(node)
        try:
            return self.mapping(node) if isinstance(node, yaml.MappingNode) else self.sequence(node)
        finally:
            self.open.pop()

    def refused(self, node: yaml.Node, text: str) -> SourceError:
        return SourceError(self.place(node), f"{dotted(self.path)}: {text}" if self.path else text)

    def no_tag(self, node: yaml.Node) -> SourceError:
        return self.refused(
            node,
            f"the tag {node.tag.replace(_LIBRARY, '!!')} has no meaning in a recipe; remove it",
        )

    def sequence(self, node: yaml.Node) -> Tree:
        children: dict[Key, Tree] = {i: self.build(child) for i, child in enumerate(node.value)}
        return Tree(self.place(node), kind="list", children=children)

    def mapping(self, node: yaml.Node) -> Tree:
        own: dict[Key, Tree] = {}
        merged = Tree(self.place(node), kind="mapping")
        for key_node, value_node in node.value:
            key = self.key(key_node)
            above = self.path
            self.path = (*self.path, key)
            value = self.build(value_node)
            if key_node.tag == _LIBRARY + "merge":
                merged = self.merged(merged, value, value_node)
            else:
                own[key] = self.once(own.get(key), value, self.place(key_node))
            self.path = above
        return merge(merged, replace(merged, children=own))

    def merged(self, so_far: Tree, value: Tree, node: yaml.Node) -> Tree:
        """Merge `<<: *base`, or a list of bases; of a list the first base has precedence."""
        # In reverse order, because a later merge overrides an earlier one.
        bases = [value] if value.kind != "list" else list(value.children.values())[::-1]
        for base in bases:
            if base.kind != "mapping":
                raise self.refused(node, "takes a mapping, as `<<: *anchor`")
            so_far = merge(so_far, base)
        return so_far

    def once(self, first: Tree | None, value: Tree, place: Place) -> Tree:
        """Return the value with the place of its key; add a problem if `first` has the same key."""
        if first is not None and first.key_place:
            text = (
                f"{dotted(self.path)}: this key is already given in line {first.key_place.line}; "
                "keep one of them"
            )
            self.problems.append(Line(place, text))
        return replace(value, key_place=place)

    def key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self.refused(node, "a key must be text; quote it if it begins with `[` or `{`")
        return str(node.value)

    def scalar(self, node: yaml.ScalarNode) -> Any:
        text = node.value
        tag = node.tag.replace(_LIBRARY, "")
        # A plain scalar; a quoted one is always text.
        if not node.style and tag in ("int", "float", "str"):
            if _SURPRISING.fullmatch(text):
                return text
            if _FLOAT.fullmatch(text):
                return self.finite(node, float(text.replace("_", "")))
        if tag in _WORD_TAGS:
            return text
        if tag not in _SCALAR_TAGS:
            raise self.no_tag(node)
        try:
            value = self.loader.construct_object(node, deep=True)
            # It fails for half a surrogate pair, and for an integer of thousands of digits.
            f"{value}".encode()
        except (yaml.YAMLError, ValueError, LookupError, AttributeError):
            raise self.refused(node, f"cannot read {text[:80]!r}; quote it if it is text") from None
        if isinstance(value, str) and "\0" in value:
            raise self.refused(
                node,
                "holds a null character, which file names and environment variables cannot "
                "contain; remove it",
            )
        return self.finite(node, value)

    def finite(self, node: yaml.Node, value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            raise self.refused(node, f"got {node.value}; a number must be finite")
        return value

"""HTML and SVG as text in which nothing is left unescaped by mistake: a child that is no `Html` is text."""

from __future__ import annotations

import html
from collections.abc import Iterable


class Html(str):
    """Markup already: it is not escaped again."""


def tag(name: str, *children: object, **attributes: object) -> Html:
    """`tag("td", "a < b", class_="n")` -> `<td class="n">a &lt; b</td>`; what is None is left out."""
    inside = "".join(
        f' {_name(key)}="{html.escape(str(value))}"' for key, value in attributes.items() if value is not None
    )
    return Html(f"<{name}{inside}>{together(children)}</{name}>")


def together(children: Iterable[object]) -> Html:
    """Several pieces one after another."""
    return Html("".join(escaped(child) for child in children if child is not None))


def escaped(child: object) -> Html:
    """Text as markup; what cannot be seen on a page (control characters) as its Python escape."""
    if isinstance(child, Html):
        return child
    text = "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in str(child))
    return Html(html.escape(text))


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")

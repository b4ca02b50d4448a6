"""Types of documents that are read before their form is known. Standard library only."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
"""An object of a JSON or YAML document: whoever reads a value of it knows which type it has."""

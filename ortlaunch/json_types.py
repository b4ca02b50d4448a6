"""Types of documents that are read before their structure is checked. Standard library only."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
"""An object of a JSON or YAML document; the reader of a value knows its type."""

"""The type of reports."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
"""An object of a JSON document."""

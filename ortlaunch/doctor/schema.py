"""The JSON schema of what `ortlaunch doctor --json` prints."""

from __future__ import annotations

import json

from pydantic import TypeAdapter

from ortlaunch.doctor.finding import Finding


def json_schema() -> str:
    """Made from Finding, with its fields' manual."""
    schema = TypeAdapter(list[Finding]).json_schema()
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ortlaunch doctor --json",
    }
    return json.dumps({**head, **schema}, indent=2) + "\n"

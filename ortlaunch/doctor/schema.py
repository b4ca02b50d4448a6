"""The JSON schema of the output of `ortlaunch doctor --json`."""

from __future__ import annotations

import json

from pydantic import TypeAdapter

from ortlaunch.doctor.finding import Finding


def findings_json_schema_text() -> str:
    """Return the schema of a list of `Finding`; the text under each field is its description."""
    schema = TypeAdapter(list[Finding]).json_schema()
    schema_head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ortlaunch doctor --json",
    }
    return json.dumps({**schema_head, **schema}, indent=2) + "\n"

"""The endpoints of the Hugging Face hub that an upload uses, on the loopback.

The server keeps the data that it receives.
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

# huggingface_hub requests it once a day for each cache folder, without a token.
PUBLIC = "/api/agent-harnesses"


@dataclass
class Hub:
    """The hub's address, and the data that it received."""

    address: str = ""
    refuses: int = 0
    """Status of the response to a new repository, if it is not 200."""
    denies: tuple[int, str] = (0, "")
    """Status and code of the response to whoever reads, if it is not 200."""
    tokens: set[str] = field(default_factory=set)
    created: list[dict[str, object]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)

    def answer(self, path: str, body: str) -> tuple[int, dict[str, object]]:
        """Return status and JSON for a request."""
        if path == PUBLIC:
            return 404, {"error": "not found"}
        if self.denies[0]:
            return self.denies[0], {"error": "restricted"}
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return (
                (self.refuses, {"error": "no rights"})
                if self.refuses
                else (200, {"url": f"{self.address}/me/model"})
            )
        if path == "/api/validate-yaml":
            return 200, {"warnings": [], "errors": []}
        if "/preupload/" in path:
            names = [each["path"] for each in json.loads(body)["files"]]
            return 200, {
                "files": [
                    {"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names
                ]
            }
        if "/commit/" in path:
            lines = [json.loads(line) for line in body.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            self.files = {each["path"]: base64.b64decode(each["content"]) for each in files}
            return 200, {
                "commitOid": "0" * 40,
                "commitUrl": f"{self.address}/me/model/commit/{'0' * 40}",
                "success": True,
            }
        return (
            (404, {"error": "not found"})
            if self.refuses
            else (200, {"sha": "0" * 40, "id": "me/model", "siblings": []})
        )


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve the hub on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if self.path != PUBLIC:
                hub.tokens.add(self.headers.get("Authorization", ""))
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            status, said = hub.answer(self.path, body)
            text = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("X-Error-Code", hub.denies[1])
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(text)

        # All methods have the same responses.
        do_GET = do_HEAD = do_POST

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        # The interval limits how long a shutdown takes.
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Serve a local hub for this process and its children, with a token."""
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants, hf_api

    with serving(Hub()) as hub:
        # Constants for this process, which has imported them; variables for its children.
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        page = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", page)
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.address)
        monkeypatch.setattr(hf_api.api, "endpoint", hub.address)
        # transformers keeps an API of its own, which an earlier test may have made.
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield hub

"""A server for page.html: it gives artifacts and onnxruntime-web, and receives weights.

    npm pack onnxruntime-web@1.19.2 && tar -xf onnxruntime-web-1.19.2.tgz     # writes package/dist
    python serve.py ARTIFACTS package/dist received 8000

For one machine and a demonstration: whoever reaches the port can read the artifacts and send weights.
"""

import re
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit


class Handler(SimpleHTTPRequestHandler):
    """GET of the page, the artifacts and onnxruntime-web; POST of weights."""

    extensions_map = {
        **SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }
    folders: dict[str, Path] = {}
    received = Path()

    def translate_path(self, path):
        """Return the file of an address; a name that leaves its folder has none."""
        first, _, rest = urlsplit(path).path.lstrip("/").partition("/")
        if not first:
            return str(Path(__file__).with_name("page.html"))
        folder = self.folders.get(first, self.received / "none").resolve()
        file = (folder / rest).resolve()
        return str(file if file.is_relative_to(folder) else folder / "none")

    def do_POST(self):
        """Write weights as CLIENT.f32, and the number of samples beside them."""
        address = urlsplit(self.path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if address.path == "/weights":
            fields = {name: values[0] for name, values in parse_qs(address.query).items()}
            client = re.sub(r"\W", "_", fields["client"])
            (self.received / f"{client}.f32").write_bytes(body)
            (self.received / f"{client}.samples").write_text(str(int(fields["samples"])))
            print(f"{client}: {len(body):,} bytes, {fields['samples']} samples", flush=True)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        """Print nothing for a request."""


def server(artifacts, web, received, port):
    """Return a server on this machine, whose port the kernel chooses for 0."""
    folders = {"artifacts": Path(artifacts), "onnxruntime-web": Path(web)}
    Path(received).mkdir(parents=True, exist_ok=True)
    handler = type("Handler", (Handler,), {"folders": folders, "received": Path(received)})
    return ThreadingHTTPServer(("127.0.0.1", int(port)), handler)


if __name__ == "__main__":
    with server(*sys.argv[1:5]) as made:
        print(f"http://127.0.0.1:{made.server_port}/", flush=True)
        made.serve_forever()

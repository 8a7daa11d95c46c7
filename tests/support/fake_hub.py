"""A small Hugging Face Hub on the loopback interface that records all requests."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class FakeHub:
    """The contents of the Hub and the requests that it has received.

    Attributes:
        repos: repository id → file name → content, for revision `main`; other revisions are
            repositories named `id@revision`.
        renamed: old id → id, answered with a redirect as for `t5-small`.
        gated: ids that need a token with access.
        sizes: file name → a false number of bytes that the Hub reports.
        roles: token → "write" or "read"; unknown tokens are refused where a token is needed.
        uploaded: large files that are being uploaded, by digest.
        requests: every (method, path) so far.
        tokens: every Authorization header so far.
        endpoint: address to give as HF_ENDPOINT.
    """

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    uploaded: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    endpoint: str = ""

    @property
    def fetched(self) -> set[str]:
        """Returns the names of the files whose content has been requested."""
        gets = (path for method, path in self.requests if method == "GET" and "/resolve/" in path)
        return {path.split("/resolve/")[1].split("/", 1)[1] for path in gets}

    def environment(self, home: Path) -> dict[str, str]:
        """Returns environment variables for a process that uses this Hub only."""
        ours = ("HF_", "TRANSFORMERS_")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        loopback = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
        return kept | loopback | {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home)}

    def python(self, folder: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess:
        """Runs Python in a folder with this Hub, in a process, as settings are read at import."""
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=self.environment(folder / "hf") | {"PYTHONPATH": str(ROOT)} | settings,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Returns status, headers and body for a path."""
        for old, new in self.renamed.items():
            for prefix in ("/api/models/", "/"):
                rest = path.removeprefix(f"{prefix}{old}")
                if rest != path and rest[:1] in ("", "/", "?"):
                    return 307, {"Location": f"{prefix}{new}{rest}"}, b""
        plain = unquote(urlsplit(path).path)
        is_api = plain.startswith("/api/models/")
        parts = plain.removeprefix("/api/models/").strip("/").split("/")
        repo, rest = "/".join(parts[:2]), parts[2:]
        wanted = rest[1] if len(rest) > 1 else "main"
        versions = [key for key in self.repos if key.partition("@")[0] == repo]
        found = [key for key in versions if wanted in (key.partition("@")[2] or "main", _sha(key))]
        if repo in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        if not found:
            error = "RevisionNotFound" if repo in self.repos else "RepoNotFound"
            return 404, {"X-Error-Code": error}, b"{}"
        files, sha = self.repos[found[0]], _sha(found[0])
        if not is_api:
            return self._file(files, "/".join(rest[2:]), sha)
        if rest[:1] == ["tree"]:
            listing = [
                {"type": "file", "path": name, "size": len(data), "oid": _digest(data)}
                for name, data in files.items()
            ]
            return 200, {}, json.dumps(listing).encode()
        sizes = {name: self.sizes.get(name, len(data)) for name, data in files.items()}
        siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
        info = {"id": repo, "modelId": repo, "sha": sha, "siblings": siblings, "private": False}
        return 200, {}, json.dumps(info).encode()

    def take(self, path: str, token: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Receives a body that is sent to a path; returns status, headers and body."""
        plain = unquote(urlsplit(path).path)
        if plain.startswith("/large/"):
            self.uploaded[plain.removeprefix("/large/")] = body
            return 200, {}, b""
        if self.roles.get(token) != "write":
            return 401, {}, b'{"error": "Invalid username or password."}'
        repo = "/".join(plain.removeprefix("/api/models/").split("/")[:2])
        if "/commit/" in plain:
            for entry in map(json.loads, body.splitlines()):
                if entry["key"] != "header":
                    self.repos[repo][entry["value"]["path"]] = self._content(entry["value"])
            return _json({"commitUrl": f"{self.endpoint}/{repo}/commit/1", "commitOid": "1" * 40})
        asked = json.loads(body)
        if plain == "/api/repos/create":
            owner = asked.get("organization") or asked["name"].partition("/")[0]
            name = f"{owner}/{asked['name'].rpartition('/')[2]}"
            self.repos.setdefault(name, {})
            return _json({"url": f"{self.endpoint}/{name}"})
        for entry in asked.get("objects", ()):  # large files
            entry["actions"] = {"upload": {"href": f"{self.endpoint}/large/{entry['oid']}"}}
        for file in asked.get("files", ()):
            large = file["path"].endswith(".safetensors")
            file |= {"uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
        return _json({"errors": [], "warnings": []} | asked)

    def _content(self, value: dict) -> bytes:
        if "content" in value:
            return base64.b64decode(value["content"])
        assert hashlib.sha256(self.uploaded[value["oid"]]).hexdigest() == value["oid"]
        return self.uploaded[value["oid"]]

    def whoami(self, token: str) -> tuple[int, dict[str, str], bytes]:
        """Returns the answer that names the owner of a token."""
        if token not in self.roles:
            return 401, {}, b'{"error": "Invalid username or password."}'
        return _json({"name": "me", "auth": {"accessToken": {"role": self.roles[token]}}})

    def _file(self, files: dict, name: str, sha: str) -> tuple[int, dict[str, str], bytes]:
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"X-Repo-Commit": sha, "ETag": f'"{_digest(files[name])}"'}, files[name]


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    """Answers requests while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/api/whoami-v2":
                self._answer(*hub.whoami(self._token()))
            else:
                self._answer(*hub.answer(self.path))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(*hub.take(self.path, self._token(), body))

        def _token(self) -> str:
            return self.headers.get("Authorization", "").removeprefix("Bearer ")

        def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            hub.requests.append((self.command, self.path))
            hub.tokens.add(self.headers.get("Authorization", ""))
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD, do_PUT = do_GET, do_POST

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _json(value: dict) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _sha(key: str) -> str:
    return hashlib.sha1(key.encode()).hexdigest()


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()

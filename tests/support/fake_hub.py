"""A small Hugging Face Hub on the loopback interface that records all requests."""

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
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
Answer = tuple[int, dict[str, str], bytes]  # status, headers and body


@dataclass
class FakeHub:
    """The contents of the Hub and the requests that it has received.

    Attributes:
        repos: repository id → file name → content, for revision `main`; other revisions are
            repositories named `id@revision`.
        renamed: old id → id, answered with a redirect as for `t5-small`.
        gated: ids that need a token with access.
        requests: every (method, path) so far.
        tokens: every Authorization header so far.
        endpoint: address to give as HF_ENDPOINT.
    """

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
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
        prefixes = ("HF_", "TRANSFORMERS_")
        base = {key: value for key, value in os.environ.items() if not key.startswith(prefixes)}
        loopback = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
        return base | loopback | {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home)}

    def python(self, folder: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess:
        """Runs Python in a new process that uses this Hub, as settings are read at import."""
        env = self.environment(folder / "hf") | {"PYTHONPATH": str(ROOT)} | settings
        how = {"cwd": folder, "env": env, "capture_output": True, "text": True, "timeout": 120}
        return subprocess.run([sys.executable, *arguments], **how)

    def answer(self, path: str, token: str, body: bytes) -> Answer:
        """Answers a request."""
        for old, new in self.renamed.items():
            for prefix in ("/api/models/", "/"):
                rest = path.removeprefix(f"{prefix}{old}")
                if rest != path and rest[:1] in ("", "/", "?"):
                    return 307, {"Location": f"{prefix}{new}{rest}"}, b""
        plain = unquote(urlsplit(path).path)
        is_api = plain.startswith("/api/models/")
        parts = plain.removeprefix("/api/models/").strip("/").split("/")
        repo, rest = "/".join(parts[:2]), parts[2:]
        revision = rest[1] if len(rest) > 1 else "main"
        versions = [key for key in self.repos if key.partition("@")[0] == repo]
        keys = [key for key in versions if revision in (key.partition("@")[2] or "main", _sha(key))]
        if repo in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        if not keys:
            error = "RevisionNotFound" if repo in self.repos else "RepoNotFound"
            return 404, {"X-Error-Code": error}, b"{}"
        files, sha = self.repos[keys[0]], _sha(keys[0])
        if not is_api:
            content = files.get("/".join(rest[2:]))
            missing = 404, {"X-Error-Code": "EntryNotFound"}, b""
            answer = 200, {"X-Repo-Commit": sha, "ETag": f'"{_sha(content or b"")}"'}, content
            return missing if content is None else answer
        if rest[:1] == ["tree"]:
            file = lambda name, data: {"path": name, "size": len(data), "oid": _sha(data)}  # noqa: E731
            return as_json([{"type": "file"} | file(*entry) for entry in files.items()])
        siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
        info = {"id": repo, "modelId": repo, "sha": sha, "siblings": siblings, "private": False}
        return as_json(info)


class FakeApi:
    """Stands in for `huggingface_hub.HfApi`: keeps the files that are sent.

    Attributes:
        sent: repository id → file name → content.
        role: what the token may do.
    """

    sent: dict[str, dict[str, bytes]] = {}
    role = "write"

    def whoami(self) -> dict:
        return {"name": "me", "auth": {"accessToken": {"role": self.role}}}

    def create_repo(self, name: str, exist_ok: bool) -> None:
        assert exist_ok
        self.sent.setdefault(name, {})

    def upload_folder(
        self, repo_id, folder_path, allow_patterns, commit_message
    ) -> SimpleNamespace:
        files = {name: (folder_path / name).read_bytes() for name in allow_patterns}
        self.sent[repo_id].update(files)
        return SimpleNamespace(commit_url=f"https://huggingface.co/{repo_id}/commit/1")


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    """Answers requests while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            token = self.headers.get("Authorization", "")
            hub.requests.append((self.command, self.path))
            hub.tokens.add(token)
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, headers, body = hub.answer(self.path, token.removeprefix("Bearer "), data)
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_POST = do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def as_json(value: object) -> Answer:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _sha(data: bytes | str) -> str:
    return hashlib.sha1(data.encode() if isinstance(data, str) else data).hexdigest()

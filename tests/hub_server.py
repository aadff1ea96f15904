"""A hub on loopback: the routes that the huggingface_hub library requests, for folders of this machine.

Files of at least `LFS_BYTES` are redirected to another host (localhost), as a hub does with large files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LFS_BYTES = 10_000
TOKEN = "hf_of_the_test"


@dataclass
class Repository:
    """The files of one repository at each commit, and who may read them."""

    commits: dict[str, Path]  # the last one is the head of the main branch
    names: dict[str, str] = field(default_factory=dict)  # commits by branch or tag
    access: str = "public"  # or "private", "gated"

    def commit_of(self, revision: str) -> str | None:
        if revision == "main":
            return list(self.commits)[-1]
        return revision if revision in self.commits else self.names.get(revision)


@dataclass
class Hub:
    """A hub, and the requests that it has received."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)  # method, path and range
    bytes_until_cut: int | None = None  # the first body that is longer ends there, without the rest
    failure: int | None = None  # status of every answer
    has_leaked_token: bool = False  # the user's token was sent to the host of large files
    url: str = ""

    def add(self, name: str, folder: Path, *, commit: str | None = None, **settings: Any) -> str:
        """Add a folder as the head of a repository. Return its commit."""
        commit = commit or hashlib.sha1(f"{name}{len(self.repositories)}{folder}".encode()).hexdigest()
        repository = self.repositories.setdefault(name, Repository({}, **settings))
        repository.commits[commit] = folder
        return commit

    def fetched(self) -> list[str]:
        """Return the names of the files of which a whole or a part was requested."""
        names = set()
        for request in self.requests:
            if match := re.match(r"GET /[^/]+/[^/]+/resolve/[^/]+/([^ ]+)", request):
                names.add(urllib.parse.unquote(match[1]))
            elif match := re.match(r"GET /content/([^ ]+)", request):  # where a large file was redirected to
                file = Path(urllib.parse.unquote(match[1]))
                folders = [folder for each in self.repositories.values() for folder in each.commits.values()]
                names |= {str(file.relative_to(folder)) for folder in folders if file.is_relative_to(folder)}
        return sorted(names)

    def environment(self, home: Path, **variables: str) -> dict[str, str]:
        """Return an environment in which this hub is the only one, with caches in `home`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "MOESERVE_"))}
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(home / "hf"), "MOESERVE_CACHE": str(home / "cache")}
        return kept | own | {"OMP_WAIT_POLICY": "passive"} | variables

    def run(self, *arguments: str, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run Python with arguments in that environment."""
        return subprocess.run(
            [sys.executable, *arguments],
            env=self.environment(home, **variables),
            cwd=home,
            capture_output=True,
            text=True,
            timeout=200,
        )


@contextmanager
def hub_on_loopback() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def copied(folder: Path, to: Path, **files: str) -> Path:
    """Copy a folder. Keys of `files` name files by `__` for a dot; their values are what the files hold."""
    shutil.copytree(folder, to)
    for name, text in files.items():
        (to / name.replace("__", ".")).write_text(text)
    return to


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: Hub

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, has_body: bool) -> None:
        hub = self.served
        url = urllib.parse.urlsplit(self.path)
        hub.requests.append(f"{self.command} {url.path} {self.headers.get('Range', '')}".strip())
        if hub.failure is not None:
            return self._send(hub.failure, b"{}", has_body)
        if match := re.fullmatch(r"/content/(.+)", url.path):
            hub.has_leaked_token |= "Authorization" in self.headers
            return self._send_file(Path(urllib.parse.unquote(match[1])), {}, has_body)
        match = re.fullmatch(
            r"(?:/api/models)?/(?P<name>[^/]+/[^/]+)(?:/(?P<what>\w+)/(?P<revision>[^/]+)(?P<path>/.*)?)?", url.path
        )
        repository = None if match is None else hub.repositories.get(match["name"])
        if match is None or repository is None:
            return self._refuse(404, "RepoNotFound", has_body)
        is_authorised = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if "Authorization" in self.headers and not is_authorised:
            return self._refuse(401, "", has_body, "Invalid credentials in Authorization header")
        is_api = url.path.startswith("/api/")
        if repository.access == "private" and not is_authorised:
            return self._refuse(401, "RepoNotFound", has_body)
        if repository.access == "gated" and not is_authorised and not is_api:
            return self._refuse(401, "GatedRepo", has_body)
        commit = repository.commit_of(urllib.parse.unquote(match["revision"] or "main"))
        if commit is None:
            return self._refuse(404, "RevisionNotFound", has_body)
        folder = repository.commits[commit]
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        if is_api and match["what"] == "tree":
            entries = [self._entry(file, folder) for file in files]
            return self._send(200, json.dumps(entries).encode(), has_body)
        if is_api:
            siblings = [{"rfilename": str(file.relative_to(folder)), "size": file.stat().st_size} for file in files]
            info = {"id": match["name"], "sha": commit, "siblings": siblings, "private": False, "tags": []}
            return self._send(200, json.dumps(info).encode(), has_body)
        file = folder / urllib.parse.unquote(match["path"] or "/").lstrip("/")
        if file not in files:
            return self._refuse(404, "EntryNotFound", has_body, commit=commit)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_digest(file)}"'}
        if file.stat().st_size < LFS_BYTES:
            return self._send_file(file, headers, has_body)
        headers |= {"X-Linked-Size": str(file.stat().st_size), "X-Linked-ETag": headers["ETag"]}
        headers["Location"] = f"{hub.url.replace('127.0.0.1', 'localhost')}/content/{urllib.parse.quote(str(file))}"
        self._send(302, b"", has_body, headers)

    def _entry(self, file: Path, folder: Path) -> dict[str, Any]:
        size = file.stat().st_size
        entry: dict[str, Any] = {"type": "file", "path": str(file.relative_to(folder)), "size": size, "oid": "0" * 40}
        if size >= LFS_BYTES:
            entry["lfs"] = {"oid": _digest(file), "size": size, "pointerSize": 130}
        return entry

    def _refuse(self, status: int, code: str, has_body: bool, why: str = "", commit: str | None = None) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": why or code}
        self._send(status, b"{}", has_body, headers | ({"X-Repo-Commit": commit} if commit else {}))

    def _send_file(self, file: Path, headers: dict[str, str], has_body: bool) -> None:
        content, status = file.read_bytes(), 200
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(match[1]), min(int(match[2] or len(content)), len(content) - 1)
            headers = headers | {"Content-Range": f"bytes {start}-{end}/{len(content)}"}
            content, status = content[start : end + 1], 206
        self._send(status, content, has_body, {"ETag": f'"{_digest(file)}"'} | headers)

    def _send(self, status: int, body: bytes, has_body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        cut = self.served.bytes_until_cut
        if has_body and cut is not None and len(body) > cut:
            self.served.bytes_until_cut = None
            self.wfile.write(body[:cut])
            self.close_connection = True
        elif has_body:
            self.wfile.write(body)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()

"""A stand-in for the Hugging Face hub: what huggingface_hub calls to make a repository, to send files and to get them."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN, OWNER = "hf_of_a_test", "me"


class Repository:
    def __init__(self, private: bool) -> None:
        self.private, self.commits, self.message = private, [], ""  # of each commit its hash and all of its files

    def commit(self, files: dict[str, bytes], message: str = "") -> str:
        whole = {**(self.commits[-1][1] if self.commits else {}), **files}
        name = hashlib.sha1(repr((len(self.commits), sorted(whole.items()))).encode()).hexdigest()
        self.commits.append((name, whole))
        self.message = message
        return name

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision == "main":
            return self.commits[-1]
        return next((commit for commit in self.commits if commit[0] == revision), None)


class LocalHub:
    """What it holds, what it was asked, and which calls are to fail: the end of a path, and the status that it gives."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}  # by their SHA-256
        self.asked: list[str] = []
        self.failing: dict[str, int] = {}
        self.url = ""


class Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def answer(self, content: object = None, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refused(self, path: str, body: bytes) -> bool:
        self.hub.asked.append(f"{self.command} {path}")
        writes = self.command in ("POST", "PUT") or path == "/api/whoami-v2"
        if "/lfs/store/" not in path and writes and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid credentials"}, 401)
            return True
        for end, status in self.hub.failing.items():
            if path.endswith(end):
                if status:
                    self.answer({"error": "so it is"}, status)
                else:
                    self.close_connection = True
                    self.connection.close()
                return True
        return False

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.refused(path, body):
            return
        hub = self.hub
        if path == "/api/repos/create":
            asked = json.loads(body)
            name, private = f"{asked['organization'] or OWNER}/{asked['name']}", asked.get("visibility") == "private"
            if not name.startswith(f"{OWNER}/"):
                return self.answer({"error": "You don't have the rights"}, 403)
            if name in hub.repositories:
                return self.answer({"error": "You already created this model repo"}, 409)
            hub.repositories[name] = Repository(private or asked.get("private", False))
            hub.repositories[name].commit({".gitattributes": b"*.safetensors filter=lfs"})
            return self.answer({"url": f"{hub.url}/{name}", "name": name, "id": name})
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path.endswith(".git/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            found = [self._object(one["oid"], one["size"]) for one in wanted]
            return self.answer({"transfer": "basic", "objects": found})
        owner_name, _, verb = path.removeprefix("/api/models/").rpartition("/main")[0].rpartition("/")
        if verb == "preupload":
            files = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": _mode(f["path"]), "shouldIgnore": False} for f in files]
            return self.answer({"files": modes})
        if verb == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            files = {}
            for line in lines:
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                if line["key"] == "lfsFile":
                    files[value["path"]] = hub.large[value["oid"]]
            commit = hub.repositories[owner_name].commit(files, lines[0]["value"]["summary"])
            url = f"{hub.url}/{owner_name}/commit/{commit}"
            return self.answer({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})
        return self.answer({"error": f"no such call: {path}"}, 404)

    def _object(self, oid: str, size: int) -> dict:
        upload = {"href": f"{self.hub.url}/lfs/store/{oid}", "header": {}}
        return {"oid": oid, "size": size, **({} if oid in self.hub.large else {"actions": {"upload": upload}})}

    def do_PUT(self) -> None:
        path, body = self.path, self.rfile.read(int(self.headers["Content-Length"]))
        if self.refused(path, body):
            return
        oid = path.rpartition("/")[2]
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.large[oid] = body
        self.answer({})

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.refused(path, b""):
            return
        if path == "/api/whoami-v2":
            return self.answer({"type": "user", "name": OWNER, "auth": {"accessToken": {"role": "write"}}})
        if path.startswith("/api/models/"):
            name, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            name, _, tree = name.partition("/tree/")
            return self._model(name, revision or tree.partition("/")[0] or "main", bool(tree))
        name, _, rest = path.lstrip("/").partition("/resolve/")
        revision, _, file = rest.partition("/")
        return self._file(name, revision, file) if file else self.answer({"error": "no such page"}, 404)

    do_HEAD = do_GET

    def _model(self, name: str, revision: str, tree: bool) -> None:
        found = self._found(name, revision)
        if found is None:
            return
        commit, files = found
        if tree:
            return self.answer(
                [{"type": "file", "path": path, "size": len(data), "oid": commit} for path, data in files.items()]
            )
        siblings = [{"rfilename": path} for path in files]
        self.answer({"id": name, "sha": commit, "private": self.hub.repositories[name].private, "siblings": siblings})

    def _file(self, name: str, revision: str, path: str) -> None:
        found = self._found(name, revision)
        if found is None:
            return
        commit, files = found
        if path not in files:
            return self.answer({"error": "no entry"}, 404, X_Error_Code="EntryNotFound")
        etag = f'"{hashlib.sha256(files[path]).hexdigest()}"'
        self.answer(files[path], X_Repo_Commit=commit, ETag=etag, X_Linked_Size=str(len(files[path])))

    def _found(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        elif (found := repository.at(revision)) is not None:
            return found
        else:
            self.answer({"error": "Invalid rev id"}, 404, X_Error_Code="RevisionNotFound")
        return None


def _mode(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"


@contextlib.contextmanager
def local_hub() -> Iterator[LocalHub]:
    hub = LocalHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OfHub", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def point_to(hub: LocalHub, monkeypatch, cache) -> None:
    """Has huggingface_hub ask this one, as HF_ENDPOINT does before it is imported; with a token, and a cache of its own."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)

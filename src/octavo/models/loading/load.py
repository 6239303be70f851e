"""From what a user names to a model: spec, weights, tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.errors import LoadError
from octavo.models.loading.digest import hash_directory, hash_file
from octavo.models.loading.gguf import open_gguf
from octavo.models.loading.gguf_model import read_model
from octavo.models.loading.safetensors_model import read_directory, read_eos_ids
from octavo.models.spec import ModelSpec, ModelWeights
from octavo.text.gguf_tokenizer import tokenizer_from_gguf
from octavo.text.hf_tokenizer import tokenizer_from_directory
from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for a backend. Its weights stay memory-mapped; `weights_sha256` is their identity."""

    spec: ModelSpec
    weights: ModelWeights
    tokenizer: Tokenizer
    name: str
    path: Path
    weights_sha256: str


def load_model(source: str | Path) -> LoadedModel:
    path = Path(source)
    if path.is_dir():
        return _load_directory(path)
    if not path.is_file():
        raise LoadError(f"{source}: no such file")
    file = open_gguf(path)
    spec, weights = read_model(file)
    tokenizer = tokenizer_from_gguf(file.metadata, str(path))
    return LoadedModel(spec, weights, tokenizer, path.stem, path, hash_file(path))


def _load_directory(path: Path) -> LoadedModel:
    spec, weights = read_directory(path)
    tokenizer = tokenizer_from_directory(path, spec.vocab_size, read_eos_ids(path))
    return LoadedModel(spec, weights, tokenizer, path.resolve().name, path, hash_directory(path))

"""From what a user names to a model: spec, weights, tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.errors import LoadError
from octavo.models.loading.catalog import catalog_names, did_you_mean, find_entry, models_dir
from octavo.models.loading.digest import hash_directory, hash_file
from octavo.models.loading.fetch import fetch
from octavo.models.loading.gguf import open_gguf
from octavo.models.loading.gguf_model import read_model
from octavo.models.loading.hub import fetch_from_hub, is_hub_id
from octavo.models.loading.progress import Report, silent
from octavo.models.loading.safetensors_model import read_directory, read_eos_ids
from octavo.models.spec import ModelSpec, ModelWeights
from octavo.text.gguf_tokenizer import tokenizer_from_gguf
from octavo.text.hf_tokenizer import tokenizer_from_directory
from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for a backend. Its weights stay memory-mapped; `weights_sha256` is their identity.

    Attributes:
        name: what the user called it: the catalog name, hub id, file without its ending, or folder.
        path: the file or folder that was read.
    """

    spec: ModelSpec
    weights: ModelWeights
    tokenizer: Tokenizer
    name: str
    path: Path
    weights_sha256: str


@dataclass(frozen=True, slots=True)
class LocatedModel:
    """A model's name and the file or folder that holds it."""

    name: str
    path: Path


def load_model(source: str | Path, *, report: Report = silent) -> LoadedModel:
    """Load a catalog name, a GGUF file, a Hugging Face directory, or a hub id.

    A catalog or hub model that is not on this machine yet is fetched; `report` hears how that goes. Raises
    LoadError where the model cannot be found, fetched or read, UnsupportedError where it needs what Octavo
    does not have.
    """
    located = locate_model(source, report=report)
    path = located.path
    if path.is_dir():
        spec, weights = read_directory(path)
        tokenizer = tokenizer_from_directory(path, spec.vocab_size, read_eos_ids(path))
        return LoadedModel(spec, weights, tokenizer, located.name, path, hash_directory(path))
    file = open_gguf(path)
    spec, weights = read_model(file)
    tokenizer = tokenizer_from_gguf(file.metadata, str(path))
    return LoadedModel(spec, weights, tokenizer, located.name, path, hash_file(path))


def locate_model(source: str | Path, *, report: Report = silent) -> LocatedModel:
    """Where the model lies, after fetching it if need be. What exists on disk comes before names."""
    if not str(source):
        raise LoadError("no model is named; give a catalog name, a file, a directory or a hub id")
    path = Path(source).expanduser()
    if path.is_dir():
        return LocatedModel(path.resolve().name, path)
    if path.is_file():
        return LocatedModel(path.stem, path)
    name = str(source)
    entry = find_entry(name)
    if entry is not None:
        return LocatedModel(entry.name, fetch(entry, models_dir(), report))
    if isinstance(source, str) and is_hub_id(name):
        return LocatedModel(name, fetch_from_hub(name))
    raise LoadError(
        f"no model {name!r}{did_you_mean(name)}. A model is a catalog name ({catalog_names()}), the path of "
        f"a GGUF file, the path of a Hugging Face directory with safetensors, or a hub id such as org/name"
    )

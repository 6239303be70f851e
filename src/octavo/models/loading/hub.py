"""Models from a Hugging Face hub, at HF_ENDPOINT where that is set. It shows its own progress."""

from __future__ import annotations

import os
import re
from pathlib import Path

from octavo.errors import LoadError
from octavo.models.loading.safetensors_model import read_config

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_GGUF = re.compile(rf"({_ID.pattern})/((?:\w[\w.-]*/)*\w[\w.-]*\.gguf)")

#: What a model's directory may need; other files (torch weights, other formats) are not fetched.
PATTERNS = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)


def is_hub_id(source: str) -> bool:
    """Whether it reads as "org/name" or "org/name/file.gguf"."""
    return _ID.fullmatch(source) is not None or _GGUF.fullmatch(source) is not None


def fetch_from_hub(source: str) -> Path:
    """Fetch "org/name" (a directory) or "org/name/file.gguf" (a file) into the hub's cache; returns where it
    lies.

    The config is read first, so that a model which cannot be served is refused before its weights are
    fetched. Raises
    LoadError: not there, licence not accepted, no network.
    """
    # Slow to import, and most starts do not need it.
    from huggingface_hub import errors, hf_hub_download, snapshot_download

    endpoint = os.environ.get("HF_ENDPOINT") or None
    where = endpoint or "the hub"
    try:
        if match := _GGUF.fullmatch(source):
            return Path(hf_hub_download(match.group(1), match.group(2), endpoint=endpoint))
        folder = Path(snapshot_download(source, allow_patterns=["config.json"], endpoint=endpoint))
        if not (folder / "config.json").is_file():
            raise LoadError(f"{source}: no config.json there; for a GGUF file name it: {source}/FILE.gguf")
        read_config(folder)
        return Path(snapshot_download(source, allow_patterns=list(PATTERNS), endpoint=endpoint))
    except errors.GatedRepoError as error:
        raise LoadError(
            f"{source}: its licence must be accepted on {where} first; then set HF_TOKEN to a token of yours"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise LoadError(f"{source}: no such model on {where} (a private one needs HF_TOKEN)") from error
    except errors.LocalEntryNotFoundError as error:
        raise LoadError(f"{source}: no network: {where} cannot be reached and the model is not in the cache") from error
    except errors.EntryNotFoundError as error:
        raise LoadError(f"{source}: no such file on {where}") from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()
        raise LoadError(f"{source}: cannot be fetched from {where}: {reason[0] if reason else error!r}") from error

"""A policy with two tenants and an admin, and servers that have it in force."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from octavo.engine.client import EngineClient

from .conftest import SETTINGS
from .running import RunningServer, running_server

ACME, OTHER, ADMIN = "acme-key-123", "globex-key-456", "root-key-789"


def digest(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


POLICY = f"""
[policy]
codec = "int8"

[prices]
currency = "EUR"
cached = 0.015
computed = "0.150"
output = 1

[tenants.acme]
keys = ["{digest(ACME)}"]
rate = 1000

[tenants.globex]
keys = ["{digest(OTHER)}"]

[admin]
keys = ["{digest(ADMIN)}"]
"""


@contextmanager
def policy_server(engine: EngineClient, path: Path, text: str = POLICY, **settings: object) -> Iterator[RunningServer]:
    """Writes the policy to `path`."""
    path.write_text(text)
    with running_server(engine, replace(SETTINGS, policy_file=path, **settings)) as server:  # type: ignore[arg-type]
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}

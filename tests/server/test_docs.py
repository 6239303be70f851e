"""docs/server.md names every route and every error code that there is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "server.md").read_text()
SOURCE = "".join(path.read_text() for path in (ROOT / "src/octavo/api").rglob("*.py"))


def test_error_codes() -> None:
    codes = {*re.findall(r'code(?:: str)?="([a-z_]+)"', SOURCE), *re.findall(r'40\d: "([a-z_]+)"', SOURCE)}
    codes |= set(re.findall(r'code: str = "([a-z_]+)"', SOURCE + (ROOT / "src/octavo/errors.py").read_text()))
    assert len(codes) > 15
    # http_error is for statuses that no route raises.
    assert {code for code in codes if f"`{code}`" not in TEXT} <= {"http_error"}


def test_routes() -> None:
    paths = set(re.findall(r'@router\.\w+\("([^"]+)"', SOURCE))
    assert "/v1/chat/completions" in paths
    for path in paths - {"/favicon.ico", "/assets/{name}"}:
        shown = path.replace("{name:path}", "{id}")
        assert f"{shown}`" in TEXT, path

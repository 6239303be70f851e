"""`octavo explain REQUEST_ID`: what the cache did for a request, in words."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Annotated, Any
from urllib.parse import quote

import typer

from octavo.errors import OctavoError, RequestError
from octavo.explain import explain

#: How long the server may take to answer.
TIMEOUT_S = 30.0


def explain_command(
    request_id: Annotated[str, typer.Argument(help='The answer\'s "id", such as chatcmpl-....')],
    url: Annotated[str, typer.Option(help="Where the server is.")] = "http://127.0.0.1:8000",
    as_json: Annotated[bool, typer.Option("--json", help="Print the receipts themselves.")] = False,
) -> None:
    """Say what the cache did for a request that a running server has answered, and what to change for more hits.

    The key of a server that needs one is read from OCTAVO_API_KEY.
    """
    receipts = fetch_receipts(request_id, url)
    if as_json:
        typer.echo(json.dumps(receipts, indent=2))
        return
    for i, receipt in enumerate(receipts):
        if len(receipts) > 1:
            typer.echo(f"Prompt {i + 1} of {len(receipts)}:")
        for line in explain(receipt):
            typer.echo(line)


def fetch_receipts(request_id: str, url: str) -> list[dict[str, Any]]:
    """Raises RequestError for an id that the server does not know, OctavoError where it cannot be asked."""
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/cache/receipts/{quote(request_id, safe='')}")
    if key := os.environ.get("OCTAVO_API_KEY"):
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            receipts: list[dict[str, Any]] = json.load(answer)["receipts"]
            return receipts
    except urllib.error.HTTPError as error:
        try:
            message = json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"the server answered {error.code}"
        raise RequestError(message) from None
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise OctavoError(f"cannot ask {url}: {error}") from None

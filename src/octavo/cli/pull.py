"""`octavo pull NAME`: fetch a known model and check it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from octavo.models.loading.catalog import CATALOG, DEFAULT_MODEL, get_entry, model_path, models_dir
from octavo.models.loading.fetch import fetch
from octavo.models.loading.progress import progress_bars


def pull_command(
    name: Annotated[str, typer.Argument(help="A name from the catalog (see --list).")] = DEFAULT_MODEL,
    list_models: Annotated[bool, typer.Option("--list", help="List the catalog and exit.")] = False,
) -> None:
    """Fetch a model of the catalog, check its sha256, and print where it lies.

    Models are kept in OCTAVO_MODELS, by default ~/.cache/octavo/models. A fetch that was broken off goes on
    where it stopped.
    """
    if list_models:
        # Piped, lines are whole; in a terminal they fold to its width.
        _print_catalog(Console() if sys.stdout.isatty() else Console(width=200))
        return
    entry = get_entry(name)
    with progress_bars(Console(stderr=True)) as report:
        path = fetch(entry, models_dir(), report)
    typer.echo(str(path))


def _print_catalog(console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("name", "model", "size", "kind", "licence", "fetched"):
        table.add_column(title, no_wrap=title != "model")
    for entry in CATALOG:
        fetched = "yes" if model_path(entry).is_file() else "no"
        size = f"{entry.n_bytes / 1e6:,.0f} MB"
        table.add_row(entry.name, entry.summary, size, entry.kind, entry.licence, fetched)
    console.print(table)

"""`octavo`: one command per file."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer
from rich.console import Console

from octavo._version import __version__
from octavo.cli.chat import chat_command
from octavo.cli.explain import explain_command
from octavo.cli.pull import pull_command
from octavo.cli.run import run_command
from octavo.cli.serve import serve_command
from octavo.errors import OctavoError

app = typer.Typer(
    name="octavo",
    help="A long-context LLM serving engine in which the KV cache is the product.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve_command)
app.command("chat")(chat_command)
app.command("run")(run_command)
app.command("pull")(pull_command)
app.command("explain")(explain_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")


def main() -> None:
    """Run the command line; errors that a user can act on are one line, exit code 2."""
    try:
        app()
    except OctavoError as error:
        Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {_escaped(str(error))}", soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)

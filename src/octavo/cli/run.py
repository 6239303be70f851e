"""`octavo run`: one question over a long document."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from octavo.cli.answer import print_answer
from octavo.cli.options import (
    KvCodecOption,
    KvMemoryOption,
    MaxTokensOption,
    ModelArgument,
    SeedOption,
    TemperatureOption,
    ThreadsOption,
    local_config,
    sampling,
)
from octavo.errors import ConfigError


def run_command(
    model: ModelArgument,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="The document, UTF-8 text; - reads standard input.")
    ] = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The question, asked after the document.")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    max_tokens: MaxTokensOption = 512,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = None,
    threads: ThreadsOption = 0,
    kv_memory: KvMemoryOption = "auto",
    kv_codec: KvCodecOption = "int8",
) -> None:
    """Read a document, ask one question about it, print the answer.

    The answer goes to standard output; the progress bar and the figures to standard error.
    """
    document = _read(file) if file is not None else ""
    text = "\n\n".join(part for part in (document, prompt) if part)
    if not text:
        raise ConfigError("nothing to run: give a document with -f, a question with -p, or both")
    from octavo.engine.build import build_engine
    from octavo.llm import LLM

    out, err = Console(soft_wrap=True), Console(stderr=True)
    with err.status("loading the model"):
        llm = LLM.from_engine(build_engine(model, local_config(threads, kv_memory, kv_codec)))
    with llm:
        chat = llm.tokenizer.has_chat_template and not raw
        events = llm.stream(
            [{"role": "user", "content": text}] if chat else text, sampling(max_tokens, temperature, seed)
        )
        print_answer(events, out, err)


def _read(file: Path) -> str:
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}") from error

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
    ModelArgument,
    ProfileOption,
    SeedOption,
    TemperatureOption,
    ThreadsOption,
    local_config,
    print_profile,
    sampling,
)
from octavo.errors import ConfigError

DEFAULT_MAX_TOKENS = 512


def run_command(
    model: ModelArgument,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="The document, UTF-8 text; - reads standard input.")
    ] = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The question, asked after the document.")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", min=1, help="Tokens to generate at most. Default: 512, or what is left of the context."
        ),
    ] = None,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = None,
    threads: ThreadsOption = 0,
    kv_memory: KvMemoryOption = "auto",
    kv_codec: KvCodecOption = "int8",
    profile: ProfileOption = False,
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
        engine = build_engine(model, local_config(threads, kv_memory, kv_codec, profile=profile))
    with LLM.from_engine(engine) as llm:
        if llm.tokenizer.has_chat_template and not raw:
            tokens = llm.tokenizer.apply_chat_template([{"role": "user", "content": text}])
        else:
            tokens = llm.tokenizer.encode(text, parse_special=raw)
        if max_tokens is None:
            # A long document leaves less room than an answer usually takes; that is no reason to refuse it.
            max_tokens = max(1, min(DEFAULT_MAX_TOKENS, llm.engine.info.max_model_len - len(tokens)))
        print_answer(llm.stream(tokens, sampling(max_tokens, temperature, seed)), out, err)
    print_profile(engine.profile, err)


def _read(file: Path) -> str:
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}") from error

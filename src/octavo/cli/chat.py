"""`octavo chat`: a conversation in the terminal."""

from __future__ import annotations

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
from octavo.errors import ConfigError, RequestError


def chat_command(
    model: ModelArgument = "smollm2-135m",
    system: Annotated[str, typer.Option("--system", help="A system message to begin with.")] = "",
    max_tokens: MaxTokensOption = 512,
    temperature: TemperatureOption = 0.7,
    seed: SeedOption = None,
    threads: ThreadsOption = 0,
    kv_memory: KvMemoryOption = "auto",
    kv_codec: KvCodecOption = "int8",
) -> None:
    """Talk to a model in the terminal. Each turn finds the conversation so far in the cache.

    /clear begins anew, /quit or Ctrl-D leaves, Ctrl-C stops an answer.
    """
    from octavo.engine.build import build_engine
    from octavo.llm import LLM

    out, err = Console(soft_wrap=True), Console(stderr=True)
    with err.status("loading the model"):
        llm = LLM.from_engine(build_engine(model, local_config(threads, kv_memory, kv_codec)))
    with llm:
        if not llm.tokenizer.has_chat_template:
            raise ConfigError(
                f"{llm.engine.info.model_name} has no chat template (a base model?); use octavo run --raw instead"
            )
        info = llm.engine.info
        err.print(
            f"[dim]{info.model_name}, {info.max_model_len:,} tokens of context, KV cache as {info.key_codec}. "
            "/clear begins anew, /quit leaves.[/]",
            highlight=False,
        )
        begin = [{"role": "system", "content": system}] if system else []
        messages = list(begin)
        while True:
            try:
                text = out.input("[bold]> [/]")
            except (EOFError, KeyboardInterrupt):
                err.print()
                return
            if text.strip() == "/quit":
                return
            if text.strip() == "/clear":
                messages = list(begin)
                continue
            if not text.strip():
                continue
            if text.startswith("/"):
                err.print("[red]there are /clear and /quit[/]")
                continue
            asked = [*messages, {"role": "user", "content": text}]
            try:
                answer = print_answer(llm.stream(asked, sampling(max_tokens, temperature, seed)), out, err)
            except RequestError as error:
                err.print(f"[red]{error}[/]", highlight=False)
                continue
            messages = [*asked, {"role": "assistant", "content": answer.text}]

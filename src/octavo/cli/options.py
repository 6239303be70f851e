"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from octavo.config import CachePolicy, EngineConfig, parse_bytes
from octavo.engine.messages import SamplingParams
from octavo.ops.profile import Profile

ModelArgument = Annotated[
    str, typer.Argument(help="A catalog name, a GGUF file, a Hugging Face directory, or a hub id (org/name).")
]
ThreadsOption = Annotated[
    int, typer.Option("--threads", min=0, envvar="OCTAVO_THREADS", help="Worker threads; 0: one per core.")
]
KvMemoryOption = Annotated[
    str, typer.Option("--kv-memory", envvar="OCTAVO_KV_MEMORY", help="Budget of the KV cache: 64MiB, 2GiB, ...; "
                      "auto: a quarter of free memory at most.")
]  # fmt: skip
KvCodecOption = Annotated[
    str, typer.Option("--kv-codec", envvar="OCTAVO_KV_CODEC", help="How pages are stored: f32, f16, bf16, int8, int4.")
]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens to generate at most.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", min=0.0, help="0 always takes the likeliest token.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Makes sampling reproducible.")]
ProfileOption = Annotated[
    bool, typer.Option("--profile", envvar="OCTAVO_PROFILE", help="Say at the end where the time of the steps went.")
]


def local_config(threads: int, kv_memory: str, kv_codec: str, *, profile: bool = False) -> EngineConfig:
    """The configuration of a command that serves one user in the terminal."""
    return EngineConfig(
        threads=threads,
        kv_memory_bytes=None if kv_memory == "auto" else parse_bytes(kv_memory),
        max_num_seqs=1,
        profile=profile,
        policy=CachePolicy(key_codec=kv_codec, value_codec=kv_codec),
    )


def sampling(max_tokens: int, temperature: float, seed: int | None) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)


def print_profile(profile: Profile | None, err: Console) -> None:
    """What --profile asks for, once the engine has stopped."""
    if profile is not None:
        for line in profile.lines():
            err.print(line, highlight=False, markup=False, soft_wrap=True)

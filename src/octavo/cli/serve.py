"""`octavo serve`: the OpenAI-compatible server and the page that shows its cache."""

from __future__ import annotations

import signal
import threading
import webbrowser
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from octavo.cli.options import print_profile
from octavo.config import PAGE_SIZES, CachePolicy, EngineConfig, parse_bytes
from octavo.engine.client import EngineInfo

_CODECS = "f32, f16, bf16, int8 or int4"
_LISTEN, _CACHE, _LIMITS, _COMPUTE = "Listening", "Cache", "Limits", "Computing"


def serve_command(
    model: Annotated[
        str,
        typer.Argument(
            envvar="OCTAVO_MODEL",
            help="A catalog name, a GGUF file, a Hugging Face directory, or a hub id (org/name).",
        ),
    ] = "smollm2-135m",
    host: Annotated[
        str,
        typer.Option(
            envvar="OCTAVO_HOST", rich_help_panel=_LISTEN, help="Address to listen on; 0.0.0.0 for every interface."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, envvar="OCTAVO_PORT", rich_help_panel=_LISTEN, help="Port; 0 takes a free one."),
    ] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            envvar="OCTAVO_API_KEY_FILE",
            rich_help_panel=_LISTEN,
            help="A file with one API key a line (# begins a comment). Without it no key is needed.",
        ),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            envvar="OCTAVO_POLICY",
            rich_help_panel=_CACHE,
            help="The cache contract, a TOML file (docs/policy.md): tenants, keys, rates, codecs, prices. "
            "SIGHUP reads it again.",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            envvar="OCTAVO_SERVED_MODEL_NAME",
            rich_help_panel=_LISTEN,
            help="The model's name to clients; may be given more than once. Default: the model's own.",
        ),
    ] = None,
    open_page: Annotated[
        bool,
        typer.Option("--open", envvar="OCTAVO_OPEN", rich_help_panel=_LISTEN, help="Open the page in a browser."),
    ] = False,
    kv_memory: Annotated[
        str,
        typer.Option(
            envvar="OCTAVO_KV_MEMORY",
            rich_help_panel=_CACHE,
            help="Hard budget of the KV cache: 64MiB, 2GiB, ...; auto: a quarter of free memory at most.",
        ),
    ] = "auto",
    kv_codec: Annotated[
        str | None,
        typer.Option(
            envvar="OCTAVO_KV_CODEC",
            rich_help_panel=_CACHE,
            help=f"How sealed pages are stored: {_CODECS}. Default: the policy's, else {CachePolicy().key_codec}.",
        ),
    ] = None,
    k_codec: Annotated[
        str | None,
        typer.Option(envvar="OCTAVO_K_CODEC", rich_help_panel=_CACHE, help="Codec of keys, if not --kv-codec."),
    ] = None,
    v_codec: Annotated[
        str | None,
        typer.Option(envvar="OCTAVO_V_CODEC", rich_help_panel=_CACHE, help="Codec of values, if not --kv-codec."),
    ] = None,
    page_size: Annotated[
        int,
        typer.Option(
            envvar="OCTAVO_PAGE_SIZE",
            rich_help_panel=_CACHE,
            help=f"Tokens per page: {', '.join(map(str, PAGE_SIZES))}.",
        ),
    ] = EngineConfig().page_size,
    no_prefix_cache: Annotated[
        bool,
        typer.Option(
            "--no-prefix-cache",
            envvar="OCTAVO_NO_PREFIX_CACHE",
            rich_help_panel=_CACHE,
            help="Do not keep finished pages for later requests.",
        ),
    ] = False,
    max_model_len: Annotated[
        int,
        typer.Option(
            min=0,
            envvar="OCTAVO_MAX_MODEL_LEN",
            rich_help_panel=_LIMITS,
            help="Longest prompt plus output, in tokens; 0: the model's context, or what the budget holds.",
        ),
    ] = 0,
    max_num_seqs: Annotated[
        int,
        typer.Option(min=1, envvar="OCTAVO_MAX_NUM_SEQS", rich_help_panel=_LIMITS, help="Sequences that run at once."),
    ] = EngineConfig().max_num_seqs,
    step_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            envvar="OCTAVO_STEP_TOKENS",
            rich_help_panel=_LIMITS,
            help="Tokens computed per step at most; smaller keeps running answers smoother while prompts are read.",
        ),
    ] = EngineConfig().step_tokens,
    max_body: Annotated[
        str,
        typer.Option(envvar="OCTAVO_MAX_BODY", rich_help_panel=_LIMITS, help="Largest request body: 16MiB, ..."),
    ] = "16MiB",
    threads: Annotated[
        int,
        typer.Option(
            min=0, envvar="OCTAVO_THREADS", rich_help_panel=_COMPUTE, help="Worker threads; 0 takes one per core."
        ),
    ] = 0,
    backend: Annotated[
        Literal["cpu", "reference"],
        typer.Option(
            envvar="OCTAVO_BACKEND",
            rich_help_panel=_COMPUTE,
            help="cpu: the C++ kernels; reference: plain torch, slow, exact to read.",
        ),
    ] = "cpu",
    isa: Annotated[
        Literal["auto", "portable", "avx2", "avx512"],
        typer.Option(
            envvar="OCTAVO_ISA", rich_help_panel=_COMPUTE, help="Instruction set of the cpu backend; auto: the best."
        ),
    ] = "auto",
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            envvar="OCTAVO_PROFILE",
            rich_help_panel=_COMPUTE,
            help="Say at the end where the time of the steps went.",
        ),
    ] = False,
) -> None:
    """Serve MODEL over an OpenAI-compatible API, with a page at / to chat and to watch the cache.

    Every option can also be set by the environment variable that its help names.
    """
    # Here, so that the other commands start without the web framework.
    from octavo._version import __version__
    from octavo.api.auth import ApiKeys
    from octavo.api.server import bind, run_server, url_of
    from octavo.api.settings import ServerSettings
    from octavo.cache.policy import Policy
    from octavo.cache.policy_file import Surroundings, parse_policy, read_policy_text
    from octavo.engine.build import build_engine

    api_keys = ApiKeys.from_file(api_key_file) if api_key_file is not None else ApiKeys()
    key_codec, value_codec = k_codec or kv_codec, v_codec or kv_codec
    contract = Policy(key_codec=key_codec or Policy().key_codec, value_codec=value_codec or Policy().value_codec)
    if policy is not None:
        # Before the model is loaded, for its codecs and so that a bad file is told at once. The server reads it again
        # when it knows the engine's budget.
        around = Surroundings(key_codec, value_codec, other_keys=api_keys.digests)
        contract = parse_policy(read_policy_text(policy), str(policy), around)
        if hasattr(signal, "SIGHUP"):
            # It would end the process while the model is loaded; from then on the server hears it.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    config = EngineConfig(
        backend=backend,
        threads=threads,
        kv_memory_bytes=None if kv_memory == "auto" else parse_bytes(kv_memory),
        page_size=page_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        step_tokens=step_tokens,
        isa=isa,
        profile=profile,
        policy=CachePolicy(
            key_codec=contract.key_codec, value_codec=contract.value_codec, prefix_cache=not no_prefix_cache
        ),
    )
    settings = ServerSettings(
        host=host,
        port=port,
        served_model_names=tuple(served_model_name or ()),
        api_keys=api_keys,
        policy_file=policy,
        max_body_bytes=parse_bytes(max_body),
    )
    err = Console(stderr=True, highlight=False)
    if not settings.is_local and not api_keys and not contract.has_keys:
        err.print(
            f"[yellow]warning:[/] anyone who reaches {host} can use this server; --api-key-file and --policy ask for "
            "keys",
            soft_wrap=True,
        )
    # Before the model is loaded, so that a taken port is noticed at once.
    listener = bind(settings)
    try:
        err.print(f"Octavo {__version__}: loading {model} ...")
        engine = build_engine(model, config, settings.served_model_names[0] if settings.served_model_names else None)
    except BaseException:
        listener.close()
        raise
    try:
        url = url_of(listener)
        run_server(engine, settings, listener, ready=lambda: _announce(err, url, engine.info, open_page))
    finally:
        engine.close()
        print_profile(engine.profile, err)


def _announce(err: Console, url: str, info: EngineInfo, open_page: bool) -> None:
    codecs = (
        info.key_codec if info.key_codec == info.value_codec else f"{info.key_codec} keys, {info.value_codec} values"
    )
    tokens = int(info.kv_memory_bytes / info.bytes_per_token)
    err.print(f"  model    {info.model_name}  ({info.backend}), up to {info.max_model_len:,} tokens")
    kept = "" if info.prefix_cache else ", not kept between requests"
    budget = f"{_mebibytes(info.kv_memory_bytes)}, up to {tokens:,} tokens, less what unfinished pages take"
    err.print(f"  cache    {budget} ({codecs}, {info.page_size} a page{kept})", soft_wrap=True)
    err.print(f"  page     {url}/")
    err.print(f"  API      {url}/v1")
    if open_page:
        # Starting a browser may block; the server must not.
        threading.Thread(target=_open_browser, args=(url,), daemon=True).start()


def _open_browser(url: str) -> None:
    try:
        webbrowser.get()
    except webbrowser.Error:
        return  # a machine without a browser; the address is printed
    webbrowser.open(url + "/")


def _mebibytes(n: int) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.0f} MiB"

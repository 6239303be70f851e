"""`octavo serve` with the scripted engine in place of a model: run as python -m tests.server.serve_scripted ARGS."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from types import ModuleType

import typer

from octavo.config import EngineConfig

from .scripted import Script, ScriptedEngine


def build_engine(source: str, config: EngineConfig, model_name: str | None = None) -> ScriptedEngine:
    engine = ScriptedEngine(max_model_len=config.max_model_len or 512, prefix_cache=config.policy.prefix_cache)
    engine.info = replace(
        engine.info,
        model_name=model_name or source,
        key_codec=config.policy.key_codec,
        value_codec=config.policy.value_codec,
    )
    if "OCTAVO_TEST_STUCK" in os.environ:  # prompts are never done
        engine.script = Script(prefill_gate=threading.Event())
    return engine


def main() -> None:
    module = ModuleType("octavo.engine.build")
    module.build_engine = build_engine  # type: ignore[attr-defined]
    sys.modules["octavo.engine.build"] = module
    from octavo.cli.serve import serve_command
    from octavo.errors import OctavoError

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(serve_command)
    try:
        app()
    except OctavoError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

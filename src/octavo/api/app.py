"""The application: routes around one engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from octavo._version import __version__
from octavo.api import (
    anthropic_messages,
    cache_admin,
    cache_policy,
    openai_chat,
    openai_completions,
    openai_models,
    operations,
    tokenization,
)
from octavo.api.context import ServerContext, system_fingerprint
from octavo.api.contract import Contract
from octavo.api.dashboard import routes as dashboard
from octavo.api.dashboard.feed import CacheFeed
from octavo.api.errors import handle_exception
from octavo.api.generation import Generations
from octavo.api.metrics import Metrics
from octavo.api.middleware import EdgeMiddleware
from octavo.api.receipts import ReceiptStore
from octavo.api.settings import ServerSettings
from octavo.engine.client import EngineClient


def create_app(engine: EngineClient, settings: ServerSettings) -> FastAPI:
    """The ASGI application. It uses the engine but does not own it: whoever built the engine closes it.

    Raises ConfigError when the settings name a policy file that is not valid for this engine.
    """
    contract = Contract(settings, engine.info)
    if contract.path is not None:
        engine.apply_policy(contract.now.policy)
        contract.on_change(engine.apply_policy)
    model_names = settings.served_model_names or (engine.info.model_name,)
    metrics = Metrics(engine, model_names[0])
    generations = Generations(engine, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watch = asyncio.create_task(generations.watch_engine(settings.health_period_s))
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    # The generated documentation pages load scripts from elsewhere, so they are off.
    app = FastAPI(
        title="Octavo",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: handle_exception},
    )
    app.state.context = ServerContext(
        engine=engine,
        settings=settings,
        contract=contract,
        model_names=model_names,
        metrics=metrics,
        generations=generations,
        feed=CacheFeed(
            engine,
            model_names[0],
            period_s=settings.watch_period_s,
            keepalive_s=settings.keepalive_s,
            limit=settings.max_watchers,
        ),
        receipts=ReceiptStore(),
        system_fingerprint=system_fingerprint(engine.info, __version__),
        created=int(time.time()),
    )
    for module in (
        anthropic_messages,
        openai_chat,
        openai_completions,
        openai_models,
        tokenization,
        operations,
        cache_admin,
        cache_policy,
        dashboard,
    ):
        app.include_router(module.router)
    app.add_middleware(EdgeMiddleware, settings=settings, contract=contract)
    return app

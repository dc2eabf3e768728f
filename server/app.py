"""The FastAPI app around one engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from fastapi import APIRouter, FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from engine.config import Config, CorsConfig
from engine.serving.async_engine import AsyncEngine, EngineState
from server.apis.chat import route as chat
from server.apis.completions import route as completions
from server.apis.messages import route as messages
from server.apis.models import route as models
from server.apis.operation import health, metrics, speculation, version
from server.apis.responses import route as responses
from server.apis.tokenize import route as tokenize
from server.context import ServerContext
from server.errors import add_error_handlers
from server.middleware.access_log import AccessLogMiddleware
from server.middleware.admission import Admission, AdmissionMiddleware
from server.middleware.api_keys import ApiKeys
from server.middleware.auth import ApiKeyMiddleware
from server.middleware.body_limit import BodyLimitMiddleware
from server.middleware.catch_all import CatchAllMiddleware
from server.middleware.head import HeadMiddleware
from server.middleware.header_limit import HeaderLimitMiddleware
from server.middleware.not_enforced_header import HEADER as NOT_ENFORCED
from server.middleware.not_enforced_header import NotEnforcedHeaderMiddleware
from server.middleware.preflight import PreflightMiddleware
from server.middleware.request_id import RequestIdMiddleware
from server.middleware.slashes import SlashesMiddleware
from server.observability.http_counts import HttpCounts
from server.observability.prometheus import make_registry
from server.observability.tracing import Tracing
from server.version import VERSION

logger = logging.getLogger(__name__)

_ROUTERS = (
    completions.router,
    chat.router,
    responses.router,
    messages.router,
    responses.reading_router,
    tokenize.router,
    models.router,
    speculation.router,
    version.router,
    health.router,
)

OnLoaded = Callable[[BaseException | None], None]


def log_loaded(failure: BaseException | None) -> None:
    if failure is None:
        logger.info("the model is loaded")
    else:
        logger.error("the model can't be loaded: %s", failure)


def create_app(
    engine: AsyncEngine,
    config: Config,
    *,
    keys: ApiKeys | None = None,
    tracing: Tracing | None = None,
    on_loaded: OnLoaded = log_loaded,
) -> FastAPI:
    """The app; its lifespan starts the engine, without waiting for the load, and stops it.

    Args:
        keys: None: everyone is let in.
        tracing: None: no traces are wanted.
        on_loaded: told when the load has ended: None, or why it failed.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        loading = asyncio.create_task(_load(engine, on_loaded))
        yield
        if engine.state is EngineState.LOADING:
            # A load can't be interrupted: its thread is left to the end of the process.
            loading.cancel()
            with suppress(asyncio.CancelledError):
                await loading
            return
        await loading
        await engine.stop()
        if tracing is not None:
            await asyncio.to_thread(tracing.shutdown)

    counts = HttpCounts()
    routers = _ROUTERS if config.metrics.port is not None else (*_ROUTERS, metrics.router)
    routes = _routes(routers)
    admission = Admission(config.admission)
    app = FastAPI(
        title="Slipstream",
        version=VERSION,
        lifespan=lifespan,
        redirect_slashes=False,
        middleware=[
            Middleware(RequestIdMiddleware),
            Middleware(SlashesMiddleware),
            Middleware(
                AccessLogMiddleware,
                routes=routes,
                counts=counts,
                traces=tracing,
            ),
            Middleware(NotEnforcedHeaderMiddleware),
            Middleware(HeadMiddleware),
            _cors(config.cors, routes),
            Middleware(CatchAllMiddleware),
            Middleware(
                HeaderLimitMiddleware,
                max_headers=config.limits.max_headers,
                max_bytes=config.limits.max_header_bytes,
            ),
            Middleware(ApiKeyMiddleware, keys=keys or ApiKeys({})),
            Middleware(AdmissionMiddleware, admission=admission),
            Middleware(
                BodyLimitMiddleware,
                max_bytes=config.limits.max_body_bytes,
                timeout=config.limits.body_timeout,
            ),
        ],
    )
    app.state.context = ServerContext(engine, config, admission)
    app.state.metrics_registry = make_registry(engine, counts, vllm_names=config.metrics.vllm_names)
    add_error_handlers(app, routes)
    for router in routers:
        app.include_router(router)
    return app


def _routes(routers: Sequence[APIRouter]) -> list[Route]:
    return [r for router in routers for r in router.routes if isinstance(r, Route)]


def _cors(config: CorsConfig, routes: Sequence[Route]) -> Middleware:
    """Outside of the key check: browsers ask for permission without the key."""
    if not config.allow_origins:
        return Middleware(PreflightMiddleware, routes=routes)
    return Middleware(
        CORSMiddleware,
        allow_origins=config.allow_origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["Retry-After", "X-Request-Id", NOT_ENFORCED],
    )


async def _load(engine: AsyncEngine, on_loaded: OnLoaded) -> None:
    try:
        await engine.start()
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        on_loaded(error)
    else:
        on_loaded(None)

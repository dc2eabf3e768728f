"""GET /v1/models and /v1/models/{id}: the one model under each of its names."""

from __future__ import annotations

from fastapi import APIRouter, Response

from engine.serving.async_engine import ModelCard
from server.apis.models.schema import Model, ModelList
from server.apis.shared.http.json_response import json_response
from server.apis.shared.http.openapi import whole
from server.context import Context

router = APIRouter(tags=["OpenAI"])


@router.get(
    "/v1/models",
    summary="List the served model",
    response_model=None,
    responses=whole(ModelList),
)
async def list_models(context: Context) -> Response:
    card = context.engine.card
    models = [_model(card, name) for name in context.model_names]
    return json_response(ModelList(object="list", data=models))


# Names that come from a hub hold a slash.
@router.get(
    "/v1/models/{model:path}",
    summary="Describe a model",
    response_model=None,
    responses=whole(Model),
)
async def get_model(model: str, context: Context) -> Response:
    context.require_model(model)
    return json_response(_model(context.engine.card, model))


def _model(card: ModelCard, name: str) -> Model:
    return Model(
        id=name,
        object="model",
        created=card.created,
        owned_by="slipstream",
        max_model_len=card.max_context,
    )

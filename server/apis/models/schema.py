"""Responses of /v1/models."""

from __future__ import annotations

from typing import Literal

from server.apis.shared.schema.base import ResponseModel


class Model(ResponseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(ResponseModel):
    object: Literal["list"]
    data: list[Model]

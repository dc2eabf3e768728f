"""A whole response in JSON."""

from __future__ import annotations

from fastapi import Response

from server.apis.shared.schema.base import ResponseModel


def json_response(body: ResponseModel, status: int = 200) -> Response:
    return Response(body.to_json(), status_code=status, media_type="application/json")

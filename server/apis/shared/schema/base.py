"""What the schemas of all APIs are made of."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


class RequestModel(BaseModel):
    """A request body: no coercion of types; unknown fields are kept aside in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, protected_namespaces=())


class ResponseModel(BaseModel):
    """A response body, serialised without the fields that were not set."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    def to_json(self) -> str:
        return self.model_dump_json(exclude_unset=True)


class NamedEvent(ResponseModel):
    """A server-sent event that has its type as its name."""

    type: str

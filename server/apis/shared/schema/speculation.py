"""Request fields that steer speculation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from server.apis.shared.schema.base import RequestModel
from server.apis.shared.schema.content import TextContent

MAX_DRAFT_TOKENS = 32
MAX_ACCEPT_TOP_K = 100


class AcceptanceOptions(RequestModel):
    """How a draft token is accepted. `top_k` is LOSSY: it changes the output."""

    mode: Literal["exact", "top_k"]
    k: int | None = Field(None, ge=1, le=MAX_ACCEPT_TOP_K)


class SpeculationOptions(RequestModel):
    mode: str | None = Field(None, description='"auto", "off" or the name of a loaded drafter')
    max_draft_tokens: int | None = Field(None, ge=0, le=MAX_DRAFT_TOKENS)
    stats: bool | None = Field(None, description="whether usage tells what was drafted")
    acceptance: AcceptanceOptions | None = None


class Prediction(RequestModel):
    """Text the client expects in the output, as in OpenAI's Predicted Outputs."""

    type: Literal["content"]
    content: TextContent

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)

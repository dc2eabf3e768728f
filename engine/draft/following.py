"""What all drafters with a model of their own have in common."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from engine.draft.cost import CostModel
from engine.draft.draft_model import DraftModel, DraftTokens


class Follower(Protocol):
    """How far a draft model has followed one request."""

    tokens: DraftTokens


FollowerT = TypeVar("FollowerT", bound=Follower)


class FollowingDrafter(Generic[FollowerT]):
    """Holds a draft model and, for each request, how far it has followed."""

    def __init__(self, model: DraftModel) -> None:
        self.model = model
        self._followers: dict[str, FollowerT] = {}

    @property
    def cost(self) -> CostModel:
        return self.model.cost

    def warm_up(self) -> None:
        self.model.warm_up()

    def forget(self, request_id: str) -> None:
        follower = self._followers.pop(request_id, None)
        if follower is not None:
            self.model.drop(follower.tokens)

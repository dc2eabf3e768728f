"""The table of drafters: all that lists drafters agrees with it, the golden tests too."""

from __future__ import annotations

from typing import get_args

import pytest

from engine.config import SpeculationConfig
from engine.draft.draft_model import DraftModel
from engine.draft.table import DRAFTERS, DrafterName, DraftModelKey
from tests.speculation import text_engine
from tests.speculation.fakes import FakeTokenizer
from tests.speculation.from_table import make_from_table
from tests.speculation.text_engine import LETTERS, TARGET, draft_model
from tests.structured import engines


@pytest.mark.parametrize("name", DRAFTERS)
def test_an_entry_makes_the_drafter_it_says(name: str) -> None:
    loaded: list[DraftModelKey] = []

    def load(key: DraftModelKey) -> tuple[DraftModel, FakeTokenizer]:
        loaded.append(key)
        return draft_model(TARGET, LETTERS), TARGET

    (drafter,) = make_from_table([name], TARGET, load)
    assert drafter.name == name
    assert (drafter.model is None) == (DRAFTERS[name].model_key is None)
    assert loaded == [key for key in [DRAFTERS[name].model_key] if key is not None]


def test_the_configuration_allows_them_all_and_uses_them_by_default() -> None:
    assert SpeculationConfig().drafters == tuple(DRAFTERS) == get_args(DrafterName)


def test_all_are_in_the_golden_tests() -> None:
    assert set(DRAFTERS) <= {*text_engine.DRAFTINGS, *engines.DRAFTINGS}

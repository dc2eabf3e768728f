"""The native decoder agrees with float32 on a real model; `tests.models.accuracy` prints more."""

from __future__ import annotations

import pytest

from engine.models.source import resolve
from tests.models.accuracy import measure
from tests.real.models import QWEN_CODER_05B, model_file

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

TOKENS = 500


def test_tokens_and_probabilities_are_those_of_float32() -> None:
    figures = measure(resolve(model_file(QWEN_CODER_05B)), tokens=TOKENS)
    assert figures.tokens == TOKENS
    assert figures.top1_agreement >= 0.98
    assert figures.mean_kl < 0.001

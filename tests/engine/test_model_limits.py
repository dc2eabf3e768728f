"""What one request may ask of a loaded model, and what a refusal says of the reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.build import model_limits
from engine.config import Config, ConfigError
from engine.request import RequestError
from tests.engine.helpers import make_request


def target(device="cpu", num_blocks=4):
    """A model of 1000 positions and as many blocks of 32."""
    info = SimpleNamespace(max_context=1000, vocab_size=50, device=device)
    return SimpleNamespace(info=info, num_blocks=num_blocks, block_size=32)


@pytest.mark.parametrize(
    ("config", "runner", "context", "key"),
    [
        ({}, target(), 128, "kv.memory_mib"),
        ({}, target("cuda:0"), 128, "kv.gpu_memory_fraction"),
        ({"max_context": 100}, target(), 100, "max_context"),
        ({}, target(num_blocks=100), 1000, None),
        ({"max_context": 1000}, target(num_blocks=100), 1000, None),
    ],
)
def test_a_refusal_names_the_key_that_cut_the_context(config, runner, context, key):
    limits = model_limits(Config(**config), runner)
    assert limits.max_context == context
    start = f"This model's maximum context length is {context} tokens"
    start += "," if key is None else f" (cut short by '{key}'),"
    for prompt, max_tokens in ([1] * context, 1), ([1], context):
        with pytest.raises(RequestError) as raised:
            limits.check(make_request(prompt, max_tokens=max_tokens))
        assert str(raised.value).startswith(start)
        assert raised.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("max_context", "message"),
    [
        (1001, "exceeds the model's 1000"),
        (129, "kv.memory_mib gives, which is enough for 128"),
    ],
)
def test_unusable_context(max_context, message):
    with pytest.raises(ConfigError, match=message):
        model_limits(Config(max_context=max_context), target())

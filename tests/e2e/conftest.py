from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.fault_table import NOTE, Note
from tests.e2e.served import Served, served, tiny_flags


@pytest.fixture
def note_fault(record_property: Callable[[str, object], None]) -> Note:
    """Puts a row into the table of faults."""
    return lambda fault, seen, seconds: record_property(NOTE, (fault, seen, seconds))


@pytest.fixture(scope="package")
def server(tiny_model_dir: Path, tiny_draft_dir: Path) -> Iterator[Served]:
    flags = tiny_flags(tiny_model_dir, tiny_draft_dir)
    with served(*flags, "--log-level", "debug") as server:
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 503
        server.wait_until_ready()
        yield server


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client

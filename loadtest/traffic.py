"""Mixed traffic of the soak: kinds of requests, and what each must be answered."""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

_VOCABULARY = (
    "river stone cloud seven green under letter window paper engine quiet salt copper field north "
    "apple robot sister sells counts dreams map box old naïve 🦊 crème 数 def return import"
)
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["cat", "dog", "fox"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
_MALFORMED: tuple[tuple[str, bytes], ...] = (
    ("/v1/completions", b""),
    ("/v1/completions", b"{"),
    ("/v1/completions", b"[1, 2]"),
    ("/v1/completions", b'{"model": "%MODEL%"}'),
    ("/v1/completions", b'{"model": "nobody", "prompt": "x"}'),
    ("/v1/completions", b'{"model": "%MODEL%", "prompt": "x", "max_tokens": -1}'),
    ("/v1/completions", b'{"model": "%MODEL%", "prompt": "x", "temperature": "hot"}'),
    ("/v1/completions", b'{"model": "%MODEL%", "prompt": [999999999]}'),
    ("/v1/completions", b'{"model": "%MODEL%", "prompt": "x", "n": 1000000}'),
    ("/v1/completions", b'{"model": "%MODEL%", "prompt": "x", "max_tokens": 100000000}'),
    ("/v1/chat/completions", b'{"model": "%MODEL%", "messages": []}'),
    ("/v1/chat/completions", b'{"model": "%MODEL%", "messages": [{"role": "king"}]}'),
    ("/v1/chat/completions", b"\xff\xfe\x00"),
    ("/v1/nothing", b"{}"),
)


class Fault(Exception):
    """An answer that must not be; the message says why."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A request whose answer its seed decides."""

    body: Mapping[str, Any]
    text: str


class Traffic:
    """Sends one request of a kind and checks its answer."""

    def __init__(self, http: httpx.AsyncClient, model: str, *, long_tokens: int) -> None:
        """
        Args:
            long_tokens: output tokens of the long requests.
        """
        self._http = http
        self._model = model
        self._long_tokens = long_tokens
        self.references: Sequence[Reference] = ()

    @property
    def kinds(self) -> dict[str, Callable[[random.Random], Awaitable[None]]]:
        return {
            "short": self._short,
            "long": self._long,
            "stream": self._stream,
            "cancelled": self._cancelled,
            "malformed": self._malformed,
            "structured": self._structured,
            "seeded": self._seeded,
        }

    async def make_references(self, count: int) -> list[Reference]:
        """Answers of plain decoding, one request at a time.

        Raises:
            Fault: one of them has no answer.
        """
        references = []
        for index in range(count):
            rng = random.Random(index)
            body = {
                "prompt": _text(rng, 4 + 9 * (index % 4)),
                "max_tokens": 16 + 8 * (index % 5),
                "temperature": (0.0, 0.7, 1.0)[index % 3],
                "seed": index,
                **({"frequency_penalty": 0.5} if index % 4 == 3 else {}),
            }
            plain = await self._complete({**body, "speculation": {"mode": "off"}})
            references.append(Reference(body, plain))
        return references

    async def _short(self, rng: random.Random) -> None:
        await self._complete({"prompt": _text(rng, 3), "max_tokens": rng.randint(1, 8)})

    async def _long(self, rng: random.Random) -> None:
        await self._complete({"prompt": _text(rng, 60), "max_tokens": self._long_tokens})

    async def _stream(self, rng: random.Random) -> None:
        lines = await self._read_stream({"prompt": _text(rng, 12), "max_tokens": 32}, None)
        if lines[-1] != "[DONE]":
            raise Fault("a stream ended early")

    async def _cancelled(self, rng: random.Random) -> None:
        body = {"prompt": _text(rng, 20), "max_tokens": self._long_tokens}
        await self._read_stream(body, rng.randint(0, 10))

    async def _malformed(self, rng: random.Random) -> None:
        path, content = rng.choice(_MALFORMED)
        response = await self._http.post(
            path,
            content=content.replace(b"%MODEL%", self._model.encode()),
            headers={"Content-Type": "application/json"},
        )
        if not 400 <= response.status_code < 500:
            raise Fault(f"a malformed request was answered {response.status_code}")
        if not isinstance(response.json()["error"]["message"], str):
            raise Fault("an error without a message")

    async def _structured(self, rng: random.Random) -> None:
        schema = {"name": "pet", "strict": True, "schema": _SCHEMA}
        answer = await self._post(
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": _text(rng, 8)}],
                "max_tokens": 120,
                "response_format": {"type": "json_schema", "json_schema": schema},
            },
        )
        choice = answer["choices"][0]
        if choice["finish_reason"] == "stop":
            value = json.loads(choice["message"]["content"])
            if set(value) != {"name", "count", "kind"} or value["kind"] not in (
                "cat",
                "dog",
                "fox",
            ):
                raise Fault(f"not of the schema: {value}")

    async def _seeded(self, rng: random.Random) -> None:
        reference = rng.choice(self.references)
        if rng.random() < 0.5:
            text = await self._complete(reference.body)
        else:
            lines = await self._read_stream(reference.body, None)
            pieces = [json.loads(line)["choices"] for line in lines[:-1]]
            text = "".join(choices[0]["text"] for choices in pieces if choices)
        if text != reference.text:
            raise Fault(f"a seeded answer differs: {text!r} is not {reference.text!r}")

    async def _complete(self, body: Mapping[str, Any]) -> str:
        answer = await self._post("/v1/completions", body)
        text: str = answer["choices"][0]["text"]
        return text

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        response = await self._http.post(path, json={"model": self._model, **body})
        if response.status_code != httpx.codes.OK:
            raise Fault(f"HTTP {response.status_code}: {response.text[:200]}")
        answer: dict[str, Any] = response.json()
        return answer

    async def _read_stream(self, body: Mapping[str, Any], patience: int | None) -> list[str]:
        """The events' data; after `patience` of them the client goes away."""
        body = {"model": self._model, "stream": True, **body}
        lines: list[str] = []
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                raise Fault(f"HTTP {response.status_code}: {response.text[:200]}")
            async for line in response.aiter_lines():
                if patience is not None and len(lines) >= patience:
                    return lines
                if line.startswith("data: "):
                    lines.append(line.removeprefix("data: "))
        if any(line.startswith('{"error"') for line in lines):
            raise Fault(f"an error event: {lines[-1][:200]}")
        return lines


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(_VOCABULARY.split(), k=num_words))

"""Published weaknesses of other model servers, looked for in this one.

More of them are tested where they belong: Host-header tricks and the timing of key comparison in
test_api_keys, huge `n` and giant headers in test_limits, slow ones in test_http_protocol, penalties
under speculation in tests/speculation/test_known_faults and tests/e2e/test_known_advisories,
patterns that blow up there, in test_http_tools and in tests/e2e/test_structured_output, pickled
weights in tests/models/test_source.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest

from engine.build import load_parts
from engine.config import Config
from engine.draft.predicted import PredictedDrafter
from engine.request import ChatOptions, GrammarSpec, RequestError
from engine.sampling.grammar import Grammars
from engine.serving.async_engine import AsyncEngine
from engine.text.tokenizer import TextTokenizer
from server.json_schema.keywords import SchemaError
from server.json_schema.prepare import prepare_schema
from server.process.load_errors import load_failure
from tests.structured.engines import make_engine, structured
from tests.tiny_models import make_tokenizer

ROOT = Path(__file__).parent.parent.parent
HI = {"role": "user", "content": "hi"}


REACHING = [
    "''.__class__.__mro__[1].__subclasses__()",
    "messages.__class__.__mro__[1].__subclasses__()",
    "self.__init__.__globals__",
    "cycler.__init__.__globals__.os.system('touch ' ~ marker)",
    "lipsum.__globals__['os'].system('touch ' ~ marker)",
    "joiner.__init__.__globals__.os.remove(kept)",
    "raise_exception.__globals__",
    "namespace.__init__.__globals__['__builtins__']",
    "''['__class__']['__mro__']",
    "'{0.__class__.__mro__}'.format(messages)",
    "''|attr('__class__')",
    "''|attr('\\x5f\\x5fclass\\x5f\\x5f')|attr('mro')()",
    "messages.append(1)",
    "messages.clear()",
    "messages[0].update(x=1)",
]
"""Expressions that get somewhere where nothing holds them back."""


class Surroundings:
    """What an expression may reach for, and whether it has."""

    def __init__(self, folder: Path) -> None:
        self.messages: list[Any] = [dict(HI)]
        self.files = {"marker": folder / "marker", "kept": folder / "kept"}
        self.files["kept"].touch()

    @property
    def settings(self) -> str:
        return "".join(f"{{% set {name} = '{path}' %}}" for name, path in self.files.items())

    def were_reached(self, text: str) -> bool:
        leaks = ("<class", "<function", "<module", "__builtins__", "__name__")
        return (
            any(leak in text for leak in leaks)
            or self.messages != [HI]
            or self.files["marker"].exists()
            or not self.files["kept"].exists()
        )


class TestTemplates:
    """A template comes with a model from strangers: it must not run code."""

    @pytest.mark.parametrize("expression", REACHING)
    def test_code_is_not_reached(self, expression: str, tmp_path: Path) -> None:
        around = Surroundings(tmp_path)
        fast = make_tokenizer("byte_level", 400)
        fast.chat_template = f"{around.settings}{{{{ {expression} }}}}|end"
        tokens = TextTokenizer(fast)
        refusal, text = "", ""
        try:
            text = tokens.decode(tokens.encode_chat(around.messages, ChatOptions()))
        except RequestError as error:
            refusal = str(error)
        # Either the sandbox says so, or it gives nothing in the place of what it holds back.
        assert "is unsafe" in refusal or text == "|end"
        assert not around.were_reached("")

    @pytest.mark.parametrize("expression", REACHING)
    def test_it_would_be_reached_without_a_sandbox(self, expression: str, tmp_path: Path) -> None:
        """Else the test above could not fail."""
        around = Surroundings(tmp_path)
        template = jinja2.Environment(autoescape=False).from_string(
            f"{around.settings}{{{{ {expression} }}}}"
        )
        text = template.render(messages=around.messages, raise_exception=make_tokenizer)
        assert around.were_reached(text)

    @pytest.mark.parametrize(
        ("expression", "reason"),
        [
            ("range(10 ** 9)|list", "Range too big"),
            ("import('os')", "'import' is undefined"),
            ("open('/etc/passwd').read()", "'open' is undefined"),
            ("__import__('os')", "'__import__' is undefined"),
        ],
    )
    def test_what_python_has_is_not_there(self, expression: str, reason: str) -> None:
        fast = make_tokenizer("byte_level", 400)
        fast.chat_template = f"{{{{ {expression} }}}}"
        with pytest.raises(RequestError, match=reason):
            TextTokenizer(fast).encode_chat([HI], ChatOptions())

    @pytest.mark.parametrize("statement", ["{% include '/etc/passwd' %}", "{% import 'os' as o %}"])
    def test_files_are_not_reached(self, statement: str) -> None:
        fast = make_tokenizer("byte_level", 400)
        fast.chat_template = statement
        with pytest.raises(RequestError):
            TextTokenizer(fast).encode_chat([HI], ChatOptions())

    @pytest.mark.parametrize(
        "fields",
        [
            {"chat_template": "{{ 1 }}"},
            {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
            {"chat_template_kwargs": {"messages": []}},
            {"chat_template_kwargs": {"tokenize": True}},
            {"chat_template_kwargs": {"tokenizer_kwargs": {"padding": "max_length"}}},
            {"chat_template_kwargs": {"padding": True, "max_length": 10**9}},
            {"chat_template_kwargs": {"return_tensors": "pt"}},
            {"chat_template_kwargs": {"enable_thinking": {"a": [1] * 100}}},
            {"documents": [{"text": "x"}]},
        ],
    )
    async def test_clients_can_not_bring_or_steer_one(self, client, engine, fields) -> None:
        response = await client.chat(**fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith(next(iter(fields)))
        assert engine.submitted == []


async def test_slow_template_tokenizer_or_grammar_does_not_hold_up_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever a request makes the tokenizer or the template do, up to its submission and its first
    step, /health goes on answering."""
    core: Any = make_engine("predicted")
    threads = set()

    def slowly(inner: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any, **options: Any) -> Any:
            threads.add(threading.current_thread().name.rpartition("_")[0])
            time.sleep(0.3)
            return inner(*arguments, **options)

        return slow

    core.tokenizer = SimpleNamespace(
        encode=slowly(lambda *_, **__: [1]),
        encode_chat=slowly(lambda *_: [1]),
        encode_infill=slowly(lambda *_: [1]),
        decode=slowly(lambda *_: "a"),
        token_bytes=core.tokenizer.token_bytes,
        special_ids=core.tokenizer.special_ids,
        eos_ids=core.tokenizer.eos_ids,
    )
    core.limits = SimpleNamespace(check=slowly(core.limits.check))
    core.preparer._tokenizer = SimpleNamespace(encode_plain=slowly(lambda _: [5, 6, 7, 8]))
    monkeypatch.setattr(PredictedDrafter, "preprocess", slowly(PredictedDrafter.preprocess))
    monkeypatch.setattr(Grammars, "compile", slowly(Grammars.compile))
    grammar = GrammarSpec("regex", "[abc]{3}")
    request = structured(grammar, "r", prediction="abc")
    engine = AsyncEngine(lambda: lambda: core, max_requests=1)
    await engine.start()
    gaps = []

    async def tick() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            gaps.append(time.monotonic() - before)

    ticking = asyncio.create_task(tick())
    try:
        for work in (
            engine.encode("a"),
            engine.encode_chat([HI]),
            engine.encode_infill("a", "b"),
            engine.decode([1]),
        ):
            await work
        compiled = await engine.compile_grammar(grammar, time_limit=20)
        # As eight others of the largest size, compiled meanwhile, would have it.
        core.grammars._compiled.clear()
        preparation = await engine.prepare(request, compiled)
        async with engine.submit(request, preparation) as stream:
            outputs = [output async for output in stream]
        assert re.fullmatch("[abc]{3}", "".join(output.text for output in outputs))
    finally:
        ticking.cancel()
        await engine.stop()
    assert threads == {"slipstream-text", "slipstream-grammar"}
    assert len(gaps) > 120
    assert max(gaps) < 0.25


async def test_long_text_is_tokenized_without_the_gil() -> None:
    """A thread of its own is not enough: native code that keeps the GIL stops the event loop."""
    tokens = TextTokenizer(make_tokenizer("byte_level", 400))
    began = time.monotonic()
    encoding = asyncio.create_task(asyncio.to_thread(tokens.encode, "the cat eats 🦊 " * 30_000))
    gaps = []
    while not encoding.done():
        before = time.monotonic()
        await asyncio.sleep(0.001)
        gaps.append(time.monotonic() - before)
    assert len(await encoding) > 100_000
    assert max(gaps) < (time.monotonic() - began) / 2


class Listener:
    """A server that a fetch would reach."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self.address: tuple[str, int] = server.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}/x"

    def was_visited(self) -> bool:
        with suppress(BlockingIOError):
            self._server.accept()[0].close()
            return True
        return False


class TestNothingIsFetched:
    """A server that fetches what a client names reaches the operator's own network."""

    @pytest.fixture
    def listener(self) -> Iterator[Listener]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            yield Listener(server)

    @pytest.fixture
    def target(self, listener: Listener) -> Iterator[str]:
        yield listener.url
        assert not listener.was_visited()

    def test_a_visit_would_be_seen(self, listener: Listener) -> None:
        assert not listener.was_visited()
        with socket.create_connection(listener.address):
            assert listener.was_visited()

    @pytest.mark.parametrize("scheme", ["http", "file", "data"])
    async def test_content(self, client, engine, target, scheme) -> None:
        place = {"http": target, "file": "file:///etc/passwd", "data": "data:text/plain,x"}[scheme]
        parts = [
            {"type": "image_url", "image_url": {"url": place}},
            {"type": "image_url", "image_url": place},
            {"type": "input_audio", "input_audio": {"data": place, "format": "wav"}},
            {"type": "audio_url", "audio_url": {"url": place}},
            {"type": "video_url", "video_url": {"url": place}},
            {"type": "file", "file": {"file_data": place}},
        ]
        for part in parts:
            response = await client.chat(messages=[{"role": "user", "content": [part]}])
            assert response.status_code == 400, part
        for part in (
            {"type": "input_image", "image_url": place},
            {"type": "input_file", "file_url": place},
        ):
            body = {"model": "tiny/model", "input": [{"role": "user", "content": [part]}]}
            assert (await client.http.post("/v1/responses", json=body)).status_code == 400, part
        for kind in ("image", "document"):
            part = {"type": kind, "source": {"type": "url", "url": place}}
            fields: dict[str, Any] = {"model": "tiny/model", "max_tokens": 1}
            fields["messages"] = [{"role": "user", "content": [part]}]
            assert (await client.http.post("/v1/messages", json=fields)).status_code == 400, part
        assert engine.submitted == []

    @pytest.mark.parametrize("key", ["$ref", "$schema", "$id"])
    def test_schemas(self, target: str, key: str) -> None:
        """A reference out of a schema is refused; what only names it names, and is compiled."""
        tokens = TextTokenizer(make_tokenizer("byte_level", 400))
        grammars = Grammars(tokens, len(tokens.token_bytes))
        schema = {"type": "object", "properties": {"a": {"type": "null", key: target}}, key: target}
        spec = GrammarSpec("json_schema", json.dumps(schema))
        if key != "$ref":
            grammars.compile(GrammarSpec("json_schema", json.dumps(prepare_schema(schema).schema)))
            assert grammars.num_compiled == 1
            return
        with pytest.raises(RequestError, match=r"does not fetch"):
            grammars.compile(spec)
        with pytest.raises(SchemaError, match=r"outside the schema, and nothing is fetched"):
            prepare_schema(schema)

    async def test_references_of_tools(self, client, engine, target):
        schema = {"type": "object", "properties": {"a": {"$ref": target}}}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        response = await client.chat(tools=[tool], tool_choice="required")
        assert response.status_code == 400
        assert "nothing is fetched" in response.json()["error"]["message"]
        assert engine.submitted == []

    async def test_tools_of_other_servers(self, client, engine, target) -> None:
        tool = {"type": "mcp", "server_label": "x", "server_url": target}
        body = {"model": "tiny/model", "input": "a", "tools": [tool]}
        assert (await client.http.post("/v1/responses", json=body)).status_code == 400
        assert engine.submitted == []


class TestCodeOfModels:
    """Weights and configurations are data."""

    @pytest.fixture
    def folder(self, tiny_model_dir: Path, tmp_path: Path) -> Path:
        copy = tmp_path / "model"
        shutil.copytree(tiny_model_dir, copy)
        code = f"open({str(tmp_path / 'marker')!r}, 'w')\n"
        for name in ("modeling_evil", "configuration_evil", "tokenization_evil"):
            (copy / f"{name}.py").write_text(code)
        return copy

    @pytest.mark.parametrize("runner", ["native", "torch"])
    @pytest.mark.parametrize(
        ("file", "values"),
        [
            (
                "config.json",
                {
                    "model_type": "evil",
                    "auto_map": {
                        "AutoConfig": "configuration_evil.EvilConfig",
                        "AutoModelForCausalLM": "modeling_evil.EvilModel",
                    },
                },
            ),
            (
                "tokenizer_config.json",
                {
                    "tokenizer_class": "EvilTokenizer",
                    "auto_map": {"AutoTokenizer": ["tokenization_evil.EvilTokenizer", None]},
                },
            ),
        ],
    )
    def test_is_never_run_and_that_is_said(self, folder, file, values, runner) -> None:
        path = folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
        config = Config(model=str(folder), runner=runner, kv={"memory_mib": 8}, threads=1)
        with pytest.raises(ValueError, match=r".") as raised:
            load_parts(config)
        told = load_failure(raised.value)
        assert "needs code of its own, which is never run" in told
        assert "\n" not in told
        assert not (folder.parent / "marker").exists()

    def test_that_is_not_needed_is_not_run(self, folder) -> None:
        path = folder / "config.json"
        auto_map = {"AutoModelForCausalLM": "modeling_evil.EvilModel"}
        path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": auto_map}))
        load_parts(Config(model=str(folder), runner="torch", kv={"memory_mib": 8}, threads=1))
        assert not (folder.parent / "marker").exists()


DANGEROUS_CALLS = {
    "eval", "exec", "pickle.load", "pickle.loads", "torch.load", "yaml.load", "os.system",
    "os.popen", "marshal.loads", "shelve.open", "joblib.load", "numpy.load", "np.load",
}  # fmt: skip


def calls_of(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield node


def test_the_code_has_no_way_to_run_what_it_reads() -> None:
    found = []
    num_calls = 0
    for package in ("engine", "server"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for call in calls_of(path):
                num_calls += 1
                name = ast.unparse(call.func)
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                shell = options.get("shell", "False") != "False"
                trusts = options.get("trust_remote_code", "False") != "False"
                if name in DANGEROUS_CALLS or shell or trusts:
                    found.append(f"{path.name}:{call.lineno} {name}")
    assert num_calls > 1000
    assert found == []


async def test_embeddings_and_weights_in_a_request_are_refused(client, engine) -> None:
    """Elsewhere they were unpickled."""
    for fields in (
        {"prompt_embeds": "gASVJAAAAAAAAACMBXBvc2l4"},
        {"logits_processors": ["os.system"]},
    ):
        response = await client.complete(**fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == next(iter(fields))
    assert engine.submitted == []

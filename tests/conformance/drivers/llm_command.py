"""The `llm` command, told of the server by its `extra-openai-models.yaml`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from driver import Book, Calls, carry_out_tasks

FUNCTIONS = '''
import json

def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    with open({calls!r}, "a") as calls:
        print(json.dumps({{"name": "get_weather", "arguments": {{"city": city}}}}), file=calls)
    return {weather!r}
'''


class Llm:
    def __init__(self, folder: Path, url: str, model: str, variant: str) -> None:
        served = {"model_id": "served", "model_name": model, "api_base": f"{url}/v1"}
        abilities = {"supports_schema": True, "supports_tools": True}
        models = [{**served, **abilities, "responses": variant == "responses"}]
        (folder / "extra-openai-models.yaml").write_text(yaml.safe_dump(models))
        self.folder = folder

    def start(self, prompt: str, max_tokens: int, *flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "llm", "prompt", prompt, "-m", "served", "--no-log"]
        command += ["-o", "temperature", "0", "-o", "max_tokens", str(max_tokens), *flags]
        environment = {**os.environ, "LLM_USER_PATH": str(self.folder)}
        streams = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        return subprocess.Popen(command, env=environment, bufsize=0, **streams)

    def run(self, prompt: str, max_tokens: int, *flags: str) -> str:
        process = self.start(prompt, max_tokens, *flags)
        out, err = process.communicate()
        if process.returncode:
            raise RuntimeError(err.decode())
        return out.decode().removesuffix("\n")

    def text(self, prompt: str, max_tokens: int) -> str:
        return self.run(prompt, max_tokens, "--no-stream")

    def stream(self, prompt: str, max_tokens: int) -> list[str]:
        process = self.start(prompt, max_tokens)
        written = []
        while piece := process.stdout.read(4096):
            written.append(piece.decode())
        if process.wait():
            raise RuntimeError(process.stderr.read().decode())
        written[-1] = written[-1].removesuffix("\n")
        return written

    def structured(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        schema = json.dumps(Book.model_json_schema())
        return json.loads(self.run(prompt, max_tokens, "--schema", schema))

    def tool_call(self, prompt: str, max_tokens: int, weather: str) -> tuple[Calls, str]:
        noted = self.folder / "calls.jsonl"
        noted.touch()
        functions = FUNCTIONS.format(calls=str(noted), weather=weather)
        answer = self.run(prompt, max_tokens, "--functions", functions, "--chain-limit", "3")
        return [json.loads(line) for line in noted.read_text().splitlines()], answer


with tempfile.TemporaryDirectory() as folder:
    carry_out_tasks(Llm(Path(folder), *sys.argv[1:]))

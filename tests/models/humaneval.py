"""Does the native decoder solve as many HumanEval tasks as the float32 reference?

usage: python -m tests.models.humaneval FILE.gguf HumanEval.jsonl.gz [--runner native torch]

Decodes greedily, eight tasks at a time, and runs the benchmark's own checks, each in a process of
its own. The code that runs is a model's: use a machine on which it can do no harm.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from engine.build import load_parts
from engine.config import Config
from engine.core import EngineCore
from engine.request import GenerationRequest, SamplingParams, TextPrompt

_STOPS = ("\ndef ", "\nclass ", "\nif ", "\nprint(", "\n#", "\n@", "\nassert ", "\n```")
_IN_FLIGHT = 8
_CHECK_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    prompt: str
    check: str
    function: str

    def passes(self, answer: str) -> bool:
        program = f"{self.prompt}{answer}\n{self.check}\ncheck({self.function})\n"
        with tempfile.TemporaryDirectory() as folder:
            try:
                done = subprocess.run(
                    [sys.executable, "-c", program],
                    cwd=folder,
                    capture_output=True,
                    timeout=_CHECK_SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return False
        return done.returncode == 0


def read_tasks(path: Path, count: int) -> list[Task]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        entries = [json.loads(line) for line in lines][:count]
    return [Task(e["task_id"], e["prompt"], e["test"], e["entry_point"]) for e in entries]


def answers_of(core: EngineCore, tasks: list[Task], max_tokens: int) -> dict[str, str]:
    """Greedy completions by task name."""
    waiting, texts = list(reversed(tasks)), {task.name: "" for task in tasks}
    num_running = 0
    while waiting or core.has_work:
        while waiting and num_running < _IN_FLIGHT:
            core.add(_request(core, waiting.pop(), max_tokens))
            num_running += 1
        for output in core.step():
            texts[output.request_id] += output.text
            num_running -= output.finish_reason is not None
    return texts


def _request(core: EngineCore, task: Task, max_tokens: int) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, stop=_STOPS)
    ids = tuple(core.tokenizer.encode(task.prompt))
    return GenerationRequest(task.name, ids, params, TextPrompt(task.prompt))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("tasks_file", type=Path)
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--runner", nargs="+", default=["native", "torch"])
    parser.add_argument("--max-tokens", type=int, default=200)
    options = parser.parse_args()
    tasks = read_tasks(options.tasks_file, options.tasks)
    for runner in options.runner:
        began = time.perf_counter()
        config = Config(
            model=options.model, draft=None, runner=runner, dtype="float32", max_context=1024
        )
        parts = load_parts(config)
        answers = answers_of(parts.assemble(()), tasks, options.max_tokens)
        passed = [task.name for task in tasks if task.passes(answers[task.name])]
        seconds = time.perf_counter() - began
        print(f"{runner}: {len(passed)} of {len(tasks)} pass ({seconds:.0f} s)", flush=True)
        print(f"  failed: {[t.name for t in tasks if t.name not in passed]}", flush=True)


if __name__ == "__main__":
    main()

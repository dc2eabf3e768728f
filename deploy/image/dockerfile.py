"""Reads a Dockerfile into its stages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dockerfile_parse import DockerfileParser
from dockerfile_parse.util import WordSplitter


class DockerfileError(ValueError):
    """A Dockerfile asks for something that isn't understood here; names it."""


@dataclass(frozen=True, slots=True)
class Instruction:
    keyword: str
    """In capitals."""
    value: str
    """What follows it, continuation lines joined."""

    @property
    def words(self) -> tuple[str, ...]:
        """Of the exec form, a JSON list, or of a line."""
        if self.value.startswith("["):
            return tuple(json.loads(self.value))
        return tuple(WordSplitter(self.value).split())


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    parent: str
    """Another stage, or the image that it starts from."""
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Dockerfile:
    stages: Mapping[str, Stage]
    """By name, in the order of the file."""

    @classmethod
    def read(cls, path: Path) -> Dockerfile:
        """
        Raises:
            DockerfileError: a stage has no name.
        """
        arguments: dict[str, str] = {}
        stages: dict[str, Stage] = {}
        for instruction in _instructions(path):
            if instruction.keyword == "FROM":
                parent, _, name = expand(instruction.value, arguments).partition(" AS ")
                if not name:
                    raise DockerfileError(f"{path}: a stage without a name: {instruction.value}")
                stages[name] = Stage(name, parent, ())
            elif stages:
                name, stage = list(stages.items())[-1]
                stages[name] = Stage(name, stage.parent, (*stage.instructions, instruction))
            elif instruction.keyword == "ARG":
                arguments |= pairs(instruction.value)
        return cls(stages)

    def lineage(self, name: str) -> tuple[Instruction, ...]:
        """Instructions of a stage, those of the stages it starts from first."""
        stage = self.stages[name]
        own = stage.instructions
        return (*self.lineage(stage.parent), *own) if stage.parent in self.stages else own

    def base_of(self, name: str) -> str:
        """The image at the root of a stage."""
        parent = self.stages[name].parent
        return self.base_of(parent) if parent in self.stages else parent


def expand(text: str, variables: Mapping[str, str]) -> str:
    """A value with its variables replaced; quotes stay."""
    return "".join(WordSplitter(text, args=dict(variables)).split(maxsplit=0, dequote=False))


def pairs(text: str) -> dict[str, str]:
    """``NAME=VALUE ...`` of ARG and ENV; no value is an empty one."""
    words = WordSplitter(text).split()
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _instructions(path: Path) -> list[Instruction]:
    parser = DockerfileParser(str(path))
    return [
        Instruction(entry["instruction"], entry["value"].strip())
        for entry in parser.structure
        if entry["instruction"] != "COMMENT"
    ]

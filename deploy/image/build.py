"""Carries a Dockerfile's steps out without a container engine, over a Debian root."""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from docker.utils.build import exclude_paths

from deploy.image.dockerfile import Dockerfile, DockerfileError, Instruction, expand, pairs
from deploy.image.sandbox import Root, inside, start

SUITE = "bookworm"
"""The Debian release whose own Python has the version of the Dockerfile's base image."""
_PACKAGES = "python3,python3-venv,python3-dev,ca-certificates"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Image:
    """What a stage came to."""

    layers: tuple[Path, ...]
    environment: Mapping[str, str]
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    health_check: tuple[str, ...] = ()
    health_seconds: float = 30.0
    volumes: tuple[str, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Seen by RUN only, and only in this stage."""


class Builder:
    """Makes each stage once, and only those that are asked for."""

    def __init__(self, context: Path, work: Path, tell: Callable[[str], None]) -> None:
        """
        Args:
            context: the folder with the Dockerfile.
            work: takes the Debian root, which later builds use again, and the layers.
            tell: gets a line for each step.
        """
        self._context = context
        self._dockerfile = Dockerfile.read(context / "Dockerfile")
        self._work = work
        self._tell = tell
        self._built: dict[str, Image] = {}
        self._sent = _context_files(context)
        for name in ("layers", "mount", "from"):
            shutil.rmtree(work / name, ignore_errors=True)
            (work / name).mkdir(parents=True)

    def build(self, name: str) -> Image:
        """
        Raises:
            DockerfileError: an instruction or flag that isn't understood, or a step that fails.
        """
        if name not in self._dockerfile.stages:
            return self._base(name)
        if name not in self._built:
            stage = self._dockerfile.stages[name]
            parent = self.build(stage.parent)
            layer = self._work / "layers" / name
            for folder in (layer, layer.with_name(f"{name}.work")):
                folder.mkdir()
            image = replace(parent, layers=(*parent.layers, layer), arguments={})
            for instruction in stage.instructions:
                began = time.monotonic()
                image = self._apply(image, instruction)
                seconds = time.monotonic() - began
                if instruction.keyword in ("RUN", "COPY"):
                    text = " ".join(instruction.value.split())[:70]
                    self._tell(f"{name}: {instruction.keyword} {text} ({seconds:.1f} s)")
            self._built[name] = image
        return self._built[name]

    def _base(self, name: str) -> Image:
        """Stands in for an image that would come from a registry."""
        root = self._work / f"debian-{SUITE}"
        if not root.is_dir():
            made = root.with_suffix(".partial")
            shutil.rmtree(made, ignore_errors=True)
            self._tell(f"{name}: a Debian {SUITE} root stands in for it")
            _check(
                subprocess.run(  # noqa: S603
                    [*("mmdebstrap", "--quiet", "--variant=minbase"),
                     f"--include={_PACKAGES}", SUITE, str(made)],
                    check=False,
                ).returncode,
                "mmdebstrap",
            )  # fmt: skip
            made.rename(root)
        wanted = name.rpartition(":")[2].partition("-")[0]
        if not (root / "usr" / "bin" / f"python{wanted}").exists():
            raise DockerfileError(f"Debian {SUITE} has not the Python of {name}")
        return Image((root,), {"PATH": _PATH})

    def _apply(self, image: Image, instruction: Instruction) -> Image:
        value = instruction.value
        match instruction.keyword:
            case "RUN":
                self._run(image, ["/bin/sh", "-c", value])
            case "COPY":
                self._copy(image, instruction)
            case "ENV":
                added = pairs(expand(value, image.environment))
                return replace(image, environment={**image.environment, **added})
            case "ARG":
                return replace(image, arguments={**image.arguments, **pairs(value)})
            case "WORKDIR":
                workdir = os.path.join(image.workdir, expand(value, image.environment))
                self._run(replace(image, user="0:0", workdir="/"), ["mkdir", "-p", workdir])
                return replace(image, workdir=workdir)
            case "USER":
                return replace(image, user=value)
            case "ENTRYPOINT":
                return replace(image, entrypoint=instruction.words, command=())
            case "CMD":
                return replace(image, command=instruction.words)
            case "VOLUME":
                return replace(image, volumes=(*image.volumes, *instruction.words))
            case "HEALTHCHECK":
                options, found, check = value.partition("CMD ")
                if not found:
                    raise DockerfileError(f"HEALTHCHECK without a command: {value}")
                timeout = pairs(options).get("--timeout", "30s")
                return replace(
                    image,
                    health_check=Instruction("CMD", check.strip()).words,
                    health_seconds=float(timeout.removesuffix("s")),
                )
            case "EXPOSE" | "LABEL":
                pass
            case keyword:
                raise DockerfileError(f"{keyword} isn't understood")
        return image

    def _run(self, image: Image, command: Sequence[str]) -> None:
        sources, settings = package_sources()
        cache = self._work.parent / "pip-cache"
        cache.mkdir(exist_ok=True)
        resolver = {"/etc/resolv.conf": Path("/etc/resolv.conf").resolve()}
        *below, own = image.layers
        mounts = {**resolver, **sources, "/root": cache}
        root = Root(tuple(below), self._work / "mount", own, mounts)
        environment = {**image.arguments, "HOME": "/root", **settings, **image.environment}
        # Not kept in the image, and worth keeping here: what pip has fetched or built.
        environment.pop("PIP_NO_CACHE_DIR", None)
        inner = inside(
            root.mount_point, command, environment, user=image.user, workdir=image.workdir
        )
        step = start(root, inner, network=True)
        output, _ = step.communicate()
        if step.returncode != 0:
            print(output, file=sys.stderr)
        _check(step.returncode, command[-1])

    def _copy(self, image: Image, instruction: Instruction) -> None:
        flags = [word for word in instruction.words if word.startswith("--")]
        *sources, target = instruction.words[len(flags) :]
        into = image.layers[-1] / os.path.join(image.workdir, target).strip("/")
        script = []
        if not flags:
            root = self._stage(sources)
        elif len(flags) == 1 and flags[0].startswith("--from="):
            layers = self.build(flags[0].removeprefix("--from=")).layers
            root = self._work / "mount"
            script = Root(layers, root).script()
        else:
            raise DockerfileError(f"COPY {' '.join(flags)} isn't understood")
        for source in (root / source.strip("/") for source in sources):
            # A folder stands for what is in it.
            is_file = not flags and source.is_file()
            folder = into if not is_file or target.endswith("/") else into.parent
            script.append(shlex.join(["mkdir", "-p", str(folder)]))
            what = str(source) if is_file else f"{source}/."
            script.append(shlex.join(["cp", "-a", "--no-preserve=ownership", what, str(into)]))
        command = ["unshare", "--mount", "sh", "-ec", "\n".join(script)]
        _check(subprocess.run(command, check=False).returncode, f"COPY {instruction.value}")  # noqa: S603

    def _stage(self, sources: list[str]) -> Path:
        """The files of the context that .dockerignore lets through, apart from the others."""
        staged = self._work / "from"
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
        for source in sources:
            sent = [path for path in self._sent if f"{path}/".startswith(f"{source}/")]
            if not sent:
                raise DockerfileError(f"COPY {source}: not there, or ignored")
            for path in sent:
                target = staged / path
                target.parent.mkdir(parents=True, exist_ok=True)
                if (self._context / path).is_file():
                    shutil.copy2(self._context / path, target)
        return staged


def _context_files(context: Path) -> list[str]:
    """What a container engine would be sent: all that .dockerignore does not leave out."""
    lines = (context / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return sorted(exclude_paths(str(context), patterns))


def package_sources() -> tuple[dict[str, Path], dict[str, str]]:
    """Where pip is set up to take packages from here: folders to mount, settings to pass on."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    settings: dict[str, str] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        settings[key.rpartition(".")[2]] = ast.literal_eval(value)
    mounts: dict[str, Path] = {}
    environment: dict[str, str] = {}
    for key in ("index-url", "extra-index-url", "find-links", "cert"):
        words = []
        for word in settings.get(key, "").split():
            url = urlsplit(word)
            if url.scheme not in ("", "file"):
                words.append(word)
                continue
            # A whole index: its pages link to files beside them.
            path = Path(url.path)
            root, rest = (path.parent, path.name) if url.scheme else (path, "")
            place = f"/mnt/packages{len(mounts)}"
            mounts[place] = root
            words.append(f"file://{place}/{rest}" if rest else place)
        if words:
            environment[f"PIP_{key.upper().replace('-', '_')}"] = " ".join(words)
    return mounts, environment


def _check(status: int, step: str) -> None:
    if status != 0:
        raise DockerfileError(f"exit status {status}: {step}")

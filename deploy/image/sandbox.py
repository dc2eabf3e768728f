"""Runs commands in a root of layers, in namespaces of their own, as a container engine would."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_DEVICES = ("null", "zero", "full", "random", "urandom")
Container = subprocess.Popen[str]
"""The process that made the namespaces; it ends with what runs in them."""

_NAMESPACES = ("--mount", "--pid", "--ipc", "--uts", "--fork")


@dataclass(frozen=True, slots=True)
class Root:
    """What a command sees as ``/``: layers on each other, and what is mounted into them."""

    layers: tuple[Path, ...]
    """The lowest first."""
    mount_point: Path
    writable: Path | None = None
    """Takes what is written, with a folder ``NAME.work`` beside it; None: read-only."""
    binds: Mapping[str, Path] = field(default_factory=dict)
    """Folders or files of the host by where they are mounted, below `/mnt` read-only."""

    def script(self) -> list[str]:
        """Shell commands that mount it all, in a mount namespace of its own."""
        at = str(self.mount_point)
        below = ":".join(map(str, reversed(self.layers)))
        if self.writable is not None:
            options = f"lowerdir={below},upperdir={self.writable},workdir={self.writable}.work"
        elif len(self.layers) > 1:
            options = f"lowerdir={below}"
        else:
            raise ValueError("a read-only root has two layers at least")
        shared_memory = f"{at}/dev/shm"  # noqa: S108
        devices = [f"{at}/dev/{name}" for name in _DEVICES]
        commands: list[Sequence[str]] = [
            ("mount", "-t", "overlay", "overlay", "-o", options, at),
            ("mount", "-t", "proc", "proc", f"{at}/proc"),
            ("mount", "--rbind", "-o", "ro", "/sys", f"{at}/sys"),
            ("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", f"{at}/dev"),
            ("mkdir", shared_memory),
            ("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", shared_memory),
            ("touch", *devices),
            *(("mount", "--bind", f"/dev/{name}", f"{at}/dev/{name}") for name in _DEVICES),
            ("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", f"{at}/mnt"),
        ]
        for place, source in self.binds.items():
            target = f"{at}{place}"
            if place.startswith("/mnt/"):
                make = "mkdir" if source.is_dir() else "touch"
                commands.append((make, target))
                commands.append(("mount", "--bind", "-o", "ro", str(source), target))
            else:
                commands.append(("mount", "--bind", str(source), target))
        return [shlex.join(command) for command in commands]


def start(root: Root, inner: Sequence[str], *, network: bool) -> Container:
    """Run a command in the root; its output is one text stream. See `inside` for the command.

    Args:
        network: the host's; else there is a loopback device only.
    """
    script = [*root.script()]
    namespaces = [*_NAMESPACES]
    if not network:
        namespaces.append("--net")
        script.append("ip link set lo up")
    script.append(f"exec {shlex.join(inner)}")
    return subprocess.Popen(  # noqa: S603
        ["unshare", *namespaces, "sh", "-ec", "\n".join(script)],  # noqa: S607
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def inside(
    mount_point: Path,
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    user: str,
    workdir: str,
    unprivileged: bool = False,
) -> list[str]:
    """A command as it is run in the root once that is mounted.

    Args:
        user: ``UID:GID``.
        unprivileged: without any capability, and without a way to one.
    """
    uid, _, gid = user.partition(":")
    rights = [f"--reuid={uid}", f"--regid={gid or uid}", "--clear-groups"]
    if unprivileged:
        rights += ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
    settings = [f"{name}={value}" for name, value in environment.items()]
    change = ["sh", "-c", f'cd {shlex.quote(workdir)} && exec "$@"', "sh"]
    return [
        *("chroot", str(mount_point)),
        *("setpriv", *rights),
        *("env", "-i", *settings),
        *change,
        *command,
    ]


def enter(container: Container, inner: Sequence[str], seconds: float) -> int:
    """Exit code of a command run beside what runs in a container already; 124: it took too long.

    125: nothing runs there, not yet or no more.
    """
    child = _child(container)
    if child is None:
        return 125
    command = ["nsenter", f"--target={child}", "--mount", "--net", "--pid", *inner]
    try:
        return subprocess.run(  # noqa: S603
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        return 124


def send(container: Container, number: signal.Signals) -> None:
    """Send a signal to the command that runs in a container, if one does."""
    child = _child(container)
    if child is not None:
        os.kill(child, number)


def end(container: Container) -> str:
    """Kill what runs in a container; returns its output that nobody has read yet."""
    if container.stdout is None or container.stdout.closed:
        return ""
    # `unshare` ends with its child, which it would leave behind: that has changed its user since.
    send(container, signal.SIGKILL)
    return container.communicate()[0]


def _child(container: Container) -> int | None:
    """The first process of the namespaces that `unshare` made."""
    pid = container.pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:
        return None
    return int(children[0]) if children else None

"""The folders of the cache: made once under a key, used by many processes, bounded in size.

An entry is a folder ``KIND/LABEL.KEY``; its time of modification tells when it was used last.
Who makes it holds ``locks/KIND-KEY.lock``, all who use it share ``locks/KIND-KEY.use``; these files
are never deleted, and the system drops the locks with the process.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from filelock import FileLock, Timeout

from engine.cache.digests import Contents, DigestMemory
from engine.cache.errors import CacheError, writing_to_cache

logger = logging.getLogger(__name__)

Kind = Literal["models", "converted", "packed"]
"""Fetched from the package index, made from a GGUF file, packed for the native decoder."""

_KEY_LENGTH = 32
_ENTRY_NAME = re.compile(rf"(?P<label>.+)\.(?P<key>[0-9a-f]{{{_KEY_LENGTH}}})")
_LEFTOVER_NAME = re.compile(rf"(?P<key>[0-9a-f]{{{_KEY_LENGTH}}})\.(?:partial|removed)")
_NOT_IN_LABELS = re.compile(r"[^\w.+-]+", re.ASCII)
_MAX_LABEL = 128


@dataclass(frozen=True, slots=True)
class Entry:
    """One folder of the cache."""

    path: Path
    kind: Kind
    label: str
    """What a person calls it."""
    key: str
    num_bytes: int
    used_at: float
    """Last use, in seconds since the epoch."""
    in_use: bool
    """By some running process."""


def cache_key(*parts: str | int | bool) -> str:
    """A key that differs as soon as one part does."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:_KEY_LENGTH]


class ModelCache:
    """A folder of entries; what an instance was given stays in use as long as the instance."""

    def __init__(self, root: Path, max_bytes: float) -> None:
        self.root = root
        self.max_bytes = max_bytes
        """What entries may take together; kept to after each new one."""
        self._digests = DigestMemory(root / "digests")
        self._guard = threading.Lock()
        self._in_use: dict[tuple[Kind, str], int] = {}
        weakref.finalize(self, _close_all, self._in_use)

    def contents(self, paths: Iterable[Path]) -> Contents:
        """See `DigestMemory.contents`."""
        return self._digests.contents(paths)

    def folder(self, kind: Kind, label: str, key: str, make: Callable[[Path], None]) -> Path:
        """The folder under a key, which `make` fills, once, if it is missing.

        Args:
            label: names it for people; plays no part in finding it.
            key: of everything the result depends on; see `cache_key`.
            make: gets an empty folder. If it raises, nothing is left.

        Raises:
            CacheError: the disk is full, or the cache may not be written.
        """
        with writing_to_cache(self.root):
            found = self._use(kind, key)
            if found is None:
                found = self._make(kind, label, key, make)
                self._keep_to_bound()
            return found

    def entries(self) -> list[Entry]:
        """All of them, the least recently used first."""
        entries = []
        for kind in get_args(Kind):
            for path, match in _children(self.root / kind, _ENTRY_NAME):
                # Another process may delete it meanwhile.
                with suppress(FileNotFoundError):
                    entries.append(self._describe(path, kind, match["label"], match["key"]))
        return sorted(entries, key=lambda entry: entry.used_at)

    def prune(self, max_bytes: float) -> list[Entry]:
        """Delete what nobody uses, the least recently used first, until the rest fits the bound.

        Returns:
            What was deleted.

        Raises:
            CacheError: the cache may not be written.
        """
        if not self.root.is_dir():
            return []
        with writing_to_cache(self.root), self._only_one("prune"):
            self._remove_leftovers()
            entries = self.entries()
            excess = sum(entry.num_bytes for entry in entries) - max_bytes
            removed = []
            for entry in entries:
                if excess > 0 and self._remove(entry):
                    excess -= entry.num_bytes
                    removed.append(entry)
            self._digests.forget_missing()
        return removed

    def forget_digests(self) -> None:
        """Read every model's files whole at the next start."""
        self._digests.forget_all()

    def _lock_file(self, name: str) -> Path:
        folder = self.root / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name

    def _only_one(self, name: str, timeout: float = -1) -> FileLock:
        return FileLock(self._lock_file(f"{name}.lock"), timeout=timeout)

    def _use(self, kind: Kind, key: str) -> Path | None:
        """Keep others from deleting an entry; None if it is not there."""
        found = _find(self.root / kind, key)
        if found is None:
            return None
        descriptor = _open_lock(self._lock_file(f"{kind}-{key}.use"))
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        found = _find(self.root / kind, key)
        if found is None:
            os.close(descriptor)
            return None
        with self._guard:
            earlier = self._in_use.pop((kind, key), None)
            self._in_use[kind, key] = descriptor
        if earlier is not None:
            os.close(earlier)
        # A cache that may only be read needs no order of use.
        with suppress(OSError):
            os.utime(found)
        return found

    def _make(self, kind: Kind, label: str, key: str, make: Callable[[Path], None]) -> Path:
        with self._only_one(f"{kind}-{key}"):
            while (found := self._use(kind, key)) is None:
                partial = self.root / kind / f"{key}.partial"
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                try:
                    make(partial)
                    _sync(partial)
                    partial.rename(partial.with_name(f"{_as_file_name(label)}.{key}"))
                except BaseException:
                    shutil.rmtree(partial, ignore_errors=True)
                    raise
            return found

    def _describe(self, path: Path, kind: Kind, label: str, key: str) -> Entry:
        num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        used_at = path.stat().st_mtime
        with self._unused(kind, key) as unused:
            return Entry(path, kind, label, key, num_bytes, used_at, in_use=not unused)

    def _remove(self, entry: Entry) -> bool:
        """Delete an entry; False if some process uses it, or it is gone."""
        # Under its own name no process may find it half deleted.
        removed = entry.path.with_name(f"{entry.key}.removed")
        shutil.rmtree(removed, ignore_errors=True)
        with self._unused(entry.kind, entry.key) as unused:
            if not unused or not entry.path.is_dir():
                return False
            entry.path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
        return True

    @contextmanager
    def _unused(self, kind: Kind, key: str) -> Iterator[bool]:
        """Whether no process uses an entry; then none can begin to meanwhile."""
        descriptor = _open_lock(self._lock_file(f"{kind}-{key}.use"))
        try:
            yield _lock_alone(descriptor)
        finally:
            os.close(descriptor)

    def _keep_to_bound(self) -> None:
        try:
            removed = self.prune(self.max_bytes)
        except CacheError as error:
            logger.warning("the model cache may outgrow its bound: %s", error)
            return
        if removed:
            logger.info(
                "deleted %s from the model cache, used least recently, to keep it to %.1f GiB",
                ", ".join(entry.label for entry in removed),
                self.max_bytes / (1 << 30),
            )

    def _remove_leftovers(self) -> None:
        """Remove what killed processes have left unfinished."""
        for kind in get_args(Kind):
            for path, match in _children(self.root / kind, _LEFTOVER_NAME):
                with suppress(Timeout), self._only_one(f"{kind}-{match['key']}", timeout=0):
                    shutil.rmtree(path, ignore_errors=True)


def _children(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    """Folders in it whose whole name matches."""
    with suppress(FileNotFoundError):
        for path in list(folder.iterdir()):
            match = pattern.fullmatch(path.name)
            if match is not None and path.is_dir():
                yield path, match


def _as_file_name(label: str) -> str:
    return _NOT_IN_LABELS.sub("-", label)[:_MAX_LABEL] or "unnamed"


def _find(folder: Path, key: str) -> Path | None:
    return next(
        (path for path, match in _children(folder, _ENTRY_NAME) if match["key"] == key), None
    )


def _open_lock(path: Path) -> int:
    """Writable where it may be: network file systems lock for one alone nothing else."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EROFS):
            raise
        return os.open(path, os.O_RDONLY)


def _lock_alone(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync(folder: Path) -> None:
    """Have everything on the disk, so that a loss of power can't leave whole files without data."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _close_all(descriptors: Mapping[tuple[Kind, str], int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)

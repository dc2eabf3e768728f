"""Digests of whole files, made once and remembered for as long as the files stay as they are."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.cache.errors import CacheError
from engine.progress import reporting

logger = logging.getLogger(__name__)

_SETTLED_NS = 2_000_000_000
"""File systems count time in ticks of up to 2 s: a later write may leave a younger stamp equal."""
_LEAF_BYTES = 64 << 20
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Stamp:
    """What the file system tells of a file's content without reading it."""

    path: str
    """Without links."""
    size: int
    mtime_ns: int
    ctime_ns: int
    """Moves with every write, also where the time of modification is set back afterwards."""
    inode: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        real = path.resolve(strict=True)
        stat = real.stat()
        return cls(str(real), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)

    def was_settled(self, time_ns: int) -> bool:
        """Whether any write after that time has changed the stamp."""
        return time_ns - max(self.mtime_ns, self.ctime_ns) > _SETTLED_NS


@dataclass(frozen=True, slots=True)
class Contents:
    """What some files hold."""

    digest: str
    """Of every byte, file by file."""
    stamps: Mapping[Path, Stamp]

    def require_unchanged(self) -> None:
        """Ask this after the files were read for what is kept under their digest.

        Raises:
            CacheError: one was written or replaced since it was digested; names it.
        """
        for path, stamp in self.stamps.items():
            if Stamp.of(path) != stamp:
                raise _changed(path)


class DigestMemory:
    """Remembers the digests of files in a folder, one small record a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._told_unwritable = False

    def contents(self, paths: Iterable[Path]) -> Contents:
        """Digest files, in this order; those that are as they were remembered are not read.

        Raises:
            CacheError: a file changes while it is read.
            OSError: a file can't be read.
        """
        stamps = {path: Stamp.of(path) for path in paths}
        digests = [self._digest(path, stamp) for path, stamp in stamps.items()]
        return Contents(hashlib.sha256("\n".join(digests).encode()).hexdigest(), stamps)

    def forget_missing(self) -> None:
        """Drop the records of files that are gone, and damaged ones."""
        for record in self._folder.glob("*.json"):
            stamp = _read_record(record)[0]
            if stamp is None or not Path(stamp.path).exists():
                record.unlink(missing_ok=True)

    def forget_all(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _digest(self, path: Path, stamp: Stamp) -> str:
        record = self._folder / f"{hashlib.sha256(stamp.path.encode()).hexdigest()[:32]}.json"
        remembered, digest = _read_record(record)
        if remembered == stamp:
            return digest
        started_ns = time.time_ns()
        digest = digest_file(path, stamp.size)
        if Stamp.of(path) != stamp:
            raise _changed(path)
        if stamp.was_settled(started_ns):
            self._remember(record, stamp, digest)
        return digest

    def _remember(self, record: Path, stamp: Stamp, digest: str) -> None:
        values = {"stamp": asdict(stamp), "digest": digest}
        text = json.dumps(values | {"check": _check(values)})
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False) as file:
                try:
                    file.write(text)
                    file.flush()
                    Path(file.name).replace(record)
                except BaseException:
                    Path(file.name).unlink(missing_ok=True)
                    raise
        except OSError as error:
            if not self._told_unwritable:
                self._told_unwritable = True
                logger.warning(
                    "can't remember digests in %s (%s): weights are read whole at every start",
                    self._folder,
                    error.strerror,
                )


def digest_file(path: Path, size: int) -> str:
    """SHA-256 of a file's leaves of 64 MiB, which several threads digest at the same time.

    Raises:
        CacheError: the file has fewer bytes than `size`.
    """
    with (
        reporting("reading", path.name, size, "bytes") as progress,
        path.open("rb") as file,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        descriptor = file.fileno()
        leaves = pool.map(
            lambda begin: _digest_leaf(path, descriptor, begin, min(begin + _LEAF_BYTES, size)),
            range(0, size, _LEAF_BYTES),
        )
        whole = hashlib.sha256()
        for leaf in leaves:
            whole.update(leaf)
            progress.advance(_LEAF_BYTES)
        return whole.hexdigest()


def _digest_leaf(path: Path, descriptor: int, begin: int, end: int) -> bytes:
    digest = hashlib.sha256()
    while begin < end:
        block = os.pread(descriptor, min(_READ_BYTES, end - begin), begin)
        if not block:
            raise _changed(path)
        digest.update(block)
        begin += len(block)
    return digest.digest()


def _changed(path: Path) -> CacheError:
    return CacheError(f"{path}: changed while it was read")


def _read_record(record: Path) -> tuple[Stamp | None, str]:
    """The stamp and the digest; no stamp where the record is missing or damaged."""
    try:
        values = json.loads(record.read_bytes())
        if values.pop("check") != _check(values):
            return None, ""
        return Stamp(**values["stamp"]), values["digest"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None, ""


def _check(values: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

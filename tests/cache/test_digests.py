from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from engine.cache import digests
from engine.cache.digests import DigestMemory, digest_file
from engine.cache.errors import CacheError


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read whole, in turn."""
    read: list[Path] = []

    def digest(path: Path, size: int) -> str:
        read.append(path)
        return digest_file(path, size)

    monkeypatch.setattr(digests, "digest_file", digest)
    return read


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files just written count as written long ago."""
    monkeypatch.setattr(digests, "_SETTLED_NS", -1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 100)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "digests"


def digest_of(folder: Path, *paths: Path) -> str:
    """As a process that has just started gets it."""
    return DigestMemory(folder).contents(paths).digest


def change_byte(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        [byte] = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("position", [0, 5000, 12_800, 25_599])
def test_every_byte_counts(
    file: Path, folder: Path, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_LEAF_BYTES", 10_000)
    monkeypatch.setattr(digests, "_READ_BYTES", 3_000)
    before = digest_of(folder, file)
    change_byte(file, position)
    after = digest_of(folder, file)
    assert after != before
    change_byte(file, position)
    assert digest_of(folder, file) == before


def test_order_and_borders_of_files_count(tmp_path: Path, folder: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    a.write_bytes(b"12")
    b.write_bytes(b"3")
    c.write_bytes(b"123")
    assert len({digest_of(folder, *paths) for paths in ((a, b), (b, a), (c,), (a,), ())}) == 5


@pytest.mark.usefixtures("settled")
def test_a_second_process_reads_nothing(file: Path, folder: Path, reads: list[Path]) -> None:
    first = digest_of(folder, file)
    assert reads == [file]
    link = file.with_name("link")
    link.symlink_to(file)
    assert digest_of(folder, file) == first
    assert digest_of(folder, link) == first
    assert reads == [file]


def test_a_file_just_written_is_not_trusted_by_its_stamp(
    file: Path, folder: Path, reads: list[Path]
) -> None:
    digest_of(folder, file)
    digest_of(folder, file)
    assert reads == [file, file]
    assert not folder.exists()


@pytest.mark.parametrize(
    ("written", "digested", "settled"), [(0, 3, True), (0, 1, False), (1, 0, False), (9, 0, False)]
)
def test_a_stamp_is_settled_two_seconds_after_the_last_write(
    file: Path, written: int, digested: int, settled: bool
) -> None:
    stamp = digests.Stamp(str(file), 1, written * 10**9, 0, 1)
    assert stamp.was_settled(digested * 10**9) == settled
    stamp = digests.Stamp(str(file), 1, 0, written * 10**9, 1)
    assert stamp.was_settled(digested * 10**9) == settled


@pytest.mark.usefixtures("settled")
def test_a_write_that_hides_its_time_is_noticed(file: Path, folder: Path) -> None:
    before = digest_of(folder, file)
    stat = file.stat()
    change_byte(file, 12_800)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert digest_of(folder, file) != before


@pytest.mark.usefixtures("settled")
def test_another_file_of_the_same_name_size_and_time_is_noticed(file: Path, folder: Path) -> None:
    before = digest_of(folder, file)
    stat = file.stat()
    other = file.with_name("other")
    other.write_bytes(file.read_bytes()[::-1])
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(file)
    assert digest_of(folder, file) != before


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("damage", ["cut", "digest", "stamp", "empty", "list"])
def test_a_damaged_record_is_made_anew(
    file: Path, folder: Path, reads: list[Path], damage: str
) -> None:
    expected = digest_of(folder, file)
    [record] = folder.iterdir()
    text = record.read_text()
    values = json.loads(text)
    values["digest"] = "0" * 64
    damaged = {
        "cut": text[: len(text) // 2],
        "digest": json.dumps(values),
        "stamp": text.replace('"size": ', '"size": 1'),
        "empty": "",
        "list": "[]",
    }
    record.write_text(damaged[damage])
    assert digest_of(folder, file) == expected
    assert len(reads) == 2
    assert record.read_text() == text


@pytest.mark.usefixtures("settled")
def test_a_memory_that_can_not_be_written_costs_time_and_one_line(
    file: Path, folder: Path, reads: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("in the way")
    memory = DigestMemory(folder)
    first = memory.contents([file])
    assert memory.contents([file]) == first
    assert len(reads) == 2
    [message] = caplog.messages
    assert caplog.records[0].levelno == logging.WARNING
    assert message.startswith(f"can't remember digests in {folder} (")


def test_a_file_that_changes_after_its_digest_is_told(file: Path, folder: Path) -> None:
    contents = DigestMemory(folder).contents([file])
    contents.require_unchanged()
    change_byte(file, 7)
    with pytest.raises(CacheError, match=f"^{file}: changed while it was read$"):
        contents.require_unchanged()


def test_a_file_that_changes_while_it_is_digested_is_told(
    file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest_while_written(path: Path, size: int) -> str:
        digest = digest_file(path, size)
        change_byte(path, 0)
        return digest

    monkeypatch.setattr(digests, "digest_file", digest_while_written)
    with pytest.raises(CacheError, match="changed while it was read"):
        digest_of(folder, file)
    with pytest.raises(CacheError, match="changed while it was read"):
        digest_file(file, file.stat().st_size + 1)


@pytest.mark.usefixtures("settled")
def test_records_of_missing_files_are_dropped(tmp_path: Path, folder: Path) -> None:
    kept, gone = tmp_path / "kept", tmp_path / "gone"
    for path in (kept, gone):
        path.write_bytes(b"x")
        digest_of(folder, path)
    gone.unlink()
    (folder / "damaged.json").write_text("{")
    DigestMemory(folder).forget_missing()
    [record] = folder.iterdir()
    assert json.loads(record.read_text())["stamp"]["path"] == str(kept)

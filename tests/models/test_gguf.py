from __future__ import annotations

import json
import logging
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig

from engine.cache.errors import CacheError
from engine.models import gguf
from engine.models.gguf import hf_folder, torch_folder
from engine.models.gguf_header import GgufError, read_header
from engine.models.source import ModelFiles, ModelSourceError, resolve
from tests.models.tiny_gguf import CHAT_TEMPLATE, CONTEXT, USER_TOKEN, write_tiny_gguf
from tests.real.models import GEMMA3_270M, QWEN_CODER_05B, QWEN_CODER_15B, SMOLLM2, model_file


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(folder))
    return folder


def tiny(tmp_path: Path, **options: Any) -> ModelFiles:
    path = tmp_path / "tiny.Q4_1.gguf"
    write_tiny_gguf(path, **options)
    return resolve(str(path))


def edited_in_the_middle(tmp_path: Path, old: bytes, new: bytes) -> tuple[ModelFiles, ModelFiles]:
    """A file and a copy of the same name and size; they differ over a MiB from start and end."""
    original = tmp_path / "original" / "tiny.gguf"
    edited = tmp_path / "edited" / "tiny.gguf"
    for path in (original, edited):
        path.parent.mkdir()
    write_tiny_gguf(original, filler=3 << 19)
    content = original.read_bytes()
    position = content.index(old)
    assert content.count(old) == 1
    assert 1 << 20 < position < len(content) - (1 << 20)
    edited.write_bytes(content.replace(old, new))
    assert edited.stat().st_size == len(content)
    return resolve(str(original)), resolve(str(edited))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def tokenizer_of(files: ModelFiles) -> Tokenizer:
    return Tokenizer.from_file(str(hf_folder(files) / "tokenizer.json"))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    tokens: list[str] = tokenizer.encode(text, add_special_tokens=False).tokens
    return tokens


class TestHeader:
    def test_agrees_with_the_gguf_package(self, tmp_path: Path) -> None:
        path = tiny(tmp_path).weights
        header, reference = read_header(path), GGUFReader(path)
        assert header.architecture == "llama"
        assert header.of_architecture("context_length") == CONTEXT
        assert header.of_architecture("nothing") is None
        for key, value in header.metadata.items():
            assert reference.fields[key].contents() == value
        assert [
            (tensor.name, tensor.element_type, tensor.shape, tensor.offset, tensor.num_bytes)
            for tensor in header.tensors
        ] == [
            (t.name, t.tensor_type.name, tuple(t.shape.tolist()[::-1]), t.data_offset, t.n_bytes)
            for t in reference.tensors
        ]

    @pytest.mark.parametrize(
        ("header", "problem"),
        [
            (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "GGUF version 1; versions 2 and 3"),
            (struct.pack("<4sIQQ", b"GGUF", 3, 0, 0), "no general.architecture"),
            (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 60), "cut short in its header"),
            (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1 << 63), "cut short in its header"),
            (struct.pack("<4sIQQQ2sI", b"GGUF", 3, 0, 1, 2, b"ab", 99), "damaged GGUF header"),
            (struct.pack("<4sIQQQ2sI", b"GGUF", 3, 0, 1, 2, b"\xff\xfe", 4), "damaged GGUF header"),
        ],
    )
    def test_refuses_damage_in_one_line(self, tmp_path: Path, header: bytes, problem: str) -> None:
        path = tmp_path / "m.gguf"
        path.write_bytes(header)
        with pytest.raises(GgufError, match=problem) as caught:
            read_header(path)
        assert "\n" not in str(caught.value)

    def test_refuses_one_part_of_several(self, tmp_path: Path) -> None:
        with pytest.raises(ModelSourceError, match="one of 3 parts"):
            tiny(tmp_path, extra={"split.count": 3})


class TestConversion:
    def test_leaves_a_model_folder_as_it_is(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        files = ModelFiles("m", "m", tmp_path)
        assert hf_folder(files) == tmp_path
        assert torch_folder(files) == tmp_path

    @pytest.mark.parametrize("told", [None, 300], ids=["counted", "told"])
    def test_reads_the_configuration_as_from_the_whole_file(
        self, tmp_path: Path, told: int | None
    ) -> None:
        files = tiny(tmp_path, extra={} if told is None else {"llama.vocab_size": told})
        read = AutoConfig.from_pretrained(tmp_path, gguf_file=files.weights.name)
        whole = json.loads(json.dumps(read.to_dict(), default=str))
        config = read_json(hf_folder(files) / "config.json")
        differing = {key for key in whole.keys() | config if whole.get(key) != config.get(key)}
        assert differing <= {"_name_or_path", "_model_name_or_path", "architectures", "dtype"}
        assert config["vocab_size"] == (264 if told is None else told)
        assert not list(hf_folder(files).glob("*.gguf"))

    def test_writes_what_transformers_reads(self, tmp_path: Path) -> None:
        folder = hf_folder(tiny(tmp_path))
        config = read_json(folder / "config.json")
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert config["max_position_embeddings"] == CONTEXT
        assert config["rope_parameters"]["rope_theta"] == 10_000.0
        assert config["tie_word_embeddings"] is False
        assert (folder / "chat_template.jinja").read_text() == CHAT_TEMPLATE
        assert read_json(folder / "generation_config.json") == {
            "bos_token_id": 1,
            "eos_token_id": [2, 0],
            "pad_token_id": 0,
        }
        tokenizer_config = read_json(folder / "tokenizer_config.json")
        assert tokenizer_config["eos_token"] == "<|im_end|>"
        assert tokenizer_config["unk_token"] is None
        assert tokenizer_config["model_max_length"] == CONTEXT

    def test_is_done_once_and_needs_no_torch_afterwards(self, tmp_path: Path) -> None:
        files = tiny(tmp_path)
        first = hf_folder(files)
        script = (
            "import sys\n"
            "from engine.models.gguf import hf_folder\n"
            "from engine.models.source import resolve\n"
            f"print(hf_folder(resolve({str(files.weights)!r})))\n"
            "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)\n"
        )
        again = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )
        assert again.stdout.strip() == str(first)

    def test_follows_the_content_of_the_file(self, tmp_path: Path) -> None:
        first = hf_folder(tiny(tmp_path))
        second = hf_folder(tiny(tmp_path, pre="qwen2"))
        assert first != second
        assert hf_folder(tiny(tmp_path)) == first

    def test_is_done_by_one_of_several_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = tiny(tmp_path)
        barrier = threading.Barrier(4)
        writes: list[Path] = []
        results: list[Path] = []

        def write(_: Path, folder: Path) -> None:
            writes.append(folder)
            threading.Event().wait(0.1)
            (folder / "config.json").write_text("{}")

        def convert() -> None:
            barrier.wait()
            results.append(hf_folder(files))

        monkeypatch.setattr(gguf, "_write_hf_files", write)
        threads = [threading.Thread(target=convert) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(writes) == 1
        assert len(set(results)) == 1
        assert (results[0] / "config.json").is_file()

    def test_says_that_it_takes_a_while(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        files = tiny(tmp_path)
        with caplog.at_level(logging.INFO, logger="engine.models.gguf"):
            hf_folder(files)
            hf_folder(files)
        assert caplog.messages == ["converting configuration and tokenizer of tiny, once ..."]

    def test_starts_again_after_a_kill(self, tmp_path: Path, cache: Path) -> None:
        files = tiny(tmp_path)
        folder = hf_folder(files)
        partial = folder.with_name(f"{folder.name.rpartition('.')[2]}.partial")
        folder.rename(partial)
        (partial / "leftover").touch()
        assert hf_folder(files) == folder
        assert not (folder / "leftover").exists()
        assert not partial.exists()

    @pytest.mark.slow
    def test_a_template_edited_in_the_middle_of_a_large_file_takes_effect(
        self, tmp_path: Path
    ) -> None:
        before, after = edited_in_the_middle(
            tmp_path, CHAT_TEMPLATE.encode(), CHAT_TEMPLATE.replace("end", "END").encode()
        )
        template = (hf_folder(before) / "chat_template.jinja").read_text(encoding="utf-8")
        assert template == CHAT_TEMPLATE
        for folder in (hf_folder, torch_folder):
            template = (folder(after) / "chat_template.jinja").read_text(encoding="utf-8")
            assert template == CHAT_TEMPLATE.replace("end", "END")

    def test_an_end_of_text_edited_in_the_middle_of_a_large_file_takes_effect(
        self, tmp_path: Path
    ) -> None:
        key = b"tokenizer.ggml.eos_token_id" + struct.pack("<I", GGUFValueType.UINT32)
        before, after = edited_in_the_middle(
            tmp_path, key + struct.pack("<I", 2), key + struct.pack("<I", 7)
        )
        ends = [
            read_json(hf_folder(files) / "generation_config.json")["eos_token_id"][0]
            for files in (before, after)
        ]
        assert ends == [2, 7]

    def test_another_version_of_a_converting_library_converts_anew(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = tiny(tmp_path)
        first = hf_folder(files)
        monkeypatch.setattr(gguf, "version", lambda name: "99")
        assert hf_folder(files) != first

    def test_a_file_that_changes_meanwhile_is_not_kept(
        self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = tiny(tmp_path)

        def write(path: Path, folder: Path) -> None:
            path.touch()

        monkeypatch.setattr(gguf, "_write_hf_files", write)
        with pytest.raises(CacheError, match=r"tiny.Q4_1.gguf: changed while it was read"):
            hf_folder(files)
        assert list((cache / "converted").iterdir()) == []

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"pre": "martian"}, "unknown pre-tokenizer 'martian'"),
            ({"extra_tensor": "rope_freqs.weight"}, "RoPE scaling 'llama3'"),
            ({"extra": {"llama.rope.scaling.type": "yarn"}}, "RoPE scaling 'yarn'"),
        ],
    )
    def test_failing_leaves_nothing(
        self, tmp_path: Path, cache: Path, options: Mapping[str, Any], problem: str
    ) -> None:
        files = tiny(tmp_path, **options)
        with pytest.raises(ModelSourceError, match=problem) as caught:
            hf_folder(files)
        assert "\n" not in str(caught.value)
        assert list((cache / "converted").iterdir()) == []

    @pytest.mark.parametrize("kind", ["gpt2", "llama"])
    def test_unpacks_every_weight(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / "tiny.gguf"
        expected = write_tiny_gguf(path, kind=kind)
        files = resolve(str(path))
        folder = torch_folder(files)
        weights = load_file(folder / "model.safetensors")
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            np.testing.assert_array_equal(weight, expected[name], err_msg=name)
        for file in hf_folder(files).iterdir():
            assert (folder / file.name).read_bytes() == file.read_bytes()


class TestByteLevelTokenizer:
    def test_keeps_added_tokens_whole(self, tmp_path: Path) -> None:
        tokenizer = tokenizer_of(tiny(tmp_path))
        ids = tokenizer.encode(f"<|im_start|>hi{USER_TOKEN}<|im_end|>").ids
        assert ids == [1, tokenizer.token_to_id("hi"), 3, 2]
        assert tokenizer.decode(ids) == f"hi{USER_TOKEN}"

    def test_drops_padding(self, tmp_path: Path) -> None:
        files = tiny(tmp_path)
        tokenizer = tokenizer_of(files)
        assert tokenizer.get_vocab_size() == 263
        assert read_json(hf_folder(files) / "config.json")["vocab_size"] == 264

    @pytest.mark.parametrize(
        ("pre", "expected"),
        [
            ("smollm", ["Ġhi", "Ġ", "1", "2"]),
            ("qwen2", ["Ġhi", "Ġ", "1", "2"]),
            ("gpt-2", ["Ġhi", "Ġ", "12"]),
            ("llama-bpe", ["Ġhi", "Ġ", "12"]),
        ],
    )
    def test_splits_as_the_rule_says(self, tmp_path: Path, pre: str, expected: list[str]) -> None:
        assert pieces(tokenizer_of(tiny(tmp_path, pre=pre)), " hi 12") == expected

    @pytest.mark.parametrize(("pre", "composed"), [("qwen2", True), ("smollm", False)])
    def test_composes_characters_where_the_original_does(
        self, tmp_path: Path, pre: str, composed: bool
    ) -> None:
        tokenizer = tokenizer_of(tiny(tmp_path, pre=pre))
        decomposed = "e\N{COMBINING ACUTE ACCENT}"
        text = tokenizer.decode(tokenizer.encode(decomposed).ids)
        assert text == ("\N{LATIN SMALL LETTER E WITH ACUTE}" if composed else decomposed)

    @pytest.mark.parametrize(
        ("extra", "expected"),
        [
            ({}, ["hi"]),
            ({"tokenizer.ggml.add_bos_token": True}, ["<|im_start|>", "hi"]),
            ({"tokenizer.ggml.add_eos_token": True}, ["hi", "<|im_end|>"]),
        ],
    )
    def test_adds_the_tokens_the_file_asks_for(
        self, tmp_path: Path, extra: Mapping[str, Any], expected: list[str]
    ) -> None:
        assert tokenizer_of(tiny(tmp_path, extra=extra)).encode("hi").tokens == expected


class TestSentencePieceTokenizer:
    def test_merges_and_falls_back_to_bytes(self, tmp_path: Path) -> None:
        tokenizer = tokenizer_of(tiny(tmp_path, kind="llama"))
        assert tokenizer.encode("hi é").tokens == ["<s>", "▁hi", "▁", "<0xC3>", "<0xA9>"]
        assert pieces(tokenizer, "hi   hi") == ["▁hi", "▁▁", "▁hi"]
        assert tokenizer.decode(tokenizer.encode("hi   é").ids) == "hi   é"

    def test_adds_no_prefix_where_the_file_says_so(self, tmp_path: Path) -> None:
        extra = {
            "tokenizer.ggml.add_space_prefix": False,
            "tokenizer.ggml.add_bos_token": False,
        }
        tokenizer = tokenizer_of(tiny(tmp_path, kind="llama", extra=extra))
        assert tokenizer.encode("hi hi").tokens == ["hi", "▁hi"]
        assert tokenizer.decode(tokenizer.encode(" hi").ids) == " hi"

    def test_never_merges_text_into_a_control_token(self, tmp_path: Path) -> None:
        tokenizer = tokenizer_of(tiny(tmp_path, kind="llama"))
        assert pieces(tokenizer, "</s>") == ["</s>"]
        tokenizer.encode_special_tokens = True
        assert pieces(tokenizer, "</s>") == ["▁", "</", "s>"]


TRICKY = (
    "  a   b\n\n\tc   ",
    "Zürich 東京 🦊👩\u200d👩\u200d👧 naïve",
    "def f(x):\n    return x**2  # 100%\n",
    "\n\n\n",
    "It's 2024-11-29, don't <0x0A> [PAD151700]",
    "\x00\x7f\u0301 \ufeff",
)


@pytest.mark.real
class TestRealModels:
    @pytest.fixture(autouse=True)
    def cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """These take long to convert: share the user's cache."""
        monkeypatch.delenv("SLIPSTREAM_CACHE", raising=False)

    @pytest.mark.parametrize("file", [QWEN_CODER_05B, QWEN_CODER_15B])
    def test_qwen(self, file: str) -> None:
        files = resolve(model_file(file))
        tokenizer = tokenizer_of(files)
        encoded = tokenizer.encode("<|im_start|>user\nHi 1234 don't<|im_end|>")
        assert encoded.tokens == [
            "<|im_start|>", "user", "Ċ", "Hi", "Ġ", "1", "2", "3", "4", "Ġdon", "'t", "<|im_end|>",
        ]  # fmt: skip
        assert (encoded.ids[0], encoded.ids[-1]) == (151644, 151645)
        assert tokenizer.get_vocab_size() == 151_665
        for text in TRICKY[:-1]:
            assert tokenizer.decode(tokenizer.encode(text).ids) == text
        generation = read_json(hf_folder(files) / "generation_config.json")
        assert generation["eos_token_id"] == [151645, 151643]

    def test_smollm2(self) -> None:
        files = resolve(SMOLLM2)
        tokenizer = tokenizer_of(files)
        encoded = tokenizer.encode("<|im_start|>user\nHi 1234 don't<|im_end|>")
        assert encoded.tokens == [
            "<|im_start|>", "user", "Ċ", "Hi", "Ġ", "1", "2", "3", "4", "Ġdon", "'t", "<|im_end|>",
        ]  # fmt: skip
        assert (encoded.ids[0], encoded.ids[-1]) == (1, 2)
        for text in TRICKY:
            assert tokenizer.decode(tokenizer.encode(text).ids) == text

    def test_gemma(self) -> None:
        tokenizer = tokenizer_of(resolve(model_file(GEMMA3_270M)))
        assert tokenizer.encode("Hi 1234").tokens == ["<bos>", "Hi", "▁", "1", "2", "3", "4"]
        assert tokenizer.encode("<start_of_turn>user\n\n\n").ids[1:] == [
            tokenizer.token_to_id(token) for token in ("<start_of_turn>", "user", "\n\n\n")
        ]
        for text in TRICKY:
            assert tokenizer.decode(tokenizer.encode(text).ids) == text

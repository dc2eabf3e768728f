"""A tiny model is trained once, whoever asks, and what changes it makes another."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests import tiny_models
from tests.tiny_models import Recipe, make_tiny_model

RECIPE = Recipe("byte_level", 400, 16, 0, 0, 512)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """What was trained while the test ran."""
    recipes: list[Recipe] = []
    train = tiny_models.train

    def recorded(recipe: Recipe, folder: Path) -> Path:
        recipes.append(recipe)
        return train(recipe, folder)

    monkeypatch.setattr(tiny_models, "train", recorded)
    return recipes


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_asking_at_once_and_again_trains_once(tmp_path: Path, trained: list[Recipe]) -> None:
    def make(name: str) -> Path:
        return make_tiny_model(tmp_path / name, hidden=16, steps=0, kept_in=tmp_path / "kept")

    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(make, "abc")
    (first / "config.json").unlink()
    later = make("d")
    assert trained == [RECIPE]
    assert contents(later) == contents(others[0]) == contents(others[1])
    assert "model.safetensors" in contents(later)


def test_training_that_fails_leaves_nothing_to_take_for_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(recipe: Recipe, folder: Path) -> Path:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_models, "train", fail)
    with pytest.raises(KeyboardInterrupt):
        make_tiny_model(tmp_path / "a", hidden=16, steps=0, kept_in=tmp_path / "kept")
    monkeypatch.undo()
    made = make_tiny_model(tmp_path / "a", hidden=16, steps=0, kept_in=tmp_path / "kept")
    assert "model.safetensors" in contents(made)


def test_each_thing_it_is_made_of_makes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {
        RECIPE.digest(),
        replace(RECIPE, seed=1).digest(),
        replace(RECIPE, style="sentencepiece").digest(),
    }
    with monkeypatch.context() as patch:
        patch.setattr(tiny_models, "version", lambda name: "0")
        seen.add(RECIPE.digest())
    edited = shutil.copy(tiny_models.__file__, tmp_path / "tiny_models.py")
    with open(edited, "a", encoding="utf-8") as file:
        file.write("# another\n")
    monkeypatch.setattr(tiny_models, "__file__", str(edited))
    seen.add(RECIPE.digest())
    assert len(seen) == 5
    monkeypatch.undo()
    assert RECIPE.digest() in seen

"""What a release is made of: version, changelog, workflow files, wheels."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.cli.main import main
from server.version import VERSION

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
SCHEMAS = {
    "vendor.github-workflows": sorted(GITHUB.glob("workflows/*.yml")),
    "vendor.github-issue-forms": [
        GITHUB / "ISSUE_TEMPLATE" / f"{n}.yml" for n in ("bug", "feature")
    ],
    "vendor.github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_for_the_forge_are_valid(schema: str) -> None:
    files = SCHEMAS[schema]
    assert files
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *files]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_an_invalid_workflow_is_noticed(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yml"
    broken.write_text("on: push\njobs:\n  x:\n    steps: []\n", encoding="utf-8")
    command = [sys.executable, "-m", "check_jsonschema"]
    command += ["--builtin-schema", "vendor.github-workflows", str(broken)]
    assert subprocess.run(command, capture_output=True).returncode == 1


def test_workflows_call_targets_that_the_makefile_has() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    called = [
        word
        for path in GITHUB.glob("workflows/*.yml")
        for word in re.findall(r"run: make ([a-z-]+)", path.read_text(encoding="utf-8"))
    ]
    assert {"lint", "test", "test-all", "site"} <= set(called) <= set(targets)


def test_every_job_is_granted_what_it_needs_and_no_more() -> None:
    for path in GITHUB.glob("workflows/*.yml"):
        workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert workflow["permissions"] == {"contents": "read"}, path.name


def test_the_command_tells_the_version_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"slipstream {VERSION}\n"


def test_the_version_has_one_source(project: dict[str, Any]) -> None:
    assert "version" not in project["project"]
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["scikit-build"]["metadata"]["version"]["provider"].endswith("scm")


def test_the_entry_point_can_be_run_by_the_packages_name(project: dict[str, Any]) -> None:
    assert project["project"]["scripts"][project["project"]["name"]] == "server.cli.main:main"


def test_no_kernel_is_built_for_the_building_machine_alone() -> None:
    build = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    assert "add_variant(" in build
    assert not re.search(r"-m(arch|tune|cpu)=native", build)


def test_the_changelog_has_releases_in_order() -> None:
    heads = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert heads[0] == "Unreleased"
    releases = [tuple(map(int, head.split("."))) for head in heads[1:]]
    assert releases == sorted(releases, reverse=True)

"""The stub that Python is checked against names what the extension has."""

from __future__ import annotations

import ast
from pathlib import Path

from engine import kernels
from engine.kernels import load_native


def test_the_stub_has_the_members_of_the_extensions_enumerations() -> None:
    stub = ast.parse(Path(kernels.__file__).with_name("_native.pyi").read_text(encoding="utf-8"))
    declared = {
        node.name: [ast.unparse(n.targets[0]) for n in node.body if isinstance(n, ast.Assign)]
        for node in stub.body
        if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(b) for b in node.bases)
    }
    native = load_native()
    assert declared.keys() >= {"Format", "KvType", "Activation"}
    for name, members in declared.items():
        assert list(getattr(native, name).__members__) == members

"""Loaded by schemathesis: bodies name the served model, to get past the first check."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        return {**body, "model": "tiny"}
    return body

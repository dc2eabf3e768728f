"""What a JSON schema may cost llguidance in ways that its own limits don't see."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any

_EMBEDDED = re.compile(r"%json\s*")
_DECODER = json.JSONDecoder()
_MAX_DIVISOR = 10_000
_MAX_EXPONENT = 6


def why_too_costly(schema: Any) -> str | None:
    """Why a schema must not be compiled; None when it may.

    ``multipleOf`` becomes an automaton with a state for each remainder, 100 MiB a second for as
    long as it takes. Where several meet in one value, it counts their least common multiple.
    """
    digits, exponents = [1], [0]
    for value in _divisors(schema):
        number = Decimal(str(value)).normalize()
        digits.append(abs(int(number.scaleb(-int(number.as_tuple().exponent)))))
        exponents.append(int(number.as_tuple().exponent))
    small = math.lcm(*digits) <= _MAX_DIVISOR and sum(digits) <= _MAX_DIVISOR
    if small and max(exponents) <= _MAX_EXPONENT:
        return None
    return "its values of multipleOf are too large, too many or have too few factors in common"


def embedded_schemas(lark: str) -> list[Any]:
    """The JSON behind each ``%json`` of a grammar; where none can be read, the library refuses."""
    schemas, place = [], 0
    while match := _EMBEDDED.search(lark, place):
        place = match.end()
        with suppress(ValueError, RecursionError):
            schema, place = _DECODER.raw_decode(lark, place)
            schemas.append(schema)
    return schemas


def _divisors(schema: Any) -> Iterator[int | float]:
    """Every finite number but 0 under the name ``multipleOf``, found without recursion."""
    pending = [schema]
    while pending:
        inner = pending.pop()
        if isinstance(inner, Mapping):
            value = inner.get("multipleOf")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and value and math.isfinite(value):
                yield value
            pending.extend(inner.values())
        elif isinstance(inner, list):
            pending.extend(inner)

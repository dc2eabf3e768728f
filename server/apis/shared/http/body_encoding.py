"""From a request body as it was sent to the JSON text in it: compression and character encoding."""

from __future__ import annotations

import codecs
import zlib

from server.errors import ApiError, body_too_large

_ZLIB_FORMATS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": 0}
"""Formats by content coding, as zlib counts them; 0: the window is as the data says."""

_WIDE_BOMS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Longer ones first: one of UTF-32 begins with one of UTF-16."""


def decompressed(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """
    Args:
        encoding: the request's Content-Encoding; empty: none.
        max_bytes: more is never made of a body, however much it would come to.

    Raises:
        ApiError: 415 for another encoding, 413 for a body over the limit, 400 for a broken one.
    """
    coding = encoding.strip().lower()
    if coding in ("", "identity"):
        return body
    if coding not in _ZLIB_FORMATS:
        raise ApiError(
            415,
            f"The Content-Encoding {encoding[:64]!r} is not supported by this server; "
            "gzip and deflate are.",
            code="unsupported_content_encoding",
            headers={"Accept-Encoding": "gzip, deflate"},
        )
    window = _ZLIB_FORMATS[coding]
    text = bytearray()
    try:
        while body:
            stream = zlib.decompressobj(window)
            text += stream.decompress(body, max_bytes + 1 - len(text))
            if len(text) > max_bytes:
                raise body_too_large(max_bytes)
            if not stream.eof:
                raise zlib.error("it is cut off")
            body = stream.unused_data
    except zlib.error as error:
        raise ApiError(400, f"The request body is not valid {coding}: {error}.") from error
    return bytes(text)


def utf8_text(body: bytes) -> bytes:
    """The body without a byte order mark.

    Raises:
        ApiError: 415, it is in UTF-16 or UTF-32.
    """
    wide = next((name for bom, name in _WIDE_BOMS.items() if body.startswith(bom)), None)
    if wide is None and b"\0" in body[:2]:
        wide = "UTF-16 or UTF-32"
    if wide is not None:
        raise ApiError(
            415,
            f"The request body must be JSON in UTF-8, not in {wide}.",
            code="unsupported_media_type",
        )
    return body.removeprefix(codecs.BOM_UTF8)

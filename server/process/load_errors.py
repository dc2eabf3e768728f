"""Why a load failed, in one line that a person can act on."""

from __future__ import annotations

OUT_OF_MEMORY = (
    "not enough memory; take a smaller model, fewer bits a weight (quantization) or a smaller "
    "kv.memory_mib"
)
_ALLOCATOR_MESSAGES = ("can't allocate memory", "out of memory", "bad_alloc")
"""Of allocators that raise a plain RuntimeError."""


def load_failure(error: BaseException) -> str:
    message = " ".join(str(error).split())
    if _is_out_of_memory(error, message):
        return f"{OUT_OF_MEMORY} ({message})" if message else OUT_OF_MEMORY
    if type(error).__module__.startswith("engine.") and message:
        return message
    if isinstance(error, OSError) and error.strerror:
        place = "" if error.filename is None else f"{error.filename}: "
        return f"{place}{error.strerror}"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _is_out_of_memory(error: BaseException, message: str) -> bool:
    if isinstance(error, MemoryError):
        return True
    told = any(text in message.lower() for text in _ALLOCATOR_MESSAGES)
    return isinstance(error, RuntimeError) and told

"""What counts as a fault."""

from __future__ import annotations

from typing import Final

ANY_FAULT: Final = BaseException
"""What the engine's thread, and the threads that prepare requests, catch where they guard others.

A panic of a Rust extension (tokenizers, llguidance) derives from BaseException alone. Nor are
KeyboardInterrupt and SystemExit requests to stop there: Python delivers signals to the main thread
only, and the engine is stopped by `EngineThread.stop`; raised elsewhere they are faults of the code
that raised them. A MemoryError is a fault like any other: a smaller part of the work may fit.
"""

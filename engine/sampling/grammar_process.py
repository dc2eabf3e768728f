"""A process that compiles clients' grammars on trial: whatever one costs, the process can be ended.

`python -m engine.sampling.grammar_process FD` reads a pickled `TokenTable` from the connection FD,
answers with an empty message, and then answers each pair (grammar, seconds) with the reason to
refuse the grammar, in UTF-8; empty: it can be used.
"""

from __future__ import annotations

import resource
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from llguidance import LLTokenizer

from engine.request import GrammarSpec, RequestError
from engine.sampling.grammar_compiler import compile_grammar
from engine.sampling.grammar_tokens import TokenTable
from engine.sampling.refusal import refusal

MAX_BYTES = 1 << 30
"""Memory a compilation may take, the process itself included; a request for more ends it."""


def main(fd: int) -> None:
    _limit_memory()
    connection = Connection(fd)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the server has gone
        table: TokenTable = connection.recv()
        vocabulary = table.index()
        connection.send_bytes(b"")
        while True:
            spec, seconds = connection.recv()
            # Ends this process also when nobody is left to do it.
            signal.setitimer(signal.ITIMER_REAL, 2 * seconds)
            reason = _reason_to_refuse(spec, vocabulary, table.eos_ids)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send_bytes(reason.encode(errors="replace"))


def _limit_memory() -> None:
    """RLIMIT_DATA also counts what is mapped, but not the code of libraries."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = MAX_BYTES if hard == resource.RLIM_INFINITY else min(hard, MAX_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _reason_to_refuse(spec: GrammarSpec, vocabulary: LLTokenizer, end_ids: frozenset[int]) -> str:
    try:
        compile_grammar(spec, vocabulary, end_ids)
    except RequestError as error:
        return str(error)
    except BaseException:  # a panic of the library derives from it
        return str(refusal("the compiler fails on it"))
    return ""


if __name__ == "__main__":
    main(int(sys.argv[1]))

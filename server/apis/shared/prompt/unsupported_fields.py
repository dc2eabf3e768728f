"""Fields of the APIs that would change the answer but that this server does not serve."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from engine.request import RequestError
from server.apis.shared.schema.structured import StructuredFields

logger = logging.getLogger(__name__)

NoOps = tuple[Any, ...]
"""Values of a field, beside null, that ask for nothing."""

UNSUPPORTED_CONSTRAINTS: Mapping[str, NoOps] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "custom_logit_processor": (),
    "extra_body": ({},),
    "grammar_lazy": (False,),
    "grammar_string": ("",),
    "grammar_triggers": ([],),
    "guided_decoding": ({},),
    "guided_json_object": (False,),
    "guided_structural_tag": (),
    "guided_whitespace_pattern": (),
    "nvext": ({},),
    "regex_pattern": ("",),
    "stop_regex": ([], ""),
    "structural_tag": (),
}
"""Fields by which other servers constrain the output, or which may hold such fields."""

UNSUPPORTED_ANYWHERE: Mapping[str, NoOps] = {
    **UNSUPPORTED_CONSTRAINTS,
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}

UNSUPPORTED_COMPLETION: Mapping[str, NoOps] = {
    **UNSUPPORTED_ANYWHERE,
    "prompt_embeds": (),
}

UNSUPPORTED_CHAT: Mapping[str, NoOps] = {
    **UNSUPPORTED_ANYWHERE,
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "modalities": (["text"],),
    "web_search_options": (),
}

UNSUPPORTED_RESPONSES: Mapping[str, NoOps] = {
    **UNSUPPORTED_ANYWHERE,
    "background": (False,),
    "chat_template": (),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "prompt": (),
    "top_logprobs": (0,),
}

UNSUPPORTED_MESSAGES: Mapping[str, NoOps] = {
    **UNSUPPORTED_ANYWHERE,
    # Anthropic's API has its own way to ask for JSON.
    **dict.fromkeys(StructuredFields.model_fields, ()),
    "response_format": ({"type": "text"},),
    "container": (),
    "mcp_servers": ([],),
}

UNSUPPORTED_MESSAGE: Mapping[str, NoOps] = {"audio": ()}


def refuse_unsupported(
    extra: Mapping[str, Any] | None, unsupported: Mapping[str, NoOps], *, prefix: str = ""
) -> None:
    """Check the fields that no schema declares; those nobody knows are ignored.

    Args:
        extra: undeclared fields by name.
        prefix: dotted path of the object they are in, with a trailing dot.

    Raises:
        RequestError: a field asks for something this server does not do.
    """
    for name, value in (extra or {}).items():
        if name not in unsupported:
            logger.debug("ignoring unknown request field %r", prefix + name)
        elif value is not None and value not in unsupported[name]:
            raise RequestError(
                f"'{prefix}{name}' is not supported by this server.",
                param=prefix + name,
                code="unsupported_parameter",
            )

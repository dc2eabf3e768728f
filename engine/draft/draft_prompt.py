"""A request's prompt as the draft model reads it: in chat, under the draft's own template."""

from __future__ import annotations

from engine.request import ChatPrompt, RequestError, TextPrompt
from engine.text.tokenizer import TextTokenizer


def encode_draft_prompt(source: ChatPrompt | TextPrompt, tokenizer: TextTokenizer) -> list[int]:
    """The prompt's tokens for a model of its own tokenizer and chat template.

    In chat the draft model sees the same messages under its own template, so that the target's
    markup never reaches it as text; without a template that takes them, as a plain conversation.

    Args:
        tokenizer: the draft model's.
    """
    if isinstance(source, TextPrompt):
        return tokenizer.encode(source.text)
    if tokenizer.has_chat_template:
        try:
            return tokenizer.encode_chat(source.messages, source.options)
        except RequestError:
            pass  # a template that wants other roles
    turns = [f"{message['role']}: {message['content']}\n\n" for message in source.messages]
    return tokenizer.encode("".join([*turns, "assistant: "]))

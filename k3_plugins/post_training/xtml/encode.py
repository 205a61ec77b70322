"""Conversations to segments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from k3_plugins.post_training.xtml.conversation import Conversation, arguments_object, canonical, compact
from k3_plugins.post_training.xtml.symbols import Segment, Special, quote


def encode(conversation: Conversation) -> list[Segment]:
    """Every message of a conversation, with the loss mask.

    Raises:
        ConversationError: if it has no template form.
    """
    return _merged(_conversation(canonical(conversation)))


def generation_prompt(conversation: Conversation) -> list[Segment]:
    """What a model is given to write the next answer: the conversation and the answer's header."""
    return _merged([*_conversation(canonical(conversation)), *_opened("assistant", train=False)])


def _conversation(conversation: Conversation) -> Iterator[Segment]:
    if conversation.tools is not None:
        yield from _top("tools", {}, compact(conversation.tools))
    if conversation.effort is not None:
        yield from _top("thinking", {"effort": conversation.effort}, "")
    turn: list[dict[str, Any]] = []
    results = 0
    for message in conversation.messages:
        if message["role"] == "assistant":
            turn, results = message.get("tool_calls", []), 0
            yield from _assistant(message)
        elif message["role"] == "tool":
            tool = turn[results]["function"]["name"]
            yield from _top("tool", {"tool": tool, "index": str(results)}, message["content"])
            results += 1
        else:
            yield from _top(message["role"], {}, message["content"])
    for name, value in conversation.once.items():
        yield from _top("option", {"name": name}, compact(value))


def _top(tag: str, attributes: Mapping[str, str], content: str) -> Iterator[Segment]:
    """A top-level element that the model never writes."""
    yield from _element(tag, attributes, content, train=False)
    yield Segment(Special.END, False)


def _element(tag: str, attributes: Mapping[str, str], content: str, *, train: bool) -> Iterator[Segment]:
    yield from _opened(tag, attributes, train=train)
    yield Segment(content, train)
    yield from _closed(tag, train=train)


def _opened(tag: str, attributes: Mapping[str, str] | None = None, *, train: bool) -> Iterator[Segment]:
    words = [tag, *(f"{name}={quote(value)}" for name, value in (attributes or {}).items())]
    yield Segment(Special.OPEN, train)
    yield Segment(" ".join(words), train)
    yield Segment(Special.SEP, train)


def _closed(tag: str, *, train: bool) -> Iterator[Segment]:
    yield Segment(Special.CLOSE, train)
    yield Segment(tag, train)
    yield Segment(Special.SEP, train)


def _assistant(message: Mapping[str, Any]) -> Iterator[Segment]:
    train = message.get("weight", 1) == 1
    yield from _opened("assistant", train=False)  # given to the model, as in generation
    if "reasoning_content" in message:
        yield from _element("think", {}, message["reasoning_content"], train=train)
    if "content" in message:
        yield from _element("response", {}, message["content"], train=train)
    if "tool_calls" in message:
        yield from _opened("tools", train=train)
        for index, call in enumerate(message["tool_calls"]):
            yield from _call(call["function"], index, train)
        yield from _closed("tools", train=train)
    yield from _closed("assistant", train=train)
    yield Segment(Special.END, train)


def _call(function: Mapping[str, str], index: int, train: bool) -> Iterator[Segment]:
    yield from _opened("call", {"tool": function["name"], "index": str(index)}, train=train)
    arguments = arguments_object(function["arguments"])
    if arguments is None:
        yield from _element("json", {}, function["arguments"], train=False)
    else:
        for name, value in arguments.items():
            kind, text = ("string", value) if isinstance(value, str) else ("json", compact(value))
            yield from _element("arg", {"name": name, "type": kind}, text, train=train)
    yield from _closed("call", train=train)


def _merged(segments: Iterator[Segment] | list[Segment]) -> list[Segment]:
    """Without empty texts; neighbouring texts of one kind joined."""
    merged: list[Segment] = []
    for segment in segments:
        if segment.symbol == "":
            continue
        last = merged[-1] if merged else None
        if last and isinstance(last.symbol, str) and isinstance(segment.symbol, str) and last.train == segment.train:
            merged[-1] = Segment(last.symbol + segment.symbol, segment.train)
        else:
            merged.append(segment)
    return merged

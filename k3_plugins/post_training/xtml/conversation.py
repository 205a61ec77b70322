"""OpenAI-style conversations, checked before anything is encoded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

EFFORTS = ("low", "high", "max")


class ConversationError(ValueError):
    """A conversation that has no template form. The text says which message and what to change."""


@dataclass
class Conversation:
    """Messages with their options.

    Messages are dictionaries with ``role`` and

        system, user   ``content``: str
        assistant      ``content``: str or None, ``reasoning_content``: str (with thinking on), ``tool_calls``: list of
                       ``{"id", "type": "function", "function": {"name", "arguments": JSON text}}``, ``weight``: 0 or 1
        tool           ``content``: str, ``tool_call_id``
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    """Tool declarations, any JSON."""
    effort: str | None = None
    """Thinking effort; None means thinking is off."""
    once: dict[str, Any] = field(default_factory=dict)
    """Options for the next answer only, name to any JSON."""

    @property
    def thinking(self) -> bool:
        """Whether every assistant message has a think channel."""
        return self.effort is not None


def call_id(tool: str, index: int) -> str:
    """The canonical id of the call number ``index`` of a turn."""
    return f"functions.{tool}:{index}"


def compact(value: Any) -> str:
    """JSON without spaces, characters as they are, no NaN."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def canonical(conversation: Conversation) -> Conversation:
    """The same conversation with canonical call ids and arguments, results in call order, and no absent fields.

    Raises:
        ConversationError: naming the message.
    """
    if conversation.effort is not None and conversation.effort not in EFFORTS:
        raise ConversationError(f"thinking effort {conversation.effort!r} is none of {', '.join(EFFORTS)}")
    messages: list[dict[str, Any]] = []
    pending: list[tuple[str, dict[str, str]]] = []
    results: dict[str, dict[str, Any]] = {}
    for number, message in enumerate(conversation.messages):
        role = message.get("role")
        if role != "tool" and pending:
            messages += _in_call_order(number, pending, results)
            pending, results = [], {}
        if role in ("system", "user"):
            messages.append({"role": role, "content": _text(number, message, "content")})
        elif role == "assistant":
            known, pending = _assistant(number, message, conversation.thinking)
            messages.append(known)
        elif role == "tool":
            key = message.get("tool_call_id")
            if not isinstance(key, str) or key not in dict(pending):
                raise ConversationError(
                    f"message {number}: tool_call_id {key!r} is none of the calls {[name for name, _ in pending]} of"
                    " the assistant message before it"
                )
            if key in results:
                raise ConversationError(f"message {number}: a second result for tool_call_id {key!r}")
            results[key] = {"role": "tool", "content": _text(number, message, "content")}
        else:
            raise ConversationError(f"message {number}: role {role!r} is none of system, user, assistant, tool")
    if pending and results:
        messages += _in_call_order(len(conversation.messages), pending, results)
    return Conversation(messages, conversation.tools, conversation.effort, dict(conversation.once))


def _text(number: int, message: Mapping[str, Any], key: str) -> str:
    value = message.get(key)
    if not isinstance(value, str):
        raise ConversationError(f"message {number} ({message['role']}): {key} must be a string, it is {value!r}")
    return value


def _assistant(
    number: int, message: Mapping[str, Any], thinking: bool
) -> tuple[dict[str, Any], list[tuple[str, dict[str, str]]]]:
    known: dict[str, Any] = {"role": "assistant"}
    thought = message.get("reasoning_content")
    if thinking:
        known["reasoning_content"] = "" if thought is None else _text(number, message, "reasoning_content")
    elif thought:
        raise ConversationError(
            f"message {number}: reasoning_content in a conversation without thinking; give it an effort"
            f" ({', '.join(EFFORTS)}) or remove the field"
        )
    if message.get("content") is not None:
        known["content"] = _text(number, message, "content")
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise ConversationError(f"message {number}: weight {weight!r} must be 0 or 1")
    if weight == 0:
        known["weight"] = 0
    calls, pending = [], []
    asked = message.get("tool_calls") or []
    if not isinstance(asked, list):
        raise ConversationError(f"message {number}: tool_calls must be a list, it is {asked!r}")
    for index, call in enumerate(asked):
        function = call.get("function") if isinstance(call, Mapping) else None
        tool, arguments = (function.get(k) for k in ("name", "arguments")) if isinstance(function, Mapping) else (0, 0)
        if not isinstance(tool, str) or not tool or not isinstance(arguments, str):
            raise ConversationError(
                f"message {number}: call {index} needs function.name and function.arguments, two strings"
            )
        if not isinstance(call.get("id") or "", str):
            raise ConversationError(f"message {number}: the id of call {index} must be a string, it is {call['id']!r}")
        own = call_id(tool, index)
        calls.append({"id": own, "type": "function", "function": {"name": tool, "arguments": _normal(arguments)}})
        pending.append((call.get("id") or own, {"tool": tool, "index": str(index)}))
    if len(dict(pending)) < len(pending):
        raise ConversationError(f"message {number}: two calls with one id in {[name for name, _ in pending]}")
    if calls:
        known["tool_calls"] = calls
    elif "content" not in known:
        raise ConversationError(f"message {number}: an assistant message needs content or tool_calls")
    return known, pending


def arguments_object(text: str) -> dict[str, Any] | None:
    """The JSON object that arguments spell, or None for anything else (also with duplicate names or NaN)."""

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) < len(pairs):
            raise ValueError("duplicate name")
        return dict(pairs)

    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
        compact(value)  # numbers such as 1e999 parse to infinity
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _normal(arguments: str) -> str:
    value = arguments_object(arguments)
    return arguments if value is None else compact(value)


def _in_call_order(
    number: int, pending: Sequence[tuple[str, dict[str, str]]], results: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    missing = [key for key, _ in pending if key not in results]
    if missing:
        raise ConversationError(f"before message {number}: no result for the calls {missing}; every call needs one")
    return [
        {**results[key], "tool_call_id": call_id(place["tool"], int(place["index"]))} for key, place in pending
    ]

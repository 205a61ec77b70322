"""A strict streaming parser: symbols, cut anywhere, to conversations and answers.

Every reserved token and every character is one position, so a position does not depend on how the stream was cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from k3_plugins.post_training.xtml.conversation import EFFORTS, Conversation, arguments_object, call_id, compact
from k3_plugins.post_training.xtml.symbols import Special, Symbol, unquote

_TAG = re.compile(r'([a-z]+)((?: [a-z]+="[^"]*")*)')
_ATTRIBUTE = re.compile(r' ([a-z]+)="([^"]*)"')

_ATTRIBUTES = {
    "thinking": ("effort",),
    "tool": ("tool", "index"),
    "option": ("name",),
    "call": ("tool", "index"),
    "arg": ("name", "type"),
}
_CHILDREN = {
    "": ("tools", "thinking", "system", "user", "assistant", "tool", "option"),
    "assistant": ("think", "response", "tools"),
    "assistant/tools": ("call",),
    "assistant/tools/call": ("arg", "json"),
}
"""By path; an element that is not here holds text."""


class XTMLError(ValueError):
    """A malformed stream. ``position`` counts reserved tokens and characters from 0."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(f"position {position}: {reason}")
        self.position = position
        self.reason = reason


@dataclass
class _Frame:
    tag: str
    path: str
    attributes: dict[str, str]
    position: int
    text: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    """Tags of the children so far."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of a call."""

    @property
    def content(self) -> str:
        return "".join(self.text)


class _Machine:
    """Elements and their nesting; the subclasses say what an element means where it stands."""

    def __init__(self) -> None:
        self.position = 0
        self._stack: list[_Frame] = []
        self._tag: list[str] | None = None  # the text of a tag under way
        self._closing = False
        self._expect_end = False
        self._start = 0

    def feed(self, symbols: Iterable[Symbol]) -> None:
        """Take more of the stream.

        Raises:
            XTMLError: at the first symbol that no valid stream has there. The parser is of no use afterwards.
        """
        for symbol in symbols:
            if isinstance(symbol, Special):
                self._special(symbol)
                self.position += 1
            else:
                self._text(symbol)
                self.position += len(symbol)

    def _fail(self, reason: str, position: int | None = None) -> NoReturn:
        raise XTMLError(self.position if position is None else position, reason)

    def _where(self) -> str:
        return f"in {self._stack[-1].path}" if self._stack else "between messages"

    def _text(self, text: str) -> None:
        if not text:
            return
        if self._tag is not None:
            self._tag.append(text)
        elif self._expect_end:
            self._fail("text where [end_of_msg] must stand")
        elif not self._stack or self._stack[-1].path in _CHILDREN:
            self._fail(f"text {self._where()}, where only elements may stand")
        else:
            self._stack[-1].text.append(text)

    def _special(self, special: Special) -> None:
        if self._expect_end:
            if special is not Special.END:
                self._fail(f"{special.value} where [end_of_msg] must stand")
            self._expect_end = False
            self.ended()
        elif special is Special.END:
            self._fail(f"[end_of_msg] {'inside a tag' if self._tag is not None else self._where()}")
        elif self._tag is not None:
            if special is not Special.SEP:
                self._fail(f"{special.value} inside a tag")
            self._finish_tag()
        elif special is Special.SEP:
            self._fail(f"[sep] {self._where()} without a tag before it")
        else:
            self._closing = special is Special.CLOSE
            if self._closing and not self._stack:
                self._fail("[close] between messages")
            self._tag, self._start = [], self.position

    def _finish_tag(self) -> None:
        text, self._tag = "".join(self._tag or ()), None
        if self._closing:
            frame = self._stack[-1]
            if text != frame.tag:
                self._fail(f"[close]{text}[sep] where {frame.tag} is open", self._start)
            self.closed(frame)
            self._stack.pop()
            self._expect_end = not self._stack
        else:
            self._open(text)

    def _open(self, text: str) -> None:
        match = _TAG.fullmatch(text)
        if match is None:
            self._fail(f"{text!r} is no tag with attributes", self._start)
        tag, pairs = match[1], _ATTRIBUTE.findall(match[2])
        parent = self._stack[-1] if self._stack else None
        path = f"{parent.path}/{tag}" if parent else tag
        allowed = _CHILDREN.get(parent.path if parent else "", ())
        if tag not in allowed:
            self._fail(f"element {tag} {self._where()}; allowed: {', '.join(allowed) or 'text only'}", self._start)
        try:
            attributes = {name: unquote(value) for name, value in pairs}
        except ValueError as error:
            self._fail(str(error), self._start)
        wanted = () if path == "assistant/tools" else _ATTRIBUTES.get(tag, ())
        if tuple(name for name, _ in pairs) != wanted:
            self._fail(f"element {path} has attributes {[n for n, _ in pairs]}, it needs {list(wanted)}", self._start)
        frame = _Frame(tag, path, attributes, self._start)
        self.opened(frame, parent)
        if parent is not None:
            parent.seen.append(tag)
        self._stack.append(frame)

    def opened(self, frame: _Frame, parent: _Frame | None) -> None:
        """An element starts: may it stand here?"""

    def closed(self, frame: _Frame) -> None:
        """An element is complete."""

    def ended(self) -> None:
        """[end_of_msg] was read."""


class _Answers(_Machine):
    """Assistant messages: their channels, calls and arguments."""

    def __init__(self, *, thinking: bool | None, fallback: bool) -> None:
        super().__init__()
        self._thinking = thinking
        self._fallback = fallback
        self.answer: dict[str, Any] = {}

    def opened(self, frame: _Frame, parent: _Frame | None) -> None:
        if frame.path == "assistant":
            self.answer = {"role": "assistant"}
            return
        if parent is None or not parent.path.startswith("assistant"):
            return
        if parent.path == "assistant":
            order = _CHILDREN["assistant"]
            if parent.seen and order.index(frame.tag) <= order.index(parent.seen[-1]):
                reason = f"channel {frame.tag} after {parent.seen[-1]}; the order is {', '.join(order)}"
                self._fail(reason, frame.position)
            if frame.tag == "think" and not self._thinking:
                self._fail("a think channel in a conversation without thinking", frame.position)
            if frame.tag != "think" and self._thinking and not parent.seen:
                self._fail(f"channel {frame.tag} without a think channel before it", frame.position)
            if frame.tag == "tools":
                self.answer["tool_calls"] = []
        elif frame.tag == "call":
            if frame.attributes["index"] != str(len(parent.seen)):
                self._fail(f"call index {frame.attributes['index']!r} must be {len(parent.seen)}", frame.position)
            if not frame.attributes["tool"]:
                self._fail("a call without the name of its tool", frame.position)
        elif frame.tag == "json":
            if not self._fallback:
                self._fail("a json block in a generated answer; arguments are arg elements there", frame.position)
            if parent.seen:
                self._fail("a json block beside other arguments", frame.position)
        elif frame.tag == "arg":
            if "json" in parent.seen:
                self._fail("arguments beside a json block", frame.position)
            if frame.attributes["name"] in parent.arguments:
                self._fail(f"a second argument {frame.attributes['name']!r}", frame.position)
            if frame.attributes["type"] not in ("string", "json"):
                self._fail(f"argument type {frame.attributes['type']!r} is none of string, json", frame.position)

    def closed(self, frame: _Frame) -> None:
        if frame.path == "assistant/think":
            self.answer["reasoning_content"] = frame.content
        elif frame.path == "assistant/response":
            self.answer["content"] = frame.content
        elif frame.path == "assistant/tools" and not frame.seen:
            self._fail("a tools channel without a call", frame.position)
        elif frame.path == "assistant/tools/call":
            self._close_call(frame)
        elif frame.path == "assistant/tools/call/arg":
            self._stack[-2].arguments[frame.attributes["name"]] = self._value(frame)
        elif frame.path == "assistant/tools/call/json":
            if arguments_object(frame.content) is not None:
                self._fail("a json block whose text is an object; write it as arg elements", frame.position)
            self._stack[-2].text.append(frame.content)
        elif frame.path == "assistant" and not {"response", "tools"} & set(frame.seen):
            self._fail("an assistant message without a response or tools channel", frame.position)

    def _close_call(self, frame: _Frame) -> None:
        tool, index = frame.attributes["tool"], int(frame.attributes["index"])
        arguments = frame.content if "json" in frame.seen else compact(frame.arguments)
        function = {"name": tool, "arguments": arguments}
        self.answer["tool_calls"].append({"id": call_id(tool, index), "type": "function", "function": function})

    def _value(self, frame: _Frame) -> Any:
        if frame.attributes["type"] == "string":
            return frame.content
        name = frame.attributes["name"]
        wrapped = arguments_object(f'{{"v":{frame.content}}}')
        if wrapped is None or wrapped.keys() != {"v"}:
            self._fail(f"argument {name!r} is no JSON value: {frame.content[:80]!r}", frame.position)
        if isinstance(wrapped["v"], str):
            self._fail(f"argument {name!r} is a string, which has type=\"string\"", frame.position)
        return wrapped["v"]


class AnswerParser(_Answers):
    """One generated answer, from behind its header to ``[end_of_msg]``.

    Args:
        thinking: whether the conversation has thinking on.

    ``answer`` holds the channels and calls that are complete; ``partial()`` also the one under way.
    """

    def __init__(self, *, thinking: bool) -> None:
        super().__init__(thinking=thinking, fallback=False)
        self.done = False
        frame = _Frame("assistant", "assistant", {}, 0)
        self.opened(frame, None)
        self._stack.append(frame)

    def _text(self, text: str) -> None:
        if self.done and text:
            self._fail("text after [end_of_msg]")
        super()._text(text)

    def _special(self, special: Special) -> None:
        if self.done:
            self._fail(f"{special.value} after [end_of_msg]")
        super()._special(special)

    def ended(self) -> None:
        self.done = True

    def partial(self) -> dict[str, Any]:
        """The answer so far, with the text of an unfinished think or response channel."""
        view = dict(self.answer)
        fields = {"assistant/think": "reasoning_content", "assistant/response": "content"}
        if self._stack and self._stack[-1].path in fields:
            view[fields[self._stack[-1].path]] = self._stack[-1].content
        return view

    def finish(self) -> dict[str, Any]:
        """The message.

        Raises:
            XTMLError: if the stream ended too early.
        """
        if not self.done:
            self._fail("the stream ended inside an answer")
        return self.answer


class Parser(_Answers):
    """A whole conversation."""

    def __init__(self) -> None:
        super().__init__(thinking=False, fallback=True)
        self.conversation = Conversation([])
        self._due: list[dict[str, Any]] = []  # calls without a result
        self._answered = False

    def opened(self, frame: _Frame, parent: _Frame | None) -> None:
        super().opened(frame, parent)
        if parent is not None:
            return
        begun, once = bool(self.conversation.messages), bool(self.conversation.once)
        if frame.tag in ("tools", "thinking"):
            if begun or once:
                self._fail(f"global option {frame.tag} after the first message", frame.position)
            taken = self.conversation.tools if frame.tag == "tools" else self.conversation.effort
            if taken is not None:
                self._fail(f"a second global option {frame.tag}", frame.position)
            if frame.tag == "tools" and self.conversation.effort is not None:
                self._fail("tools after thinking; tools come first", frame.position)
            if frame.tag == "thinking" and frame.attributes["effort"] not in EFFORTS:
                self._fail(f"effort {frame.attributes['effort']!r} is none of {', '.join(EFFORTS)}", frame.position)
            return
        if frame.tag != "tool" and self._due and (self._answered or frame.tag != "option"):
            self._fail(f"{frame.tag} where the result of {self._due[0]['id']} must stand", frame.position)
        if frame.tag == "option":
            if frame.attributes["name"] in self.conversation.once:
                self._fail(f"a second one-shot option {frame.attributes['name']!r}", frame.position)
        elif once:
            self._fail(f"{frame.tag} after the one-shot options, which come last", frame.position)
        elif frame.tag == "tool":
            self._open_result(frame)

    def _open_result(self, frame: _Frame) -> None:
        if not self._due:
            self._fail("a tool result without a call", frame.position)
        due = self._due[0]
        found = call_id(frame.attributes["tool"], 0)[:-1] + frame.attributes["index"]
        if found != due["id"]:
            self._fail(f"the result of {found} where that of {due['id']} must stand", frame.position)

    def closed(self, frame: _Frame) -> None:
        super().closed(frame)
        messages = self.conversation.messages
        if frame.path in ("system", "user"):
            messages.append({"role": frame.tag, "content": frame.content})
        elif frame.path == "assistant":
            messages.append(self.answer)
            self._due, self._answered = list(self.answer.get("tool_calls", ())), False
        elif frame.path == "tool":
            due, self._answered = self._due.pop(0), True
            messages.append({"role": "tool", "content": frame.content, "tool_call_id": due["id"]})
        elif frame.path == "thinking":
            if frame.content:
                self._fail("text in the thinking option", frame.position)
            self.conversation.effort, self._thinking = frame.attributes["effort"], True
        elif frame.path in ("tools", "option"):
            value = arguments_object(f'{{"v":{frame.content}}}')
            if value is None or value.keys() != {"v"}:
                self._fail(f"{frame.tag} holds no JSON: {frame.content[:80]!r}", frame.position)
            if frame.path == "option":
                self.conversation.once[frame.attributes["name"]] = value["v"]
            elif not isinstance(value["v"], list):
                self._fail("tools holds no JSON list", frame.position)
            else:
                self.conversation.tools = value["v"]

    def finish(self) -> Conversation:
        """The conversation.

        Raises:
            XTMLError: if the stream ended inside a message or before all results of a turn.
        """
        if self._stack or self._tag is not None or self._expect_end:
            self._fail("the stream ended inside a message")
        if self._due and self._answered:
            self._fail(f"the stream ended before the result of {self._due[0]['id']}")
        return self.conversation


def parse(symbols: Iterable[Symbol]) -> Conversation:
    """A whole conversation from its symbols.

    Raises:
        XTMLError: for a malformed stream.
    """
    parser = Parser()
    parser.feed(symbols)
    return parser.finish()

"""Lines of chat JSONL as ids with a loss mask, checked one by one before training.

A line is ``{"messages": [...]}`` in OpenAI's form, and optionally ``tools`` (declarations), ``effort`` (low, high or
max; without it thinking is off) and ``once`` (options for the next answer).

Letters: n ids of a conversation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from k3_plugins.feature import FeatureError
from k3_plugins.post_training.sft.tokens import TemplateTokenizer
from k3_plugins.post_training.xtml.conversation import Conversation, ConversationError
from k3_plugins.post_training.xtml.encode import encode

TooLong = Literal["error", "drop"]
_FIELDS = {"messages", "tools", "effort", "once"}
_MESSAGE_FIELDS = {
    "system": {"content"},
    "user": {"content"},
    "assistant": {"content", "reasoning_content", "tool_calls", "weight"},
    "tool": {"content", "tool_call_id"},
}
_SHOWN = 20


@dataclass(frozen=True)
class Sample:
    """One conversation."""

    ids: np.ndarray
    """int32 ``[n]``."""
    train: np.ndarray
    """bool ``[n]``: whether the model is trained to produce the id."""


@dataclass(frozen=True)
class Samples:
    """The conversations of some files."""

    samples: Sequence[Sample]
    dropped: int
    """Conversations that were too long."""


def read(
    files: Sequence[str], tokenizer: TemplateTokenizer, seq_length: int, too_long: TooLong = "error"
) -> Samples:
    """Every conversation.

    Args:
        files: JSONL; empty lines are skipped.
        tokenizer: of the symbols.
        seq_length: a conversation has at most ``seq_length + 1`` ids: the last one is only a label.
        too_long: what happens to longer ones.

    Raises:
        FeatureError: naming file, line and reason of every bad line (the first 20), or a file without conversations.
    """
    samples: list[Sample] = []
    faults: list[str] = []
    dropped = 0
    for file in files:
        before = len(samples) + dropped + len(faults)
        for place, line in _lines(file):
            try:
                sample = convert(line, tokenizer)
                if len(sample.ids) <= seq_length + 1:
                    samples.append(sample)
                elif too_long == "drop":
                    dropped += 1
                else:
                    raise ValueError(
                        f"{len(sample.ids)} ids are more than --seq-length {seq_length} and one; raise it, shorten the "
                        "conversation, or leave out all that are too long with --chat-too-long drop"
                    )
            except ValueError as error:
                faults.append(f"{place}: {error}")
        if len(samples) + dropped + len(faults) == before:
            faults.append(f"{file}: holds no conversation")
    if faults:
        more = [f"... and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        raise FeatureError("\n  ".join(["the conversations cannot be used:", *faults[:_SHOWN], *more]))
    if not samples:
        raise FeatureError(f"all {dropped} conversations are longer than --seq-length {seq_length}; raise it")
    return Samples(samples, dropped)


def _lines(file: str) -> Iterator[tuple[str, str]]:
    """(``file:line``, text) of lines that are not empty; lines count from 1, as an editor shows them."""
    path = Path(file)
    if not path.is_file():
        raise FeatureError(f"--chat-data {file}: there is no such file; correct the path")
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            place = f"{file}:{number}"
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise FeatureError(f"{place}: is not UTF-8 ({error.reason}); convert the file") from error
            if text.strip():
                yield place, text


def convert(line: str, tokenizer: TemplateTokenizer) -> Sample:
    """One line.

    Raises:
        ValueError: with the reason: no JSON, unknown fields, no template form, or nothing to train on.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON ({error})") from error
    if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
        raise ValueError('must be an object with a list "messages"')
    unknown = sorted(record.keys() - _FIELDS)
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}; known are {', '.join(sorted(_FIELDS))}")
    if not all(isinstance(message, dict) for message in record["messages"]):
        raise ValueError("every message must be an object")
    for number, message in enumerate(record["messages"]):
        _check_fields(number, message)
    tools = record.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError('"tools" must be a list of objects, the declarations')
    if not isinstance(record.get("once", {}), dict):
        raise ValueError('"once" must be an object, name to value')
    conversation = Conversation(record["messages"], tools, record.get("effort"), dict(record.get("once", {})))
    try:
        segments = encode(conversation)
    except ConversationError as error:
        raise ValueError(str(error)) from error
    ids: list[int] = []
    train: list[bool] = []
    for segment in segments:
        piece = tokenizer.ids(segment.symbol)
        ids += piece
        train += [segment.train] * len(piece)
    if not any(train):
        raise ValueError("there is nothing to train on: no assistant message with weight 1")
    return Sample(np.array(ids, dtype=np.int32), np.array(train, dtype=bool))


def _check_fields(number: int, message: dict[str, Any]) -> None:
    """Nothing is left out in silence: a field that the template has no place for must be empty (null, 0, "", [])."""
    role = message.get("role")
    known = _MESSAGE_FIELDS.get(role) if isinstance(role, str) else None
    if known is None:  # an unknown role is answered by the template
        return
    for name, value in message.items():
        if name not in known and name != "role" and value:
            raise ValueError(
                f"message {number}: a message of role {role} has no field {name!r} in the template, only"
                f" {', '.join(sorted(known))}; remove it"
            )

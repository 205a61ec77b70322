"""Small conversations of every kind the template knows, as JSONL."""

from __future__ import annotations

import json
from pathlib import Path


def records(count: int = 24) -> list[dict]:
    """Short conversations: plain, with thinking, with parallel calls, with a message that is not trained."""
    made = []
    for i in range(count):
        question = {"role": "user", "content": f"{i} + 1?"}
        if i % 4 == 0:
            made.append({"messages": [question, {"role": "assistant", "content": str(i + 1)}]})
        elif i % 4 == 1:
            answer = {"role": "assistant", "reasoning_content": "add", "content": str(i + 1)}
            made.append({"messages": [{"role": "system", "content": "Count."}, question, answer], "effort": "low"})
        elif i % 4 == 2:
            functions = [{"name": "add", "arguments": json.dumps({"a": i, "b": j})} for j in range(2)]
            calls = [{"id": f"c{j}", "type": "function", "function": call} for j, call in enumerate(functions)]
            made.append(
                {
                    "tools": [{"name": "add"}],
                    "messages": [
                        question,
                        {"role": "assistant", "tool_calls": calls},
                        {"role": "tool", "tool_call_id": "c1", "content": str(i + 1)},
                        {"role": "tool", "tool_call_id": "c0", "content": str(i)},
                        {"role": "assistant", "content": str(i + 1)},
                    ],
                }
            )
        else:
            first = {"role": "assistant", "content": "no", "weight": 0}
            made.append({"messages": [question, first, question, {"role": "assistant", "content": str(i + 1)}]})
    return made


def write(path: Path, lines: list[dict] | None = None) -> Path:
    """A JSONL file."""
    lines = records() if lines is None else lines
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path

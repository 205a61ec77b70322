"""XTML: round trips, streams cut anywhere, the loss mask, and malformed streams."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_plugins.post_training.xtml.conversation import (
    EFFORTS,
    Conversation,
    ConversationError,
    canonical,
    compact,
)
from k3_plugins.post_training.xtml.encode import encode, generation_prompt
from k3_plugins.post_training.xtml.parse import AnswerParser, Parser, XTMLError, parse
from k3_plugins.post_training.xtml.symbols import Special, from_text, quote, unquote

OPEN, SEP, CLOSE, END = Special
# Contents that look like structure must stay contents.
text = st.one_of(st.text(max_size=30), st.sampled_from(["[open]user[sep]", "[close]", '"&amp;', "\n", "[end_of_msg"]))
names = st.one_of(st.text(min_size=1, max_size=8), st.sampled_from(["a", 'q"uote', "amp&", "two words"]))
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
arguments = st.one_of(
    st.dictionaries(st.text(max_size=6), json_values, max_size=4).map(json.dumps),
    st.sampled_from(["[1, 2]", "{broken", "", '"text"', '{"a": 1, "a": 2}', "{\"a\": NaN}", "null"]),
)


@st.composite
def conversations(draw):
    effort = draw(st.one_of(st.none(), st.sampled_from(EFFORTS)))
    messages = []
    for _ in range(draw(st.integers(0, 4))):
        role = draw(st.sampled_from(["system", "user", "assistant"]))
        if role != "assistant":
            messages.append({"role": role, "content": draw(text)})
            continue
        message = {"role": "assistant"}
        if effort is not None and draw(st.booleans()):
            message["reasoning_content"] = draw(text)
        calls = draw(st.lists(st.tuples(names, arguments), max_size=3))
        if not calls or draw(st.booleans()):
            message["content"] = draw(text)
        if calls:
            message["tool_calls"] = [
                {"id": f"x{i}", "type": "function", "function": {"name": name, "arguments": words}}
                for i, (name, words) in enumerate(calls)
            ]
        messages.append(message)
        order = draw(st.permutations(range(len(calls))))
        messages += [{"role": "tool", "tool_call_id": f"x{i}", "content": draw(text)} for i in order]
    tools = draw(st.one_of(st.none(), st.lists(json_values, max_size=2)))
    once = draw(st.dictionaries(names, json_values, max_size=2))
    return Conversation(messages, tools, effort, once)


def symbols(segments):
    return [segment.symbol for segment in segments]


@settings(max_examples=300, deadline=None)
@given(conversations())
def test_round_trip(conversation):
    expected = canonical(conversation)
    assert parse(symbols(encode(conversation))) == expected
    assert canonical(expected) == expected


@settings(max_examples=150, deadline=None)
@given(conversations(), st.randoms(use_true_random=False))
def test_any_cut_of_the_stream_is_the_same_stream(conversation, rng):
    stream = symbols(encode(conversation))
    pieces = []
    for symbol in stream:
        while isinstance(symbol, str) and len(symbol) > 1 and rng.random() < 0.7:
            cut = rng.randrange(1, len(symbol))
            pieces.append(symbol[:cut])
            symbol = symbol[cut:]
        pieces.append(symbol)
        if rng.random() < 0.2:
            pieces.append("")
    parser = Parser()
    for piece in pieces:
        parser.feed([piece])
    assert parser.finish() == parse(stream)


def joined(stream):
    """Neighbouring texts as one."""
    result = []
    for symbol in stream:
        if isinstance(symbol, str) and result and isinstance(result[-1], str):
            result[-1] += symbol
        elif symbol != "":
            result.append(symbol)
    return result


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(list(Special)), st.text("abo[pe]", max_size=5))), st.randoms())
def test_reserved_names_are_found_across_chunks(stream, rng):
    whole = "".join(s.value if isinstance(s, Special) else s for s in stream)
    chunks, rest = [], whole
    while rest:
        cut = rng.randrange(1, min(len(rest), 7) + 1)
        chunks.append(rest[:cut])
        rest = rest[cut:]
    found = joined(from_text(chunks))
    assert found == joined(from_text([whole]))
    if not any("[" in symbol or "]" in symbol for symbol in stream if isinstance(symbol, str)):
        assert found == joined(stream)  # no text that could be part of a name


@given(st.text())
def test_attribute_values(value):
    assert unquote(quote(value)[1:-1]) == value and '"' not in quote(value)[1:-1]


CALL = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo", "days": [1, 2]}'}}
TURN = Conversation(
    [
        {"role": "user", "content": "And Oslo?"},
        {"role": "assistant", "reasoning_content": "", "content": "Let me see.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "x", "content": "rain"},
        {"role": "assistant", "content": "Rain.", "weight": 0},
    ],
    tools=[{"name": "weather"}],
    effort="high",
    once={"format": "text"},
)


def rendered(segments):
    return "".join(s.symbol if isinstance(s.symbol, str) else s.symbol.value for s in segments)


def test_the_form_of_a_turn_and_its_loss_mask():
    segments = encode(TURN)
    assert rendered(segments) == (
        '[open]tools[sep][{"name":"weather"}][close]tools[sep][end_of_msg]'
        '[open]thinking effort="high"[sep][close]thinking[sep][end_of_msg]'
        "[open]user[sep]And Oslo?[close]user[sep][end_of_msg]"
        "[open]assistant[sep][open]think[sep][close]think[sep][open]response[sep]Let me see.[close]response[sep]"
        '[open]tools[sep][open]call tool="weather" index="0"[sep]'
        '[open]arg name="city" type="string"[sep]Oslo[close]arg[sep]'
        '[open]arg name="days" type="json"[sep][1,2][close]arg[sep]'
        "[close]call[sep][close]tools[sep][close]assistant[sep][end_of_msg]"
        '[open]tool tool="weather" index="0"[sep]rain[close]tool[sep][end_of_msg]'
        "[open]assistant[sep][open]think[sep][close]think[sep][open]response[sep]Rain.[close]response[sep]"
        "[close]assistant[sep][end_of_msg]"
        '[open]option name="format"[sep]"text"[close]option[sep][end_of_msg]'
    )
    trained = rendered([segment for segment in segments if segment.train])
    whole = rendered(segments)
    first = whole.index("[open]assistant[sep]") + len("[open]assistant[sep]")
    assert trained == whole[first : whole.index('[open]tool tool="weather"')]


def test_the_fallback_is_input_only():
    call = {**CALL, "function": {"name": "weather", "arguments": "{broken"}}
    segments = encode(Conversation([{"role": "assistant", "tool_calls": [call]}]))
    block = "[open]json[sep]{broken[close]json[sep]"
    assert block in rendered(segments)
    assert "json" not in rendered([segment for segment in segments if segment.train])
    stream = symbols(segments)
    header = symbols(generation_prompt(Conversation([])))
    assert stream[: len(header)] == header
    with pytest.raises(XTMLError, match="a json block in a generated answer"):
        AnswerParser(thinking=False).feed(stream[len(header) :])


def test_an_answer_as_it_is_generated():
    prompt = Conversation(TURN.messages[:1], TURN.tools, TURN.effort)
    header = symbols(generation_prompt(prompt))
    stream = symbols(encode(Conversation(TURN.messages[:2], TURN.tools, TURN.effort)))
    assert stream[: len(header)] == header
    parser = AnswerParser(thinking=True)
    seen = []
    for symbol in stream[len(header) :]:
        for piece in symbol if isinstance(symbol, str) else [symbol]:
            parser.feed([piece])
            seen.append(parser.partial().get("content"))
    assert "Let m" in seen
    assert parser.finish() == canonical(TURN).messages[1]
    with pytest.raises(XTMLError, match="after .end_of_msg."):
        parser.feed([OPEN])


def top(tag, *inside, close=None):
    return [OPEN, tag, SEP, *inside, CLOSE, close or tag.split()[0], SEP, END]


@pytest.mark.parametrize(
    ("stream", "position", "reason"),
    [
        (["hello"], 0, "text between messages"),
        ([OPEN, "user", SEP, "hi"], 8, "the stream ended inside a message"),
        (top("user", "hi", close="system"), 8, "[close]system[sep] where user is open"),
        (top("robot", "hi"), 0, "element robot between messages"),
        (top("user", OPEN, "arg", SEP), 6, "element arg in user; allowed: text only"),
        (top("user x", "hi"), 0, "is no tag"),
        (top('user a="b"', "hi"), 0, "attributes ['a'], it needs []"),
        (top('thinking effort="some"'), 0, "effort 'some'"),
        (top("user", "hi") + top("tools", "[]"), 15, "global option tools after the first message"),
        (top('option name="a"', "1") + top("user", "hi"), 27, "user after the one-shot options"),
        (top('option name="a"', "{") + [], 0, "option holds no JSON"),
        (top("assistant"), 0, "without a response or tools channel"),
        (top('tool tool="w" index="0"', "x"), 0, "a tool result without a call"),
        ([SEP], 0, "[sep] between messages without a tag"),
        ([CLOSE], 0, "[close] between messages"),
        ([OPEN, OPEN], 1, "[open] inside a tag"),
        ([OPEN, "user", SEP, END], 6, "[end_of_msg] in user"),
        ([*top("user", "hi")[:-1], "x"], 14, "text where [end_of_msg] must stand"),
    ],
)
def test_malformed_streams(stream, position, reason):
    with pytest.raises(XTMLError) as caught:
        parse(stream)
    assert reason in caught.value.reason and caught.value.position == position, caught.value


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        ([OPEN, "response", SEP, CLOSE, "response", SEP], "without a think channel"),
        (top("think")[:-1] * 2, "channel think after think"),
        (top("think")[:-1] + top("tools")[:-1], "a tools channel without a call"),
        (top("think")[:-1] + [OPEN, "tools", SEP, *top('call tool="w" index="1"')[:-1]], "call index '1' must be 0"),
        (
            top("think")[:-1]
            + [OPEN, "tools", SEP, OPEN, 'call tool="w" index="0"', SEP]
            + top('arg name="a" type="json"', '"text"')[:-1],
            "is a string, which has type",
        ),
        (
            top("think")[:-1]
            + [OPEN, "tools", SEP, OPEN, 'call tool="w" index="0"', SEP]
            + top('arg name="a" type="json"', '1},"v":{"b":2')[:-1],
            "is no JSON value",
        ),
    ],
)
def test_malformed_answers(inside, reason):
    with pytest.raises(XTMLError, match=reason):
        AnswerParser(thinking=True).feed(inside)


@pytest.mark.parametrize(
    ("messages", "effort", "reason"),
    [
        ([{"role": "robot"}], None, "role 'robot'"),
        ([{"role": "user"}], None, "content must be a string"),
        ([{"role": "assistant", "content": "a", "reasoning_content": "b"}], None, "without thinking"),
        ([{"role": "assistant"}], None, "needs content or tool_calls"),
        ([{"role": "assistant", "tool_calls": [CALL]}, {"role": "user", "content": ""}], None, "no result for"),
        ([{"role": "tool", "tool_call_id": "x", "content": ""}], None, "none of the calls"),
        ([{"role": "assistant", "content": "", "weight": 2}], None, "weight 2"),
        ([{"role": "assistant", "tool_calls": [CALL, CALL]}], None, "two calls with one id"),
        ([{"role": "tool", "tool_call_id": ["x"], "content": ""}], None, "none of the calls"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "id": ["x"]}]}], None, "id of call 0 must be a string"),
        ([{"role": "assistant", "tool_calls": "f"}], None, "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": ["f"]}], None, "call 0 needs function.name"),
        ([{"role": "assistant", "tool_calls": [{"function": "f"}]}], None, "call 0 needs function.name"),
        ([], "some", "thinking effort 'some'"),
    ],
)
def test_conversations_without_a_form(messages, effort, reason):
    with pytest.raises(ConversationError, match=reason):
        encode(Conversation(messages, effort=effort))


def test_fifty_thousand_mutated_streams_end_in_a_conversation_or_an_error():
    """Deleted, doubled, swapped, foreign symbols: no crash, no hang, and nothing accepted that is not written alike."""
    rng = random.Random(0)
    base = symbols(encode(TURN))
    alphabet = [*Special, "tools", 'call tool="w" index="0"', "assistant", "x", '{"a":1}', '"', "&"]
    accepted = 0
    for _ in range(50_000):
        stream = list(base)
        for _ in range(rng.randrange(1, 4)):
            if not stream:
                break
            at = rng.randrange(len(stream))
            action = rng.randrange(5)
            if action == 0:
                del stream[at]
            elif action == 1:
                stream.insert(at, stream[at])
            elif action == 2:
                stream[at] = rng.choice(alphabet)
            elif action == 3:
                other = rng.randrange(len(stream))
                stream[at], stream[other] = stream[other], stream[at]
            else:
                stream = stream[:at] or stream
        try:
            conversation = parse(stream)
        except XTMLError as error:
            assert 0 <= error.position <= sum(1 if isinstance(s, Special) else len(s) for s in stream)
            continue
        accepted += 1
        assert parse(symbols(encode(conversation))) == conversation
    assert 0 < accepted < 10_000


def test_compact_json_keeps_characters():
    assert compact({"a": [1, "ü"]}) == '{"a":[1,"ü"]}'

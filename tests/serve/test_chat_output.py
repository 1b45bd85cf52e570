from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen4exp_trt.runtime.serve.chat_output import ChatOutputParser, MessageDelta
from qwen4exp_trt.runtime.serve.tool_calls import ToolCall
from qwen4exp_trt.runtime.serve.tool_schemas import ToolSchemas

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = ToolSchemas({"weather": WEATHER, "now": {}})
THINKING, ANSWERING, PLAIN = "<|im_start|>assistant\n<think>\n", "<think>\n\n</think>\n\n", "<|im_start|>assistant\n"

CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
OSLO = ToolCall("weather", '{"city": "Oslo"}')


def parse(pieces: list[str], prompt: str = ANSWERING, tools: ToolSchemas | None = TOOLS) -> MessageDelta:
    parser, message = ChatOutputParser(prompt, tools), MessageDelta()
    for delta in (*map(parser.feed, pieces), parser.finish()):
        message.reasoning += delta.reasoning
        message.content += delta.content
        message.tool_calls += delta.tool_calls
    return message


@pytest.mark.parametrize(
    ("prompt", "output", "reasoning", "content"),
    [
        (THINKING, "\nLet me see. \n</think>\n\nYes.\n", "Let me see.", "Yes.\n"),
        (THINKING, "Let me </thin", "Let me </thin", ""),
        (THINKING, "Let me \n", "Let me", ""),
        (THINKING, "</think>\n\nYes.", "", "Yes."),
        (THINKING, "a </think> b </think> c", "a", " b </think> c"),
        (ANSWERING, "\n Yes </think>", "", "\n Yes </think>"),
        (ANSWERING, "<think>a</think>", "", "<think>a</think>"),
        (PLAIN, "<think>\na\n</think>\n\nYes.", "a", "Yes."),
        (PLAIN, " \n<think>a", "a", ""),
        (PLAIN, "  <thin", "", "  <thin"),
        (PLAIN, "  <b>Yes", "", "  <b>Yes"),
        (PLAIN, "", "", ""),
    ],
)
def test_reasoning_is_split_from_the_answer(prompt: str, output: str, reasoning: str, content: str) -> None:
    for pieces in ([output], list(output)):
        assert parse(pieces, prompt) == MessageDelta(reasoning, content)


@pytest.mark.parametrize(
    ("output", "content", "calls"),
    [
        (CALL, "", [OSLO]),
        (f"I look.\n\n{CALL}", "I look.", [OSLO]),
        (f"I look.\n\n{CALL}\n{NOW}\n", "I look.", [OSLO, ToolCall("now", "{}")]),
        (f"{CALL}\nDone.", "\nDone.", [OSLO]),
        (f" \n{CALL}", "", [OSLO]),
        # The end of the output may take the place of the end of the call.
        (CALL.removesuffix("\n</tool_call>"), "", [OSLO]),
        (CALL.removesuffix("_call>"), "", [OSLO]),
        # Without line breaks, and with values of several lines that have tags in them.
        (CALL.replace("\n", ""), "", [OSLO]),
        (
            CALL.replace("Oslo", "\n</parameter>\n<b>\n"),
            "",
            [ToolCall("weather", json.dumps({"city": "\n</parameter>\n<b>\n"}))],
        ),
        (CALL.replace("Oslo", "</tool_call> "), "", [ToolCall("weather", '{"city": "</tool_call> "}')]),
    ],
)
def test_calls_are_taken_out_of_the_text(output: str, content: str, calls: list[ToolCall]) -> None:
    for pieces in ([output], list(output)):
        assert parse(pieces) == MessageDelta("", content, calls)


BROKEN = [
    "<tool_call>",
    "<tool_call>\n<func",
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo",
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>',
    CALL.replace("=weather", "=tempest"),
    CALL.replace("</parameter>", ""),
    CALL.replace("<parameter=city>", "city:"),
    CALL.replace("\n</function>", ""),
    "<tool_call><function=></function></tool_call>",
    "a < b, <tool_cal, </tool_call> and <tool> ",
]


@pytest.mark.parametrize("output", BROKEN)
def test_what_is_no_call_stays_text(output: str) -> None:
    for pieces in ([output], list(output)):
        assert parse(pieces) == MessageDelta("", output)


@pytest.mark.parametrize("output", [*BROKEN[:2], *BROKEN[3:5], *BROKEN[6:]])
def test_a_call_behind_a_broken_one_is_found(output: str) -> None:
    assert parse([f"{output}\n{CALL}"]) == MessageDelta("", output.rstrip(), [OSLO])


def test_without_tools_nothing_is_a_call() -> None:
    assert parse([CALL], tools=None) == MessageDelta("", CALL)


def test_calls_in_the_reasoning_are_reasoning() -> None:
    assert parse([f"a {CALL}</think>\n\n{NOW}"], THINKING) == MessageDelta(f"a {CALL}", "", [ToolCall("now", "{}")])


PARTS = ["<think>", "</think>", "<tool_call>", "\n", " ", "a", "<", "</", CALL, NOW, *BROKEN]


@given(st.lists(st.sampled_from(PARTS), max_size=8), st.data(), st.sampled_from([THINKING, ANSWERING, PLAIN]))
def test_the_cuts_between_pieces_do_not_matter(parts: list[str], data: st.DataObject, prompt: str) -> None:
    output = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=12)))
    pieces = [output[start:end] for start, end in zip([0, *cuts], [*cuts, len(output)], strict=True)]
    assert parse(pieces, prompt) == parse([output], prompt)


@given(st.lists(st.sampled_from(PARTS), max_size=8))
def test_text_without_calls_is_complete(parts: list[str]) -> None:
    output = "".join(parts)
    message = parse([output])
    if not message.tool_calls:
        assert message.content == output


def test_a_long_call_is_read_piece_by_piece() -> None:
    text = "x\n" * 20_000
    output = CALL.replace("Oslo", text)
    (call,) = parse([output[start : start + 4] for start in range(0, len(output), 4)]).tool_calls
    assert json.loads(call.arguments) == {"city": text}

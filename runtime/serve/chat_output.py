"""The parts of an assistant's message in a model's output: reasoning, content and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from qwen4exp_trt.runtime.serve.reasoning import ReasoningSplitter
from qwen4exp_trt.runtime.serve.tool_calls import ToolCall, ToolCallSplitter, ToolText
from qwen4exp_trt.runtime.serve.tool_schemas import ToolSchemas


@dataclass
class MessageDelta:
    """What a piece of output added to the message."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


class ChatOutputParser:
    """Reads an output piece by piece; the deltas joined are the message, however the output was cut.

    ``prompt``: the rendered chat, which may have opened the reasoning. ``tools``: the functions that may be called;
    with None nothing is read as a call.
    """

    def __init__(self, prompt: str, tools: ToolSchemas | None) -> None:
        self._reasoning = ReasoningSplitter(prompt)
        self._tools = None if tools is None else ToolCallSplitter(tools)
        self.starts_with_reasoning = self._reasoning.starts_inside
        """None: the prompt leaves it to the output."""

    def feed(self, text: str) -> MessageDelta:
        """Take the next piece of the output."""
        reasoning, answer = self._reasoning.feed(text)
        found = self._tools.feed(answer) if self._tools else ToolText(answer)
        return MessageDelta(reasoning, found.text, found.calls)

    def finish(self) -> MessageDelta:
        """The output has ended: what was held back."""
        reasoning, answer = self._reasoning.finish()
        if self._tools is None:
            return MessageDelta(reasoning, answer)
        last, end = self._tools.feed(answer), self._tools.finish()
        return MessageDelta(reasoning, last.text + end.text, last.calls + end.calls)

"""Finds tool calls in a model's output, while it comes.

The chat template teaches the model this format, with strings as they are and other values as JSON::

    <tool_call>
    <function=NAME>
    <parameter=PARAMETER>
    VALUE
    </parameter>
    </function>
    </tool_call>
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from qwen4exp_trt.runtime.serve.reasoning import num_undecided
from qwen4exp_trt.runtime.serve.tool_schemas import ToolSchemas

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = "<function="
_HEAD = re.compile(r"\s*<function=([^<>\n]+)>")
_END = re.compile(r"</function>\s*</tool_call>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?")
_PARAMETER_END = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>))")
_FUNCTION_END = re.compile(r"\s*</function>\s*")
_MAX_HEAD_LENGTH = 512


@dataclass(frozen=True)
class ToolCall:
    """``arguments``: the text of a JSON object."""

    name: str
    arguments: str


@dataclass
class ToolText:
    """What a piece of output added: text outside of calls, and calls that it completed."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class ToolCallSplitter:
    """Complete calls of offered functions are taken out of the text; the cuts between pieces do not matter.

    Whatever is no such call, because its function was not offered, its form is broken or its end is missing, stays text
    and is complete. White space before and after calls belongs to the template, and is dropped; text without calls
    stays as it is.
    """

    def __init__(self, schemas: ToolSchemas) -> None:
        self._schemas = schemas
        self._buffer = ""
        self._is_in_call = False
        self._num_searched = 0
        self._white_space = ""
        self._num_calls = 0

    def feed(self, text: str) -> ToolText:
        """Take the next piece of the output."""
        self._buffer += text
        found = ToolText()
        while self._read_call(found) if self._is_in_call else self._read_text(found):
            pass
        return found

    def finish(self) -> ToolText:
        """The output has ended: what was held back. A call may lack the end of its tags behind ``</function>``."""
        found = ToolText()
        if self._is_in_call:
            # No call in the buffer has all of its end, or it would have been taken.
            body, end, rest = self._buffer.rpartition("</function>")
            call = self._parse(body + end) if end and CLOSE.startswith(rest.strip()) else None
            if call is not None:
                self._take(call, found)
                self._buffer = ""
            else:
                self._reject(found)
        self._add_text(self._buffer, found)
        self._buffer = ""
        if not self._num_calls:
            found.text += self._white_space
        return found

    def _read_text(self, found: ToolText) -> bool:
        """Take text up to the next call; whether there is one."""
        before, tag, after = self._buffer.partition(OPEN)
        num_held = 0 if tag else num_undecided(before, OPEN)
        self._add_text(before[: len(before) - num_held], found)
        self._buffer = after if tag else before[len(before) - num_held :]
        self._is_in_call, self._num_searched = bool(tag), 0
        return bool(tag)

    def _read_call(self, found: ToolText) -> bool:
        """Take the call that the buffer begins with or reject it; False if that is not known yet."""
        head = _HEAD.match(self._buffer)
        if head is None or head[1] not in self._schemas:
            if head is None and self._may_become_head():
                return False
            self._reject(found)
            return True
        end = _END.search(self._buffer, self._num_searched)
        if end is None:
            # The end may be cut; its tags and the white space between are far shorter than this.
            self._num_searched = max(0, len(self._buffer) - _MAX_HEAD_LENGTH)
            return False
        call = self._parse(self._buffer[: end.start()] + "</function>")
        if call is None:
            self._reject(found)
            return True
        self._buffer = self._buffer[end.end() :]
        self._take(call, found)
        return True

    def _may_become_head(self) -> bool:
        start = self._buffer.lstrip()
        if len(start) <= len(_FUNCTION):
            return _FUNCTION.startswith(start)
        name = start.removeprefix(_FUNCTION)
        return name != start and not {"<", ">", "\n"} & set(name) and len(name) < _MAX_HEAD_LENGTH

    def _parse(self, body: str) -> ToolCall | None:
        """The call ``<function=...> ... </function>``; None if it has not that form or was not offered."""
        head = _HEAD.match(body)
        if head is None or head[1] not in self._schemas:
            return None
        place, values = head.end(), dict[str, str]()
        while parameter := _PARAMETER.match(body, place):
            end = _PARAMETER_END.search(body, parameter.end())
            if end is None:
                return None
            values[parameter[1]] = body[parameter.end() : end.start()]
            place = end.end()
        if not _FUNCTION_END.fullmatch(body, place):
            return None
        return ToolCall(head[1], self._schemas.arguments(head[1], values))

    def _take(self, call: ToolCall, found: ToolText) -> None:
        found.calls.append(call)
        self._num_calls += 1
        self._white_space = ""
        self._is_in_call = False

    def _reject(self, found: ToolText) -> None:
        """The tag that began the call is text; what follows it is read again as text, and may hold a call."""
        self._add_text(OPEN, found)
        self._is_in_call = False

    def _add_text(self, text: str, found: ToolText) -> None:
        text = self._white_space + text
        shown = text.rstrip()
        self._white_space = text[len(shown) :]
        found.text += shown

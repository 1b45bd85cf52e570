"""``POST /v1/chat/completions``: answers a conversation."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from qwen4exp_trt.runtime.async_llm import AsyncLLM
from qwen4exp_trt.runtime.llm import Prompt
from qwen4exp_trt.runtime.outputs import StreamChunk
from qwen4exp_trt.runtime.serve.chat_output import ChatOutputParser, MessageDelta
from qwen4exp_trt.runtime.serve.generation import Usage, check_not_aborted, generate_all, sampling_params
from qwen4exp_trt.runtime.serve.logprobs import chat_logprobs, shown_logprobs
from qwen4exp_trt.runtime.serve.protocol import ChatRequest
from qwen4exp_trt.runtime.serve.reasoning import CLOSE
from qwen4exp_trt.runtime.serve.tool_calls import ToolCall
from qwen4exp_trt.runtime.serve.tool_schemas import ToolSchemas


@dataclass
class _Piece:
    """What a chunk of the output added to the answer; ``finish_reason`` comes with the last one."""

    message: MessageDelta
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


class ChatCompletion:
    """One request and its answer, which is read once: by `events` or by `body`."""

    def __init__(self, llm: AsyncLLM, request: ChatRequest, model: str) -> None:
        self._llm, self._request = llm, request
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created, self._model = int(time.time()), model
        self._usage = Usage()
        self._num_calls = 0
        self._reasoning_end: int | None = None
        """The token that will end the reasoning, while the output is inside of it."""

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer of a stream, event by event."""
        head = self._head("chat.completion.chunk")
        usage = {"usage": None} if self._request.includes_usage else {}

        def event(
            delta: dict[str, Any], logprobs: list[Any] | None = None, reason: str | None = None
        ) -> dict[str, Any]:
            found = {"content": logprobs} if logprobs else None
            choice = {"index": 0, "delta": delta, "logprobs": found, "finish_reason": reason}
            return {**head, "choices": [choice], **usage}

        is_first, logprobs = True, []
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                if is_first:
                    yield event({"role": "assistant", "content": ""})
                    is_first = False
                # Those of text that is held back come with the next text.
                logprobs += piece.logprobs
                for delta in self._deltas(piece.message):
                    yield event(delta, logprobs)
                    logprobs = []
                if piece.finish_reason is not None:
                    yield event({}, logprobs, piece.finish_reason)
        if self._request.includes_usage:
            yield {**head, "choices": [], "usage": self._usage.body()}

    async def body(self) -> dict[str, Any]:
        """The answer as a whole."""
        reasoning, content, calls, logprobs, finish_reason = [], [], [], [], None
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                reasoning.append(piece.message.reasoning)
                content.append(piece.message.content)
                calls += [_tool_call(call) for call in piece.message.tool_calls]
                logprobs += piece.logprobs
                finish_reason = piece.finish_reason
        message: dict[str, Any] = {"role": "assistant", "content": "".join(content)}
        if any(reasoning):
            message["reasoning_content"] = "".join(reasoning)
        if calls:
            message["tool_calls"] = calls
        if not message["content"] and len(message) > 2:
            message["content"] = None
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": logprobs} if self._request.logprobs else None,
            "finish_reason": finish_reason,
        }
        return {**self._head("chat.completion"), "choices": [choice], "usage": self._usage.body()}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    async def _pieces(self) -> AsyncGenerator[_Piece, None]:
        request, llm = self._request, self._llm
        max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        num_top = (request.top_logprobs or 0) if request.logprobs else None
        params = sampling_params(request, llm.default_sampling_params, max_tokens, num_top)
        tools = request.offered_tools()
        prompt = await asyncio.to_thread(self._render, tools)
        prompts: list[Prompt] = [{"prompt": prompt, "add_special_tokens": False}]
        parser = ChatOutputParser(prompt, _schemas(tools) if tools else None)
        self._start_reasoning(parser.starts_with_reasoning)
        is_stopped = False
        async with aclosing(generate_all(llm, prompts, params, self._id, request.priority or 0)) as chunks:
            async for _, chunk in chunks:
                self._usage.add(chunk)
                if is_stopped:
                    continue
                check_not_aborted(chunk)
                piece = self._piece(parser, chunk, num_top)
                if piece.message.tool_calls and request.parallel_tool_calls is False:
                    # The answer ends with its first call. The last chunk, which tells of cached tokens, still comes.
                    del piece.message.tool_calls[1:]
                    self._num_calls, is_stopped, piece.finish_reason = 1, True, None
                    llm.abort(f"{self._id}-0")
                yield piece
        if is_stopped:
            yield _Piece(MessageDelta(), finish_reason="tool_calls")

    def _render(self, tools: list[dict[str, Any]]) -> str:
        messages = [message.for_template() for message in self._request.messages]
        return self._llm.render_chat(messages, tools or None, **self._request.template_variables())

    def _piece(self, parser: ChatOutputParser, chunk: StreamChunk, num_top: int | None) -> _Piece:
        message, reason = parser.feed(chunk.text), chunk.finish_reason
        if reason is not None:
            end = parser.finish()
            message = MessageDelta(
                message.reasoning + end.reasoning, message.content + end.content, message.tool_calls + end.tool_calls
            )
        self._num_calls += len(message.tool_calls)
        self._count_reasoning(chunk)
        tokenizer = self._llm.tokenizer
        assert tokenizer is not None, "without a tokenizer no chat is rendered"
        logprobs = [] if num_top is None else chat_logprobs(shown_logprobs(chunk), num_top, tokenizer)
        return _Piece(message, logprobs, "tool_calls" if reason == "stop" and self._num_calls else reason)

    def _start_reasoning(self, starts_with_reasoning: bool | None) -> None:
        close = self._llm.tokenizer.encode(CLOSE, add_special_tokens=False) if self._llm.tokenizer else []
        if starts_with_reasoning is not None and len(close) == 1:
            self._usage.reasoning_tokens = 0
            self._reasoning_end = close[0] if starts_with_reasoning else None

    def _count_reasoning(self, chunk: StreamChunk) -> None:
        if self._usage.reasoning_tokens is None or self._reasoning_end is None:
            return
        is_over = self._reasoning_end in chunk.token_ids
        self._usage.reasoning_tokens += (
            chunk.token_ids.index(self._reasoning_end) + 1 if is_over else len(chunk.token_ids)
        )
        if is_over:
            self._reasoning_end = None

    def _deltas(self, message: MessageDelta) -> Iterator[dict[str, Any]]:
        if message.reasoning:
            yield {"reasoning_content": message.reasoning}
        if message.content:
            yield {"content": message.content}
        for index, call in enumerate(message.tool_calls, start=self._num_calls - len(message.tool_calls)):
            yield {"tool_calls": [{"index": index, **_tool_call(call)}]}


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _schemas(tools: list[dict[str, Any]]) -> ToolSchemas:
    functions = [tool["function"] for tool in tools]
    return ToolSchemas({function["name"]: function.get("parameters") or {} for function in functions})

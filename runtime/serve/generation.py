"""From a request's fields to the engine, and back to counts of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from qwen4exp_trt.runtime.async_llm import AsyncLLM
from qwen4exp_trt.runtime.llm import Prompt
from qwen4exp_trt.runtime.outputs import StreamChunk
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.serve.api_errors import unavailable
from qwen4exp_trt.runtime.serve.protocol import GenerationRequest


@dataclass
class Usage:
    """Counts of tokens. ``reasoning_tokens`` is None where reasoning cannot be told from the rest."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None

    def add(self, chunk: StreamChunk) -> None:
        """Count a chunk; the counts are complete with the last one of each prompt."""
        self.completion_tokens += len(chunk.token_ids)
        if chunk.metrics is not None:
            self.prompt_tokens += len(chunk.prompt_token_ids)
            self.cached_tokens += chunk.metrics.num_cached_tokens

    def body(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        body: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            body["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return body


def sampling_params(
    request: GenerationRequest, defaults: SamplingParams, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """``defaults`` with what the request gives. Raises `RequestError` for a value that is not allowed."""
    given = {name: value for name in request.SAMPLING if (value := getattr(request, name)) is not None}
    return replace(defaults, **given, max_tokens=max_tokens, logprobs=logprobs)


async def generate_all(
    llm: AsyncLLM, prompts: Sequence[Prompt], params: SamplingParams, response_id: str, priority: int
) -> AsyncGenerator[tuple[int, StreamChunk], None]:
    """The chunks of all prompts as they come, each with the index of its prompt.

    The requests are ``{response_id}-{index}`` to the engine. Closing the generator aborts what is left of them.
    """

    def start(index: int) -> AsyncGenerator[StreamChunk, None]:
        return llm.generate(prompts[index], params, request_id=f"{response_id}-{index}", priority=priority)

    if len(prompts) == 1:
        async with aclosing(start(0)) as stream:
            async for chunk in stream:
                yield 0, chunk
        return
    # One place: a reader that is slow makes the engine merge chunks, and no queue grows.
    queue: asyncio.Queue[tuple[int, StreamChunk | BaseException]] = asyncio.Queue(maxsize=1)

    async def forward(index: int, stream: AsyncIterator[StreamChunk]) -> None:
        try:
            async for chunk in stream:
                await queue.put((index, chunk))
        except Exception as error:
            await queue.put((index, error))

    streams = [start(index) for index in range(len(prompts))]
    tasks = [asyncio.create_task(forward(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            index, chunk = await queue.get()
            if isinstance(chunk, BaseException):
                raise chunk
            num_open -= chunk.finish_reason is not None
            yield index, chunk
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


def check_not_aborted(chunk: StreamChunk) -> None:
    """Raises `ApiError` for a chunk with which the engine gave a request up."""
    if chunk.finish_reason == "abort":
        raise unavailable("the server is shutting down and has ended the request")

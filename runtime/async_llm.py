"""`AsyncLLM`: the generation API for asyncio."""

from __future__ import annotations

import asyncio
import uuid
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from qwen4exp_trt.errors import EngineError, RequestError
from qwen4exp_trt.runtime.engine_thread import EngineThread, OpenRequest
from qwen4exp_trt.runtime.llm import LLM, Prompt
from qwen4exp_trt.runtime.metrics import Metric
from qwen4exp_trt.runtime.outputs import RequestOutput, StreamChunk
from qwen4exp_trt.runtime.sampling_params import SamplingParams


class AsyncLLM:
    """Generates text from a bundle for any number of asyncio tasks, in one event loop or several.

    ``options`` are those of `LLM`. Loading takes as long as that of `LLM` does. A thread of its own runs the steps, in
    which all open requests share. ``max_waiting`` bounds the requests beyond those that can run at a time; one more
    raises `QueueFullError`.

    A consumer that goes away (its task is cancelled, its generator closed) ends its request, and the memory is free
    before the next step. What goes wrong with a request is raised to its own consumer: `RequestError` by the first
    item for one that cannot be served, `DroppedError` for one that was dropped (unusable logits, a failed step). A step
    that fails ends the requests that it ran, and the others go on; if the GPU is lost all end with `EngineError`.
    """

    def __init__(self, bundle: str | Path, *, max_waiting: int | None = None, **options: Any) -> None:
        if max_waiting is not None and (not isinstance(max_waiting, int) or max_waiting < 0):
            raise RequestError(
                f"max_waiting is {max_waiting!r}; None (no limit) or an integer of at least 0 was expected"
            )
        self._llm = LLM(bundle, **options)
        self.manifest, self.tokenizer = self._llm.manifest, self._llm.tokenizer
        self.default_sampling_params = self._llm.default_sampling_params
        self.max_num_seqs = self._llm.max_num_seqs
        max_open = None if max_waiting is None else max_waiting + self.max_num_seqs
        self._engine = EngineThread(self._llm.core, max_open)
        # At the interpreter's exit as well, before it takes the thread's modules away.
        self._close = weakref.finalize(self, self._engine.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    @property
    def error(self) -> EngineError | None:
        """Why no more requests are taken: the engine is closed or has failed."""
        return self._engine.error

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[StreamChunk, None]:
        """Complete a prompt piece by piece: each chunk has what is new since the one before.

        A consumer that is slower than the engine gets the output of several steps in one chunk. Of waiting requests
        those with the lowest ``priority`` run first. ``request_id`` is for `abort`, and must be no open request's.
        """
        async with self._open(prompt, params, request_id, priority) as request:
            while True:
                chunk = await request.next_chunk()
                yield chunk
                if chunk.finish_reason is not None:
                    return

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> RequestOutput:
        """Complete a prompt and return the whole result. For the arguments see `generate`."""
        async with self._open(prompt, params, request_id, priority) as request:
            while (chunk := await request.next_chunk()).finish_reason is None:
                pass
            # The engine is done with the sequence, so it changes no more.
            return request.sequence.request_output(chunk.finish_reason)

    def abort(self, request_id: str) -> bool:
        """End an open request; its last chunk has the finish reason ``abort``. False if there is none of that id.

        Any thread may call it.
        """
        return self._engine.abort_id(request_id)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        **template_variables: Any,
    ) -> str:
        """The prompt text of a conversation: see `LLM.render_chat`."""
        return self._llm.render_chat(messages, tools, enable_thinking, **template_variables)

    def metrics(self) -> list[Metric]:
        """What Prometheus asks for. Any thread may call it; it never waits for a step."""
        return self._llm.core.metrics.collect()

    async def close(self, timeout: float = 0.0) -> None:
        """Take no more requests, let those that are open go on for ``timeout`` seconds, and end the others.

        Those get a last chunk with the finish reason ``abort``.
        """
        await asyncio.to_thread(self._engine.close, timeout)
        await asyncio.to_thread(self._llm.release)
        self._close.detach()

    @asynccontextmanager
    async def _open(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None, priority: int
    ) -> AsyncGenerator[OpenRequest, None]:
        own_id = uuid.uuid4().hex if request_id is None else request_id
        own_params = self.default_sampling_params if params is None else params
        # Not in the event loop: tokenizing a long prompt takes a while.
        sequence = await asyncio.to_thread(self._llm.make_sequence, prompt, own_params, own_id, priority)
        request = self._engine.submit(sequence)
        try:
            yield request
        finally:
            self._engine.abort(request)

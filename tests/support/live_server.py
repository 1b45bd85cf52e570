"""A live server in a thread, on a port of its own, and clients of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from qwen4exp_trt.runtime import LLM
from qwen4exp_trt.runtime.async_llm import AsyncLLM
from qwen4exp_trt.runtime.serve.app import ServerOptions, make_app
from qwen4exp_trt.runtime.serve.server import StopSignal, bound_socket, serve, url_of

MODEL = "demo"
PROMPT = "They came to the"


@dataclass(frozen=True)
class LiveServer:
    url: str
    llm: AsyncLLM

    def openai(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60, **kwargs)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=60, **kwargs)


@contextmanager
def live_server(llm: Any, **options: Any) -> Iterator[LiveServer]:
    """Serves ``llm`` inside the block, and closes it then."""
    values = {"model_name": MODEL, "api_key": None, "max_open": 64, "max_body_bytes": 1 << 20} | options
    ready, stop = threading.Event(), StopSignal()
    loop = asyncio.new_event_loop()
    with bound_socket("127.0.0.1", 0) as sock:
        running = serve(llm, make_app(llm, ServerOptions(**values)), sock, 1, ready.set, stop)
        thread = threading.Thread(target=loop.run_until_complete, args=(running,))
        thread.start()
        try:
            assert ready.wait(20)
            yield LiveServer(url_of(sock), llm)
        finally:
            loop.call_soon_threadsafe(stop.say)
            thread.join(20)
            assert not thread.is_alive()
            loop.close()


def greedy(llm: LLM, prompt: Any, **params: Any) -> Any:
    (result,) = llm.generate(prompt, replace(llm.default_sampling_params, temperature=0.0, **params))
    return result


def wait_until_idle(server: LiveServer) -> None:
    deadline = time.monotonic() + 10
    while metric(server, "qwen4exp_num_requests_running") + metric(server, "qwen4exp_num_requests_waiting"):
        assert time.monotonic() < deadline, "requests are still open"
        time.sleep(0.02)


def metric(server: LiveServer, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(server.get("/metrics").text)
    found = [s.value for family in families for s in family.samples if s.name == name and s.labels == labels]
    return found[0] if found else 0.0

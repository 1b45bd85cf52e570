"""A live server among its clients: those that leave, too many of them, its metrics, its command, its end."""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from live_server import MODEL, PROMPT, LiveServer, greedy, live_server, metric, wait_until_idle

from qwen4exp_trt.runtime import LLM, AsyncLLM
from qwen4exp_trt.runtime.sequence import Sequence

ROOT = Path(__file__).parents[2]


def test_a_client_that_leaves_ends_its_request(server: LiveServer) -> None:
    aborted = metric(server, "qwen4exp_request_success_total", finished_reason="abort")
    body = {"prompt": PROMPT, "max_tokens": 700, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}) as response:
        assert next(response.iter_lines()).startswith("data: {")
    wait_until_idle(server)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.3)
    wait_until_idle(server)
    assert metric(server, "qwen4exp_request_success_total", finished_reason="abort") == aborted + 2
    scheduler = server.llm._llm.core.scheduler
    assert scheduler.num_unfinished == 0
    assert scheduler.num_free_slots == server.llm.manifest.limits.num_slots


def test_requests_run_side_by_side_and_too_many_are_turned_away(server: LiveServer, llm: LLM) -> None:
    expected = greedy(llm, PROMPT, max_tokens=5).outputs[0].text

    async def ask(client: openai.AsyncOpenAI) -> str | int:
        try:
            result = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, temperature=0)
        except openai.RateLimitError as error:
            assert error.response.headers["retry-after"] == "1"
            return error.status_code
        return result.choices[0].text

    async def ask_all() -> list[str | int]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client) for _ in range(9)))

    answers = asyncio.run(ask_all())
    capacity = 3 + server.llm.max_num_seqs
    assert answers.count(expected) == capacity and answers.count(429) == 9 - capacity
    wait_until_idle(server)


def test_metrics_count_what_was_served(server: LiveServer, client: openai.OpenAI) -> None:
    def counts() -> list[float]:
        return [
            metric(server, "qwen4exp_prompt_tokens_total"),
            metric(server, "qwen4exp_generation_tokens_total"),
            metric(server, "qwen4exp_time_to_first_token_seconds_count"),
            metric(server, "qwen4exp_http_responses_total", path="/v1/completions", status="200"),
            metric(server, "qwen4exp_http_responses_total", path="other", status="404"),
        ]

    before = counts()
    client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=2)
    server.get("/nowhere/1")
    server.get("/nowhere/2")
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [3, 2, 1, 1, 2]
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    docs = set(re.findall(r"`(\w+)", (ROOT / "docs" / "serving.md").read_text()))
    served = {name.removeprefix("qwen4exp_") for name in re.findall(r"^# HELP (\w+) ", response.text, re.MULTILINE)}
    assert served - docs == set()


def test_a_request_that_the_engine_drops_is_the_servers_fault(
    server: LiveServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_at = 0
    append = Sequence.append

    def fail(self: Sequence, sampled: Any) -> None:
        if self.num_output_tokens >= fails_at:
            raise RuntimeError("the disk is gone")
        append(self, sampled)

    monkeypatch.setattr(Sequence, "append", fail)
    with pytest.raises(openai.InternalServerError, match="dropped"):
        client.completions.create(model=MODEL, prompt=PROMPT, stream=True)
    fails_at = 2
    stream = client.completions.create(model=MODEL, prompt=PROMPT, stream=True, max_tokens=8)
    with pytest.raises(openai.APIError, match="dropped"):
        list(stream)
    assert server.get("/health").status_code == 200


def test_the_examples_of_the_docs_run(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    docs = (ROOT / "docs" / "serving.md").read_text() + (ROOT / "README.md").read_text().partition("\n## Serve\n")[2]
    docs = re.sub(r"tokens=\d+", "tokens=4", docs.replace("http://127.0.0.1:8000", server.url))
    commands = re.findall(r"^curl .*?[^\\]$", docs, re.MULTILINE | re.DOTALL)
    examples = re.findall(r"```python\n(.*?)```", docs, re.DOTALL)
    examples = [example for example in examples if "OpenAI(" in example]
    assert (len(commands), len(examples)) == (2, 2)
    for command in commands:
        _, *words = shlex.split(command.replace("\\\n", " "))
        (url,) = (word for word in words if word.startswith("http"))
        headers = dict([words[words.index("-H") + 1].split(": ")])
        response = httpx.post(url, content=words[words.index("-d") + 1], headers=headers, timeout=60)
        assert response.status_code == 200, response.text
    for example in examples:
        exec(example, {})
    out = capsys.readouterr().out
    assert out.count("CompletionUsage(completion_tokens=4") == 2


def test_the_command_serves_until_sigterm(served_bundle: Path) -> None:
    command = [sys.executable, "-m", "qwen4exp_trt.runtime.serve", str(served_bundle), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(
            r"qwen4exp-serve: served is ready for anyone on this machine at (http://127\.0\.0\.1:\d+)/v1\n", line
        )
        assert found, line
        body = {"prompt": PROMPT, "max_tokens": 8, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{found[1]}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            process.terminate()  # the open request may end, in full
            assert [text for text in lines if text][-1] == "data: [DONE]"
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (0, "", "")
    finally:
        process.kill()
        process.wait()


def test_a_server_that_stops_ends_its_streams_with_an_error(served_bundle: Path) -> None:
    texts: list[str] = []
    with live_server(AsyncLLM(served_bundle)) as server:
        started = threading.Event()

        def read() -> None:
            try:
                for chunk in server.openai().completions.create(
                    model=MODEL, prompt=PROMPT, max_tokens=700, stream=True, extra_body={"ignore_eos": True}
                ):
                    texts.append(chunk.choices[0].text)
                    started.set()
            except openai.APIError as error:
                texts.append(f"error: {error}")

        reader = threading.Thread(target=read)
        reader.start()
        assert started.wait(10)
    reader.join(10)
    assert len(texts) > 1 and "shutting down" in texts[-1]

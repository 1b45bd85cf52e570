"""The server as its clients see it: the official `openai` client against a live one."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from live_server import MODEL, LiveServer, live_server
from prometheus_client.parser import text_string_to_metric_families

from qwen4exp_trt.runtime import LLM, AsyncLLM, SamplingParams
from qwen4exp_trt.runtime.outputs import StreamChunk
from qwen4exp_trt.runtime.sampler import SampledToken
from qwen4exp_trt.runtime.sequence import Sequence

ROOT = Path(__file__).parents[2]
PROMPT, OTHER_PROMPT = "They came to the", "It was a"
USER = [{"role": "user", "content": "Tell me a story."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
NO_THINKING: dict[str, Any] = {"extra_body": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def llm(served_bundle: Path) -> LLM:
    return LLM(served_bundle)


@pytest.fixture(scope="module")
def server(served_bundle: Path) -> Iterator[LiveServer]:
    with live_server(AsyncLLM(served_bundle, max_waiting=3)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return server.openai()


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, server: LiveServer) -> Callable[..., None]:
    """Puts a text in the place of what the model would say, token by token or at once; it ends its turn then."""
    llm, aborted = server.llm, set[str]()

    def say(text: str, at_once: bool = False) -> None:
        assert llm.tokenizer is not None
        script = [*llm.tokenizer.encode(text), llm.manifest.stop_token_ids[0]]

        async def generate(
            prompt: Any, params: Any, request_id: str, priority: int
        ) -> AsyncGenerator[StreamChunk, None]:
            sequence = llm._llm.make_sequence(prompt, params, request_id, priority)
            num_sent = 0
            for token_id in script:
                await asyncio.sleep(0)
                if request_id in aborted:
                    yield sequence.aborted_chunk(num_sent)
                    return
                sequence.append(
                    SampledToken(token_id, -0.5, 1, None if params.logprobs is None else {token_id: -0.5, 7: -2})
                )
                if not at_once or sequence.finish_reason is not None:
                    yield sequence.chunk_since(num_sent)
                    num_sent = sequence.num_output_tokens
                if sequence.finish_reason is not None:
                    return

        monkeypatch.setattr(llm, "generate", generate)
        monkeypatch.setattr(llm, "abort", aborted.add)

    return say


def greedy(llm: LLM, prompt: Any, **params: Any) -> Any:
    (result,) = llm.generate(prompt, replace(llm.default_sampling_params, temperature=0.0, **params))
    return result


def rendered(llm: LLM, messages: Any, **kwargs: Any) -> dict[str, Any]:
    return {"prompt": llm.render_chat(messages, **kwargs), "add_special_tokens": False}


def wait_until_idle(server: LiveServer) -> None:
    deadline = time.monotonic() + 10
    while metric(server, "qwen4exp_num_requests_running") + metric(server, "qwen4exp_num_requests_waiting"):
        assert time.monotonic() < deadline, "requests are still open"
        time.sleep(0.02)


def metric(server: LiveServer, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(server.get("/metrics").text)
    found = [s.value for family in families for s in family.samples if s.name == name and s.labels == labels]
    return found[0] if found else 0.0


def test_completions_have_the_text_of_llm(client: openai.OpenAI, llm: LLM) -> None:
    expected = greedy(llm, PROMPT, max_tokens=8)
    result = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0)
    (choice,) = result.choices
    assert (choice.text, choice.finish_reason) == (expected.outputs[0].text, "length")
    assert result.usage is not None and result.usage.completion_tokens == 8
    assert result.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert result.usage.total_tokens == 8 + result.usage.prompt_tokens

    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=30, min_p=0.01, seed=5, stop=["e"], max_tokens=12)
    expected = llm.generate(PROMPT, replace(params, presence_penalty=0.5, repetition_penalty=1.1))[0].outputs[0]
    (choice,) = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=12,
        temperature=0.8,
        top_p=0.9,
        seed=5,
        stop="e",
        presence_penalty=0.5,
        extra_body={"top_k": 30, "min_p": 0.01, "repetition_penalty": 1.1},
    ).choices
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)


def test_prompts_are_texts_or_token_ids_or_several(client: openai.OpenAI, llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(OTHER_PROMPT)
    texts = [greedy(llm, prompt, max_tokens=2).outputs[0].text for prompt in (PROMPT, OTHER_PROMPT)]
    for prompt, expected in (
        ([PROMPT, OTHER_PROMPT], texts),
        (ids, texts[1:]),
        ([ids, ids], [texts[1], texts[1]]),
    ):
        result = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, temperature=0)
        assert [(choice.index, choice.text) for choice in result.choices] == list(enumerate(expected))
        assert result.usage is not None and result.usage.completion_tokens == 2 * len(expected)
    streamed = ["", ""]
    for chunk in client.completions.create(
        model=MODEL, prompt=[PROMPT, OTHER_PROMPT], max_tokens=2, temperature=0, stream=True
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    (choice,) = client.completions.create(model=MODEL, prompt=ids, max_tokens=2, temperature=0, echo=True).choices
    assert choice.text == OTHER_PROMPT + texts[1]


def test_streams_end_with_the_usage_if_asked(client: openai.OpenAI, llm: LLM) -> None:
    expected = greedy(llm, PROMPT, max_tokens=6).outputs[0]
    for options in ({}, {"stream_options": {"include_usage": True}}):
        chunks = list(
            client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0, stream=True, **options)
        )
        texts = [choice.text for chunk in chunks for choice in chunk.choices]
        assert "".join(texts) == expected.text
        assert len({chunk.id for chunk in chunks}) == 1
        usages = [chunk.usage for chunk in chunks]
        if options:
            assert usages[-1] is not None and usages[-1].completion_tokens == 6 and chunks[-1].choices == []
            usages.pop()
        assert usages == [None] * len(usages)


def test_completion_logprobs(client: openai.OpenAI, llm: LLM) -> None:
    expected = greedy(llm, PROMPT, max_tokens=3, logprobs=2).outputs[0]
    arguments: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3, "temperature": 0, "logprobs": 2}
    found = client.completions.create(**arguments).choices[0].logprobs
    assert found is not None and found.tokens and found.token_logprobs and found.top_logprobs and found.text_offset
    best = [entry[token] for token, entry in zip(expected.token_ids, expected.logprobs, strict=True)]
    assert found.tokens == [one.decoded_token for one in best]
    assert found.token_logprobs == pytest.approx([one.logprob for one in best], abs=1e-4)
    assert [len(top) for top in found.top_logprobs] == [2, 2, 2]
    assert found.text_offset == [len("".join(found.tokens[:index])) for index in range(3)]
    pieces = [chunk.choices[0].logprobs for chunk in client.completions.create(**arguments, stream=True)]
    assert [token for piece in pieces if piece for token in piece.tokens or ()] == found.tokens
    assert [at for piece in pieces if piece for at in piece.text_offset or ()] == found.text_offset


def test_chat_answers_with_and_without_reasoning(client: openai.OpenAI, llm: LLM) -> None:
    expected = greedy(llm, rendered(llm, USER, enable_thinking=False), max_tokens=6)
    for kwargs in (
        NO_THINKING,
        {"reasoning_effort": "none"},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ):
        result = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=6, temperature=0, **kwargs)
        message = result.choices[0].message
        assert (message.role, message.content) == ("assistant", expected.outputs[0].text)
        assert not hasattr(message, "reasoning_content")
        assert result.usage is not None and result.usage.prompt_tokens == len(expected.prompt_token_ids)

    thought = greedy(llm, rendered(llm, USER, reasoning_effort="low"), max_tokens=6)
    result = client.chat.completions.create(
        model=MODEL, messages=USER, max_completion_tokens=6, temperature=0, reasoning_effort="low"
    )
    message, usage = result.choices[0].message, result.usage
    assert message.content is None and message.reasoning_content == thought.outputs[0].text.strip()
    assert usage is not None and usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 6


def streamed_message(chunks: Any) -> dict[str, Any]:
    """What a client makes of a stream's deltas."""
    message: dict[str, Any] = {"role": "", "content": "", "reasoning_content": "", "tool_calls": [], "logprobs": []}
    for chunk in chunks:
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            message["tool_calls"] += choice.delta.tool_calls or []
            message["logprobs"] += (choice.logprobs and choice.logprobs.content) or []
            message["finish_reason"] = choice.finish_reason
            message["role"] = choice.delta.role or message["role"]
        message["usage"] = chunk.usage
    return message


def test_reasoning_and_tool_calls(client: openai.OpenAI, says: Callable[..., None], llm: LLM) -> None:
    says(f"\nI need the weather.\n</think>\n\nOne moment.\n\n{CALL}\n{CALL.replace('Oslo', 'Rome')}")
    arguments: dict[str, Any] = {"model": MODEL, "messages": USER, "tools": [WEATHER], "temperature": 0}
    result = client.chat.completions.create(**arguments)
    message = result.choices[0].message
    assert (message.reasoning_content, message.content) == ("I need the weather.", "One moment.")
    assert message.tool_calls and result.choices[0].finish_reason == "tool_calls"
    calls = [(call.type, call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    assert calls == [("function", "weather", {"city": city, "days": 3}) for city in ("Oslo", "Rome")]
    assert len({call.id for call in message.tool_calls}) == 2

    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = streamed_message(client.chat.completions.create(**arguments, **options))
    assert streamed["role"] == "assistant"
    assert (streamed["reasoning_content"], streamed["content"]) == ("I need the weather.", "One moment.")
    assert [call.index for call in streamed["tool_calls"]] == [0, 1]
    assert [(c.type, c.function.name, json.loads(c.function.arguments)) for c in streamed["tool_calls"]] == calls
    assert streamed["finish_reason"] == "tool_calls" and streamed["usage"] == result.usage
    assert result.usage is not None and result.usage.completion_tokens_details is not None
    assert llm.tokenizer is not None
    num_reasoning = len(llm.tokenizer.encode("\nI need the weather.\n</think>"))
    assert result.usage.completion_tokens_details.reasoning_tokens == num_reasoning

    one = client.chat.completions.create(**arguments, parallel_tool_calls=False)
    assert [json.loads(call.function.arguments)["city"] for call in one.choices[0].message.tool_calls or ()] == ["Oslo"]
    assert one.choices[0].finish_reason == "tool_calls"
    assert one.usage is not None and one.usage.completion_tokens < result.usage.completion_tokens
    assert one.usage.prompt_tokens == result.usage.prompt_tokens

    # All of it may come in one chunk, if the client or the event loop was slow.
    says(f"I look.\n</think>\n\n{CALL}\n{CALL}", at_once=True)
    for choice, count in ((False, 1), (True, 2)):
        chunks = client.chat.completions.create(**arguments, parallel_tool_calls=choice, stream=True)
        streamed = streamed_message(chunks)
        assert [call.index for call in streamed["tool_calls"]] == list(range(count))
        assert (streamed["reasoning_content"], streamed["finish_reason"]) == ("I look.", "tool_calls")

    # The next turn: what the client sends back is a chat that the template takes.
    answered = [*USER, message.model_dump(exclude_none=True)]
    answered += [{"role": "tool", "tool_call_id": call.id, "content": "Rain."} for call in message.tool_calls]
    client.chat.completions.create(**{**arguments, "messages": answered})


def test_without_tools_a_call_is_text(client: openai.OpenAI, says: Callable[..., None]) -> None:
    says(CALL)
    for kwargs in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        result = client.chat.completions.create(model=MODEL, messages=USER, **kwargs, **NO_THINKING)
        assert (result.choices[0].message.content, result.choices[0].finish_reason) == (CALL, "stop")
        assert result.choices[0].message.tool_calls is None


def test_chat_logprobs(client: openai.OpenAI, says: Callable[..., None]) -> None:
    says("</think>\n\nYés.")
    arguments: dict[str, Any] = {"model": MODEL, "messages": USER, "logprobs": True, "top_logprobs": 2}
    found = client.chat.completions.create(**arguments).choices[0].logprobs
    assert found is not None and found.content
    spoken = b"".join(bytes(token.bytes or ()) for token in found.content).decode()
    assert spoken == "</think>\n\nYés."
    assert [len(token.top_logprobs) for token in found.content] == [2] * len(found.content)
    streamed = streamed_message(client.chat.completions.create(**arguments, stream=True))
    assert [token.bytes for token in streamed["logprobs"]] == [token.bytes for token in found.content]
    plain = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=1).choices[0]
    assert plain.logprobs is None


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("n", {"n": 2}, "n: not supported"),
    ("logit_bias", {"logit_bias": {"5": 1}}, "logit_bias"),
    ("frequency_penalty", {"frequency_penalty": 0.5}, "presence_penalty"),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {}}}, "text without a format"),
    ("tool_choice", {"tools": [WEATHER], "tool_choice": "required"}, "force"),
    ("best_of_all", {"best_of_all": 1}, "does not know the field"),
    ("temperature", {"temperature": -1}, "a number from 0"),
    ("top_p", {"top_p": "0.5"}, "top_p"),
    ("messages.0.content", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    ("messages.0.role", {"messages": [{"role": "robot", "content": "x"}]}, "role"),
    (
        "tools.0.function.strict",
        {"tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]},
        "strict",
    ),
    ("chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}, "cannot be set"),
    (None, {"reasoning_effort": "extreme"}, "the chat template refused"),
    (None, {"messages": [{"role": "system", "content": "x"}]}, "the chat template refused"),
    (None, {"messages": [{"role": "user", "content": "so " * 900}]}, "takes at most"),
    (None, {"top_logprobs": 1}, "top_logprobs need logprobs"),
    (None, {"stream_options": {}}, "stream_options need stream"),
]


@pytest.mark.parametrize(("param", "fields", "message"), REFUSED)
def test_what_cannot_be_served_is_named(server: LiveServer, param: str | None, fields: Any, message: str) -> None:
    response = server.post(
        "/v1/chat/completions", {"messages": USER, "stream": "stream_options" not in fields} | fields
    )
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert message in error["message"]


def test_fields_without_effect_are_taken(server: LiveServer) -> None:
    fields = {"n": 1, "logit_bias": {}, "frequency_penalty": 0, "response_format": {"type": "text"}, "user": "me"}
    others = {"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "stop": None, "seed": None, "tools": []}
    response = server.post("/v1/chat/completions", {"messages": USER, "max_tokens": 1} | fields | others)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["finish_reason"] == "length"


def test_usage_tells_what_the_prefix_cache_had(client: openai.OpenAI, llm: LLM) -> None:
    prompt = "It was a long way, and the king said to his servants that they should go before him."
    arguments: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 3, "temperature": 0}
    first, second = client.completions.create(**arguments), client.completions.create(**arguments)
    assert first.choices[0].text == second.choices[0].text == greedy(llm, prompt, max_tokens=3).outputs[0].text
    usages = [first.usage, second.usage]
    details = [usage.prompt_tokens_details for usage in usages if usage is not None]
    cached = [detail.cached_tokens for detail in details if detail is not None]
    assert cached == [0, 16]
    assert second.usage is not None and second.usage.prompt_tokens > 16


def test_a_prompt_that_is_too_long_has_openai_s_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="takes at most 767") as caught:
        client.completions.create(model=MODEL, prompt=[5] * 768)
    assert caught.value.code == "context_length_exceeded"


def test_a_request_of_more_prompts_than_there_is_room_for_is_wrong(server: LiveServer) -> None:
    response = server.post("/v1/completions", {"prompt": ["x"] * 65})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_errors_have_openai_s_classes(client: openai.OpenAI, server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError, match="the prompt is empty"):
        client.completions.create(model=MODEL, prompt="")
    with pytest.raises(openai.NotFoundError, match="'other' is not served") as caught:
        client.completions.create(model="other", prompt="x")
    assert caught.value.code == "model_not_found"
    for path, status in (("/v1/embeddings", 404), ("/v1/models/other", 404), ("/v1/completions", 405)):
        response = server.get(path)
        assert (response.status_code, "error" in response.json()) == (status, True)
    for content, message in ((b"{", "not JSON"), (b"[]", "no JSON object"), (b"[" * 10_000, "body")):
        headers = {"content-type": "application/json"}
        response = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers)
        assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_models_and_health(client: openai.OpenAI, server: LiveServer) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "qwen4exp-trt"
    assert server.get("/health").json() == {"status": "ok"}


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

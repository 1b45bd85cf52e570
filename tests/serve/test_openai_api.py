"""The API as its clients see it: the official `openai` client against a live server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from live_server import MODEL, PROMPT, LiveServer, greedy

from qwen4exp_trt.runtime import LLM, SamplingParams
from qwen4exp_trt.runtime.outputs import StreamChunk
from qwen4exp_trt.runtime.sampler import SampledToken

OTHER_PROMPT = "It was a"
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


def rendered(llm: LLM, messages: Any, **kwargs: Any) -> dict[str, Any]:
    return {"prompt": llm.render_chat(messages, **kwargs), "add_special_tokens": False}


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

from __future__ import annotations

from typing import Any

import bundles
import pytest
from serving import generated

from qwen4exp_trt.errors import RequestError
from qwen4exp_trt.runtime import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def test_chat_is_generate_on_the_rendered_text(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    (result,) = llm.chat(messages, GREEDY)
    text = llm.render_chat(messages)
    assert result.prompt == text
    assert generated(result) == generated(llm.generate({"prompt": text, "add_special_tokens": False}, GREEDY)[0])


def test_several_conversations_with_their_parameters(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("Hi", "Ho", "Hum", "Ha")]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 2, 3, 4)]
    results = llm.chat(conversations, params)
    assert [result.prompt for result in results] == [llm.render_chat(chat) for chat in conversations]
    assert [len(generated(result)) for result in results] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ([[]], "messages is empty"),
        ("Hi", "messages is a str"),
        (None, "messages is a NoneType"),
        ({"role": "user", "content": "Hi"}, "messages is a dict"),
        ([{"content": "Hi"}], "it needs a 'role'"),
        ([[{"role": "user", "content": "Hi"}], {"role": "user"}], "messages is a dict"),
        ([{"role": "user", "content": "the " * 200}], "the prompt has .* tokens, but this bundle takes at most 63"),
    ],
)
def test_bad_chats(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat(messages, GREEDY)


@pytest.mark.trt
def test_demo_chat_has_the_prompt_of_transformers(demo_llm: LLM) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(bundles.DEMO_CHECKPOINT)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is 你好?"}]
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "weather", "description": "Says", "parameters": parameters}}
    params = SamplingParams(temperature=0, max_tokens=1)
    choices: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {"enable_thinking": True}, {"tools": [tool]}]
    for options in choices:
        (result,) = demo_llm.chat(messages, params, **options)
        kwargs: dict[str, Any] = {"add_generation_prompt": True, **options}
        assert result.prompt == reference.apply_chat_template(messages, tokenize=False, **kwargs)
        encoded = reference.apply_chat_template(messages, tokenize=True, return_dict=True, **kwargs)
        assert result.prompt_token_ids == encoded["input_ids"]

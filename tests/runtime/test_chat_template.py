from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import tiny_backend
from transformers import PreTrainedTokenizerFast

from qwen4exp_trt.errors import BundleError, RequestError
from qwen4exp_trt.runtime.chat_template import ChatTemplate, render_chat

ROOT = Path(__file__).parents[2]
SOURCE = (ROOT / "tests" / "fixtures" / "chat_template.jinja").read_text(encoding="utf-8")
SPECIAL_TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
TEMPLATES = {
    str(file.relative_to(ROOT)): file.read_text(encoding="utf-8")
    for file in [ROOT / "tests" / "fixtures" / "chat_template.jinja", *ROOT.glob("demo/checkpoint/chat_template.jinja")]
}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "find_café",
            "description": 'Finds a <café> & its owner\'s "menu"',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "sum", "parameters": {"type": "object", "properties": {}}}},
]
USER = {"role": "user", "content": "  Where is <b>你好</b>?\n"}
CALL = {
    "role": "assistant",
    "content": "Looking.",
    "reasoning_content": "A tool may know.",
    "tool_calls": [
        {"type": "function", "function": {"name": "find_café", "arguments": {"city": "Köln", "limit": 3}}},
        {"type": "function", "function": {"name": "sum", "arguments": {"values": [1, 2.5], "exact": True}}},
    ],
}
TOOL_RESULTS = [{"role": "tool", "content": "Café <1>"}, {"role": "tool", "content": "3.5"}]
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "turns": [USER, {"role": "assistant", "content": "Here."}, {"role": "user", "content": "Thanks 🙂"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]}],
    "tools": [USER, CALL, *TOOL_RESULTS],
    "more_tools": [USER, CALL, *TOOL_RESULTS, {"role": "assistant", "content": "Done."}, USER],
    "absent_content": [USER, {**CALL, "content": None}, *TOOL_RESULTS],
}


def _render_with_transformers(source: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_backend(), **SPECIAL_TOKENS)
    text = tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **kwargs)
    assert isinstance(text, str)
    return text


# Against transformers


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS.keys())
def test_same_text_as_transformers(source: str, messages: list[dict[str, Any]]) -> None:
    template = ChatTemplate(source, special_tokens=SPECIAL_TOKENS)
    rendered = set()
    for tools in (None, [], TOOLS):
        for add_generation_prompt in (True, False):
            for thinking in ({}, {"enable_thinking": True}, {"enable_thinking": False}, {"reasoning_effort": "low"}):
                kwargs = {"tools": tools, "add_generation_prompt": add_generation_prompt, **thinking}
                text = render_chat(template, messages, **kwargs)
                assert text == _render_with_transformers(source, messages, **kwargs)
                rendered.add(text)
    # Tools, the generation prompt and thinking each show.
    assert len(rendered) >= 6


def test_text_of_a_whole_chat() -> None:
    template = ChatTemplate(SOURCE, special_tokens=SPECIAL_TOKENS)
    text = render_chat(template, [USER, {"role": "assistant", "content": "Here."}, USER], enable_thinking=False)
    assert text == (
        "<|endoftext|><|im_start|>user\nWhere is <b>你好</b>?<|im_end|>\n"
        "<|im_start|>assistant\nHere.\n<|im_end|>\n"
        "<|im_start|>user\nWhere is <b>你好</b>?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


# The environment


def test_json_is_not_escaped() -> None:
    text = render_chat("{{ messages[0] | tojson }}", [{"role": "user", "content": "<é & 'ü'>"}])
    assert text == '{"role": "user", "content": "<é & \'ü\'>"}'


def test_json_options() -> None:
    source = "{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}"
    assert render_chat(source, [USER]) == '{"a":"\\u00e9","b":1}'


def test_date() -> None:
    before = datetime.now().strftime("%Y-%m-%d")
    text = render_chat("{{ strftime_now('%Y-%m-%d') }}", [USER])
    assert text in (before, datetime.now().strftime("%Y-%m-%d"))


def test_thinking_is_undefined_unless_chosen() -> None:
    source = "{{ enable_thinking is defined }} {{ enable_thinking }}"
    assert render_chat(source, [USER]) == "False "
    assert render_chat(source, [USER], enable_thinking=False) == "True False"


def test_further_variables_reach_the_template_before_special_tokens() -> None:
    template = ChatTemplate("{{ bos_token }}{{ effort }}", special_tokens=SPECIAL_TOKENS)
    assert render_chat(template, [USER], effort="low") == "<|endoftext|>low"
    assert render_chat(template, [USER], effort="low", bos_token="B") == "Blow"


def test_messages_of_the_caller_are_left_alone() -> None:
    message = {"role": "user", "content": None}
    assert render_chat("{{ 'content' in messages[0] }}", [message]) == "False"
    assert message == {"role": "user", "content": None}


# Errors


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no image, please') }}", "the chat template refused the chat: no image, please"),
        ("{{ messages[0].nothing.at_all }}", "refused the chat: .*has no attribute 'nothing'"),
        ("{{ messages.append(1) }}", "refused the chat: .*unsafe"),
        ("{{ ''.__class__.__mro__ }}", "refused the chat: .*unsafe"),
        ("{{ 1 / 0 }}", "failed with ZeroDivisionError: division by zero"),
        ("{{ 'a' + 1 }}", "failed with TypeError"),
        ("a\n{% if %}", "syntax error in line 2: "),
    ],
)
def test_template_errors_are_request_errors(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render_chat(source, [USER])


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_templates_refuse_with_their_own_message(source: str) -> None:
    with pytest.raises(RequestError, match="no user message"):
        render_chat(source, [{"role": "assistant", "content": "a"}])
    with pytest.raises(RequestError, match=r"reasoning_effort.*'extreme'"):
        render_chat(source, [USER], reasoning_effort="extreme")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ("hello", "messages is a str; a list of dicts was expected"),
        ({"role": "user"}, "messages is a dict; a list of dicts"),
        (["hello"], r"messages\[0\] is 'hello'; a dict was expected"),
        ([USER, {"content": "a"}], r"messages\[1\] .* needs a 'role'"),
        ([{"role": 3, "content": "a"}], r"messages\[0\] .* needs a 'role' that is a string"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render_chat(SOURCE, messages)


def test_malformed_tools_are_refused() -> None:
    with pytest.raises(RequestError, match=r"tools\[0\] is <function .*a dict was expected"):
        render_chat(SOURCE, [USER], tools=[test_date])  # type: ignore[list-item]


# Folders


def _write_config(folder: Path, **config: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def test_folder_without_a_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.from_dir(tmp_path) is None
    _write_config(tmp_path, eos_token="<|im_end|>", chat_template=None)
    assert ChatTemplate.from_dir(tmp_path) is None


def test_template_file_comes_before_the_config(tmp_path: Path) -> None:
    _write_config(tmp_path, chat_template="from config é {{ eos_token }}", eos_token="<E>")
    from_config = ChatTemplate.from_dir(str(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("from file é {{ eos_token }}", encoding="utf-8")
    from_file = ChatTemplate.from_dir(tmp_path)
    assert from_config is not None and render_chat(from_config, [USER]) == "from config é <E>"
    assert from_file is not None and render_chat(from_file, [USER]) == "from file é <E>"


def test_special_tokens_are_strings_or_objects(tmp_path: Path) -> None:
    _write_config(
        tmp_path,
        chat_template="",
        bos_token={"content": "<B>", "lstrip": False},
        eos_token="<E>",
        pad_token=None,
        add_bos_token=True,
    )
    template = ChatTemplate.from_dir(tmp_path)
    assert template is not None and template.special_tokens == {"bos_token": "<B>", "eos_token": "<E>"}


def test_named_templates(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    _write_config(tmp_path, chat_template=templates)
    template = ChatTemplate.from_dir(tmp_path)
    assert template is not None
    assert render_chat(template, [USER]) == "plain"
    assert render_chat(template, [USER], tools=TOOLS) == "tools"
    _write_config(tmp_path, chat_template=templates[:1])
    template = ChatTemplate.from_dir(tmp_path)
    assert template is not None and render_chat(template, [USER], tools=TOOLS) == "plain"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "tokenizer_config.json: not a JSON file"),
        ("[]", "holds a list; a JSON object was expected"),
        ('{"chat_template": 5}', "neither a string nor a list"),
        ('{"chat_template": [{"name": "default"}]}', "neither a string nor a list"),
        ('{"chat_template": [{"name": "rag", "template": ""}]}', r"names \['rag'\]; one named 'default'"),
        ('{"chat_template": [{"name": "default", "template": 5}]}', "has names or templates that are not strings"),
        ('{"chat_template": "a\\n{% if %}"}', "the template 'default' has a syntax error in line 2: "),
        (
            '{"chat_template": [{"name": "default", "template": ""}, {"name": "tool_use", "template": "{{"}]}',
            "tokenizer_config.json: the template 'tool_use' has a syntax error in line 1: ",
        ),
    ],
)
def test_damaged_config_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(BundleError, match=message):
        ChatTemplate.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "cannot be read as UTF-8 text: "),
        (b"{% if x %}", "the template 'default' has a syntax error in line 1: "),
        (b"{{ x | unknown }}", "the template 'default' has a syntax error in line 1: No filter named 'unknown'"),
        (b"{% for a in b %}" * 30 + b"{% endfor %}" * 30, "the template 'default' does not compile: SyntaxError: "),
        (b"{{" + b"(" * 10_000, "the template 'default' does not compile: RecursionError: "),
        (None, "cannot be read as UTF-8 text: .*Is a directory"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_damaged_template_file_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "chat_template.jinja"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    with pytest.raises(BundleError, match=rf"chat_template\.jinja: {message}") as caught:
        ChatTemplate.from_dir(tmp_path)
    assert "\n" not in str(caught.value)


# Tool calls as in OpenAI's API


def with_text_arguments(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_arguments_as_json_text_are_those_as_an_object(source: str) -> None:
    messages = with_text_arguments('{"city": "Köln", "limit": [3, null]}')
    text = render_chat(source, messages)
    assert text == render_chat(source, with_text_arguments({"city": "Köln", "limit": [3, None]}))
    assert "Köln" in text
    assert messages == with_text_arguments('{"city": "Köln", "limit": [3, null]}'), "the caller's are left alone"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ('{"city"', r"messages\[1\] has a tool call whose arguments are not JSON: "),
        ("", r"messages\[1\] has a tool call whose arguments are not JSON: "),
        ("[" * 200_000, r"messages\[1\] has a tool call whose arguments are not JSON: maximum recursion"),
        ("[1]", r"messages\[1\] has a tool call with the arguments \[1\]; a JSON object belongs there"),
    ],
    ids=lambda value: value[:10],
)
def test_bad_arguments_are_refused(arguments: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render_chat(SOURCE, with_text_arguments(arguments))


@pytest.mark.parametrize("tool_calls", ["find", [3], [{"name": "find"}], [{"function": "find"}]])
def test_tool_calls_of_another_form_are_the_templates_to_judge(tool_calls: Any) -> None:
    message = {"role": "assistant", "tool_calls": tool_calls}
    assert json.loads(render_chat("{{ messages[0].tool_calls | tojson }}", [message])) == tool_calls

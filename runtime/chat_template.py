"""Chat messages to prompt text through the checkpoint's Jinja chat template, in Jinja's sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from qwen4exp_trt.errors import BundleError, RequestError
from qwen4exp_trt.runtime.json_files import read_json_object

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"


@dataclass(frozen=True)
class ChatTemplate:
    """A template's source, the one to use when there are tools (if it differs), and the named special tokens."""

    source: str
    tool_source: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_dir(cls, path: str | Path) -> ChatTemplate | None:
        """The chat template of a checkpoint or bundle folder, or None if it has none.

        chat_template.jinja comes before ``chat_template`` in tokenizer_config.json (a string, or a list of
        ``{name, template}`` with ``default`` and perhaps ``tool_use``). Raises BundleError for files not so shaped and
        for templates that do not compile.
        """
        template_file, config_file = Path(path) / TEMPLATE_FILE, Path(path) / TOKENIZER_CONFIG_FILE
        config = read_json_object(config_file, BundleError) if config_file.exists() else {}
        if template_file.exists():
            file, templates = template_file, {"default": _read_template(template_file)}
        elif config.get("chat_template") is not None:
            file, templates = config_file, _named_templates(config["chat_template"], config_file)
        else:
            return None
        for name, source in templates.items():
            _check_template(source, f"{file}: the template {name!r}")
        return cls(templates["default"], templates.get("tool_use"), _special_tokens(config))


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{file}: cannot be read as UTF-8 text: {error}") from error


def _check_template(source: str, where: str) -> None:
    try:
        _compile_template(source)
    except jinja2.TemplateSyntaxError as error:
        raise BundleError(f"{where} has a syntax error in line {error.lineno}: {error.message}") from error
    except Exception as error:  # Python compiles what Jinja makes of it, and may fail in any way
        raise BundleError(f"{where} does not compile: {type(error).__name__}: {error}") from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token``, ``eos_token`` ...: plain strings, or objects with their text in ``content``."""
    texts = {
        name: value["content"] if isinstance(value, dict) and "content" in value else value
        for name, value in config.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _named_templates(found: Any, file: Path) -> dict[str, str]:
    try:
        templates = {"default": found} if isinstance(found, str) else {e["name"]: e["template"] for e in found}
    except (TypeError, KeyError) as error:
        raise BundleError(
            f"chat_template in {file} is neither a string nor a list of {{name, template}}: {error!r}"
        ) from error
    if not all(isinstance(text, str) for text in (*templates, *templates.values())):
        raise BundleError(f"chat_template in {file} has names or templates that are not strings")
    if "default" not in templates:
        raise BundleError(f"chat_template in {file} names {sorted(templates)}; one named 'default' was expected")
    return templates


def render_chat(
    template: ChatTemplate | str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    enable_thinking: bool | None = None,
    **kwargs: Any,
) -> str:
    """Prompt text for ``messages`` (mappings with a ``role``; None values count as absent) and JSON-schema ``tools``.

    Arguments of tool calls may be objects or, as in OpenAI's API, their JSON text.
    ``enable_thinking`` None leaves the choice to the template. ``kwargs`` are further variables of the template, such
    as ``reasoning_effort``. Raises RequestError for malformed messages or tools and with the message of a template
    that refuses them or fails.
    """
    if isinstance(template, str):
        template = ChatTemplate(template)
    is_with_tools = tools is not None and template.tool_source is not None
    variables = {**template.special_tokens, **kwargs}
    if enable_thinking is not None:
        variables["enable_thinking"] = enable_thinking
    variables["messages"] = _checked_messages(messages)
    variables["tools"] = None if tools is None else _checked_mappings("tools", tools)
    variables["add_generation_prompt"] = add_generation_prompt
    try:
        return _compile_template(template.tool_source if is_with_tools else template.source).render(variables)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(f"the chat template has a syntax error in line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise RequestError(f"the chat template refused the chat: {error.message}") from error
    except Exception as error:  # a template is a program from outside and may fail in any way
        raise RequestError(f"the chat template failed with {type(error).__name__}: {error}") from error


def _checked_mappings(name: str, items: Any) -> list[dict[str, Any]]:
    if not isinstance(items, Sequence) or isinstance(items, str | bytes):
        raise RequestError(f"{name} is a {type(items).__name__}; a list of dicts was expected")
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise RequestError(f"{name}[{index}] is {item!r}; a dict was expected")
    return [dict(item) for item in items]


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    checked = _checked_mappings("messages", messages)
    if not checked:
        raise RequestError("messages is empty; a chat needs at least one message")
    for index, message in enumerate(checked):
        if "role" not in message or not isinstance(message["role"], str):
            raise RequestError(f"messages[{index}] is {message!r}; it needs a 'role' that is a string")
        if isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [_with_parsed_arguments(call, index) for call in message["tool_calls"]]
    return [{key: value for key, value in message.items() if value is not None} for message in checked]


def _with_parsed_arguments(call: Any, index: int) -> Any:
    """A tool call of message ``index`` whose arguments are an object; OpenAI's API has them as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError) as error:
        raise RequestError(f"messages[{index}] has a tool call whose arguments are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise RequestError(
            f"messages[{index}] has a tool call with the arguments {arguments!r}; a JSON object belongs there"
        )
    return {**call, "function": {**function, "arguments": arguments}}


class _GenerationTag(Extension):
    """``{% generation %}``, which marks assistant text for training and changes nothing here."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, where Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=8)
def _compile_template(source: str) -> jinja2.Template:
    """The template in the environment that Hugging Face chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)

"""The bodies of requests. Every field is used, refused with a reason, or one of those that cannot change the answer.

The fields are OpenAI's, and some more that vLLM has as well. ``null`` always means the default.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, ClassVar, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 32

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_DEFAULT_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "one choice for each prompt; send the request again for another"),
    "best_of": ((1,), "one choice for each prompt"),
    "frequency_penalty": ((0,), "presence_penalty and repetition_penalty instead"),
    "logit_bias": (({},), "no logit_bias"),
    "suffix": (("",), "no suffix"),
    "response_format": (({"type": "text"},), "text without a format that is enforced"),
    "modalities": ((["text"],), "text only"),
    "audio": ((), "text only"),
    "functions": (([],), "tools instead"),
    "function_call": ((), "tools and tool_choice instead"),
    "web_search_options": ((), "no web search"),
    "moderation": ((), "no moderation"),
    "verbosity": (("medium",), "no verbosity"),
    "store": ((False,), "nothing stored"),
    "service_tier": (("auto", "default"), "one tier; see the field priority"),
    "strict": ((False,), "arguments as the model writes them"),
    "include_obfuscation": ((False,), "streams without padding"),
    "refusal": (("",), "no refusals in messages"),
}
"""Fields that would change the answer and are not implemented: the values without effect, and what there is instead."""


def refusal(message: str) -> PydanticCustomError:
    """What a validator raises; ``message`` is for the client."""
    return PydanticCustomError("refused", "{message}", {"message": message})


def _only_default(value: Any, info: ValidationInfo) -> Any:
    name = cast(str, info.field_name)
    values, offered = _DEFAULT_ONLY[name]
    if value is not None and value not in values:
        allowed = " or ".join(["null", *map(repr, values)])
        raise refusal(f"not supported; this server has {offered} (allowed: {allowed})")
    return value


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    _check_default_only = field_validator(*_DEFAULT_ONLY, check_fields=False)(_only_default)


class StreamOptions(_Body):
    include_usage: bool | None = None
    include_obfuscation: Any = None


class GenerationRequest(_Body):
    """What both endpoints take. See `SamplingParams` for the sampling fields."""

    SAMPLING: ClassVar = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "presence_penalty",
        "repetition_penalty",
        "include_stop_str_in_output",
        "skip_special_tokens",
    )

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)

    n: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None

    user: Any = None
    metadata: Any = None

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: Any) -> Any:
        strings = [stop] if isinstance(stop, str) else [] if stop is None else stop
        if not isinstance(strings, list) or not all(isinstance(one, str) for one in strings):
            raise refusal("a string or a list of strings was expected")
        if len(strings) > MAX_STOP_STRINGS:
            raise refusal(f"{len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed")
        return [one for one in strings if one]

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options need stream to be true")
        return self

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``."""

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    suffix: Any = None
    best_of: Any = None

    @field_validator("prompt")
    @classmethod
    def _list_prompts(cls, prompt: Any) -> list[str | list[int]]:
        prompts = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt
        if not isinstance(prompts, list) or not prompts:
            raise refusal("a text, a list of token ids, or a list of either was expected")
        for index, one in enumerate(prompts):
            if not isinstance(one, str) and not _is_ids(one):
                raise refusal(f"item {index} is neither a text nor a list of token ids")
        return prompts

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise refusal("echo with logprobs is not supported: prompts have no log-probabilities")
        return self


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


class FunctionCall(BaseModel):
    model_config = ConfigDict(strict=True)
    name: str
    arguments: str


class ToolCallOfMessage(BaseModel):
    model_config = ConfigDict(strict=True)
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Body):
    """The chat template has no use for ``name``, ``tool_call_id``, ``annotations`` and the ids of tool calls."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallOfMessage] | None = None

    name: str | None = None
    tool_call_id: str | None = None
    annotations: Any = None
    refusal: Any = None
    audio: Any = None
    function_call: Any = None

    @field_validator("content")
    @classmethod
    def _check_content(cls, content: Any) -> Any:
        if content is None or isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise refusal("a text or a list of parts was expected")
        for index, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                raise refusal(f"part {index} has the type {kind!r}; this server takes text only")
            if not isinstance(part.get("text"), str) or part.keys() != {"type", "text"}:
                raise refusal(f"part {index} is not of the form {{type: 'text', text: ...}}")
        return content

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates know it: a developer's is a system message, a tool's content one text."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        content = self.content
        if self.role == "tool" and isinstance(content, list):
            content = "".join(part["text"] for part in content)
        if content is not None or self.role != "assistant":
            message["content"] = content or ""
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump(exclude_none=True) for call in self.tool_calls]
        return message


class Function(_Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Any = None

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not _TOOL_NAME.fullmatch(name):
            raise refusal("1 to 128 letters, digits and any of _.:/- were expected")
        return name


class Tool(_Body):
    type: Literal["function"]
    function: Function


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    moderation: Any = None
    verbosity: Any = None
    store: Any = None
    service_tier: Any = None

    prediction: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None

    @field_validator("tool_choice")
    @classmethod
    def _check_tool_choice(cls, choice: Any) -> Any:
        if choice not in (None, "auto", "none"):
            message = "not supported: nothing can force the model to call a tool (allowed: 'auto' or 'none')"
            raise refusal(message)
        return choice

    @field_validator("tools")
    @classmethod
    def _check_tools(cls, tools: list[Tool] | None) -> list[Tool] | None:
        counts = Counter(tool.function.name for tool in tools or ())
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise refusal(f"more than one function has the name {', '.join(twice)}")
        return tools

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_template_kwargs(cls, kwargs: dict[str, Any] | None) -> dict[str, Any] | None:
        taken = sorted({"self", "template", "messages", "tools", "add_generation_prompt"} & (kwargs or {}).keys())
        if taken:
            raise refusal(f"{', '.join(taken)} cannot be set here")
        return kwargs

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise refusal("top_logprobs need logprobs to be true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise refusal("max_tokens and max_completion_tokens differ; give one of them")
        kwargs = self.chat_template_kwargs or {}
        for name in ("enable_thinking", "reasoning_effort"):
            value = getattr(self, name)
            if value is not None and kwargs.get(name, value) != value:
                raise refusal(f"{name} is {value!r}, but chat_template_kwargs have another value")
        return self

    def template_variables(self) -> dict[str, Any]:
        """Variables for the chat template. A reasoning effort of ``none`` turns thinking off."""
        variables = dict(self.chat_template_kwargs or {})
        if self.enable_thinking is not None:
            variables["enable_thinking"] = self.enable_thinking
        if self.reasoning_effort == "none":
            variables["enable_thinking"] = False
        elif self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        return variables

    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of, as chat templates know them."""
        if self.tool_choice == "none":
            return []
        return [{"type": "function", "function": self._function(tool)} for tool in self.tools or ()]

    @staticmethod
    def _function(tool: Tool) -> dict[str, Any]:
        return tool.function.model_dump(exclude={"strict"}, exclude_unset=True)

"""`LLM`: the Python generation API."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from qwen4exp_trt.errors import BundleError, RequestError
from qwen4exp_trt.runtime.backend import EagerBackend, choose_backend, load_backend
from qwen4exp_trt.runtime.chat_template import ChatTemplate, render_chat
from qwen4exp_trt.runtime.drafts.config import SpeculativeConfig
from qwen4exp_trt.runtime.drafts.drafting import make_drafting
from qwen4exp_trt.runtime.engine_core import EngineCore
from qwen4exp_trt.runtime.generation_config import GenerationConfig
from qwen4exp_trt.runtime.load_options import DEFAULT_ROW_CACHE_BYTES, LoadOptions, WeightMaker
from qwen4exp_trt.runtime.manifest import Manifest
from qwen4exp_trt.runtime.outputs import RequestOutput, StreamChunk
from qwen4exp_trt.runtime.prefix_cache.cache import PrefixCache
from qwen4exp_trt.runtime.prefix_cache.cache_metrics import cache_metrics
from qwen4exp_trt.runtime.prefix_cache.opening import prefix_cache_opener
from qwen4exp_trt.runtime.prefix_cache.options import (
    DEFAULT_DISK_BYTES,
    DEFAULT_SNAPSHOT_INTERVAL,
    PrefixCacheOptions,
)
from qwen4exp_trt.runtime.program_backend import ProgramBackend
from qwen4exp_trt.runtime.progress_line import Progress
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.sequence import Sequence as RequestSequence
from qwen4exp_trt.runtime.sequence_states import SequenceStates
from qwen4exp_trt.runtime.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any]
"""Text, ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``.

With text, ``"add_special_tokens": False`` keeps the tokenizer from adding its own, for text that has them already.
"""


Stream = Generator[StreamChunk, None, None]


class LLM:
    """Generates text from a bundle.

    ``bundle``: a folder that ``qwen4exp-build`` made. ``backend``: ``eager`` runs the bundle's program in torch, on the
    ``device`` ``cpu`` (the default), ``cuda`` or ``cuda:N``; ``tensorrt-rtx`` and ``tensorrt`` run its engine on a GPU.
    ``checkpoint``: where the checkpoint is now, if it moved since the build. ``num_blocks``: pages of the KV cache,
    all allocated at once; by default enough for a full batch of the longest sequences, or as many as there is memory
    for. ``progress`` is called with the bytes of weights that are loaded and the bytes of all. ``row_cache_bytes``:
    memory for rows of an n-gram table that was built to stay on disk. ``memory_reserve_bytes``: of the host's memory,
    what is left to the rest of the system; by default 4 GiB, or a sixteenth of a smaller machine. ``max_num_seqs``:
    how many sequences run at a time, at most (and by default) as many as the bundle is built for; the others wait.
    ``speculate``: drafts for every request, ``"mtp:3"`` or ``"ngram:4"`` (`SpeculativeConfig`); none by default.
    ``enable_prefix_caching``: keep the states of prompts for others that begin alike; the options behind it are those
    of `PrefixCacheOptions`. ``debug_nan``: run each step op by op, slowly, so that a request whose logits are unusable
    says where that began; for ``eager`` only. ``cuda_graphs``: who makes CUDA graphs of decode steps: ``own`` (this
    runtime, the default on a GPU), ``tensorrt`` (TensorRT for RTX, of the engine alone) or ``none``. ``jit_cache``:
    where to keep what TensorRT for RTX compiles: ``user`` (below ``~/.cache/qwen4exp-trt``), ``bundle`` (in its
    folder), ``none``, or a folder. ``weight_maker``: makes the weights in place of the checkpoint, which need not be
    there. Raises `BundleError` for a bundle that is damaged, of another version, without weights or too large for the
    memory (before any of it is read), `CheckpointError` for a checkpoint that is not the one it was built from.

    Threads may share it: their requests run in the same steps.
    """

    def __init__(
        self,
        bundle: str | Path,
        backend: str = "eager",
        device: str | None = None,
        checkpoint: str | Path | None = None,
        num_blocks: int | None = None,
        progress: Progress | None = None,
        row_cache_bytes: int = DEFAULT_ROW_CACHE_BYTES,
        memory_reserve_bytes: int | None = None,
        max_num_seqs: int | None = None,
        speculate: SpeculativeConfig | str | None = None,
        enable_prefix_caching: bool = True,
        prefix_cache_bytes: int | None = None,
        host_cache_bytes: int = 0,
        cache_dir: str | Path | None = None,
        disk_cache_bytes: int = DEFAULT_DISK_BYTES,
        snapshot_interval: int = DEFAULT_SNAPSHOT_INTERVAL,
        debug_nan: bool = False,
        cuda_graphs: str | None = None,
        jit_cache: str | Path = "user",
        weight_maker: WeightMaker | None = None,
    ) -> None:
        if weight_maker is not None and cache_dir is not None:
            raise BundleError("cache_dir keeps states of the checkpoint's weights; leave it out with a weight_maker")
        self.speculative_config = SpeculativeConfig.parse(speculate) if isinstance(speculate, str) else speculate
        how = (prefix_cache_bytes, host_cache_bytes, cache_dir, disk_cache_bytes, snapshot_interval)
        caching = PrefixCacheOptions(*how) if enable_prefix_caching else None
        options = LoadOptions(
            with_draft_head=self.speculative_config is not None and self.speculative_config.method == "mtp",
            checkpoint=None if checkpoint is None else _checked_path("checkpoint", checkpoint),
            num_blocks=num_blocks,
            row_cache_bytes=row_cache_bytes,
            memory_reserve_bytes=memory_reserve_bytes,
            prefix_cache=caching,
            debug_nan=debug_nan,
            cuda_graphs=cuda_graphs,
            jit_cache=jit_cache,
            progress=progress,
            weight_maker=weight_maker,
        )
        folder = _checked_path("bundle", bundle)
        self.manifest = Manifest.load(folder)
        chosen = choose_backend(backend, device, folder, self.manifest, options)
        self.manifest.check_files(folder)
        limits = self.manifest.limits
        self.max_num_seqs = limits.max_batch_size if max_num_seqs is None else max_num_seqs
        if not isinstance(self.max_num_seqs, int) or not 1 <= self.max_num_seqs <= limits.max_batch_size:
            raise BundleError(
                f"max_num_seqs is {max_num_seqs!r}; this bundle runs 1 to {limits.max_batch_size} sequences at a time, "
                "and more if it is built with a larger --max-batch-size"
            )
        self.tokenizer = Tokenizer.from_dir(folder)
        self.default_sampling_params = GenerationConfig.from_dir(folder).sampling_params
        self._chat_template = ChatTemplate.from_dir(folder)
        loaded = load_backend(chosen, folder, self.manifest, options)
        assert loaded.memory_plan is not None
        self._backend, self.memory_plan, self._ngram_table = loaded, loaded.memory_plan, loaded.rows
        opener = prefix_cache_opener(self.manifest, backend, loaded.device, caching) if caching else None
        self.core = self._make_core(loaded, opener)

    def _make_core(self, loaded: ProgramBackend, opener: Callable[[SequenceStates], PrefixCache] | None) -> EngineCore:
        core = EngineCore(
            loaded,
            self.manifest.limits,
            self.memory_plan.num_blocks,
            self.manifest.vocab_size,
            self.manifest.stop_token_ids,
            self.tokenizer,
            max_num_seqs=self.max_num_seqs,
            prefix_cache=opener,
            drafting=make_drafting(self.speculative_config, loaded.draft, self.manifest, self.tokenizer),
            nan_trace=loaded.nan_trace if isinstance(loaded, EagerBackend) else None,
        )
        if isinstance(core.prefix_cache, PrefixCache):
            core.metrics.add_source(partial(cache_metrics, core.prefix_cache))
        return core

    def close(self) -> None:
        """Write to disk what the prefix cache keeps there. Nothing can be generated afterwards."""
        self.core.close()
        self.release()

    def release(self) -> None:
        """Let go of the engine, of the files that steps read, and of the threads that read them."""
        with self.core.lock:
            self._backend.close()
        self._ngram_table.close()

    @property
    def info(self) -> dict[str, Any]:
        """What was found at the start: ``memory``, bytes by use and what there was of them; ``ngram_table``, where it
        is and, on a disk, how fast that is. And ``speculate``, the drafts that were asked for, None without."""
        drafts = None if self.speculative_config is None else str(self.speculative_config)
        ngram_table = dict(self._ngram_table.info)
        return {"memory": self.memory_plan.to_dict(), "ngram_table": ngram_table, "speculate": drafts}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; results are in the order of the prompts.

        ``params``: one for all, one for each, or None for `default_sampling_params`. ``priority``: of each prompt
        (None: 0 for all); of those that wait the lowest run first. Raises `RequestError` before anything runs if one of
        the requests cannot be served. Of several, one that is given up later (its logits were NaN, or a step failed
        that it was in) has the finish reason ``error`` and a `DroppedError` in ``RequestOutput.error``, and the others
        go on; what leaves none of them a result is raised.
        """
        prompt_list = [prompts] if isinstance(prompts, str | Mapping) else _checked_list("prompts", prompts)
        priorities = [0] * len(prompt_list) if priority is None else _checked_list("priority", priority)
        if len(priorities) != len(prompt_list):
            raise RequestError(f"{len(priorities)} priorities for {len(prompt_list)} prompts; give one for each prompt")
        each = zip(prompt_list, self._params(params, len(prompt_list)), priorities, strict=True)
        return self._run([self.make_sequence(prompt, one, priority=level) for prompt, one, level in each])

    def chat(
        self,
        messages: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several (a list of such lists).

        A message is ``{"role": ..., "content": ...}``; see `render_chat` for the template's variables.
        """
        is_several = isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple)
        conversations = messages if is_several else [messages]
        sequences = []
        for conversation, one in zip(conversations, self._params(params, len(conversations)), strict=True):
            text = self.render_chat(conversation, tools, enable_thinking, **template_variables)
            sequences.append(self.make_sequence({"prompt": text, "add_special_tokens": False}, one))
        return self._run(sequences)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Complete one prompt piece by piece. Closing the iterator early drops the request."""
        sequence = self.make_sequence(prompt, self._params(params, 1)[0])
        return self._stream(sequence)

    def score(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        """Float32 logits ``[T, vocab_size]`` of one sequence: row t predicts the token after ``token_ids[t]``.

        It needs memory beside that of open streams; `RequestError` if they leave too little.
        """
        return self.core.score(token_ids)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        **template_variables: Any,
    ) -> str:
        """The prompt text of a conversation by the checkpoint's chat template."""
        if self._chat_template is None or self.tokenizer is None:
            raise RequestError("this bundle has no chat template or no tokenizer; use generate with token ids")
        return render_chat(self._chat_template, messages, tools, enable_thinking=enable_thinking, **template_variables)

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.default_sampling_params] * count
        checked = _checked_list("params", params)
        if len(checked) != count:
            raise RequestError(f"{len(checked)} SamplingParams for {count} prompts; give one, or one for each prompt")
        return checked

    def make_sequence(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None, priority: int = 0
    ) -> RequestSequence:
        """Check a request and make its sequence, for `core`; any thread may. `RequestError` if it cannot be served."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params has {params!r}; SamplingParams were expected")
        if request_id is not None and not isinstance(request_id, str):
            raise RequestError(f"request_id is {request_id!r}; a str was expected")
        if not isinstance(priority, int):
            raise RequestError(f"priority is {priority!r}; an integer was expected")
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        if not isinstance(prompt, Mapping) or not {"prompt", "prompt_token_ids"} & prompt.keys():
            raise RequestError(f"prompt {prompt!r} is neither text nor a dict with 'prompt' or 'prompt_token_ids'")
        if "prompt_token_ids" in prompt:
            return self.core.make_sequence(None, prompt["prompt_token_ids"], params, request_id, priority)
        if self.tokenizer is None:
            raise RequestError("this bundle has no tokenizer; give the prompt as {'prompt_token_ids': [...]}")
        token_ids = self.tokenizer.encode(prompt["prompt"], add_special_tokens=prompt.get("add_special_tokens", True))
        return self.core.make_sequence(prompt["prompt"], token_ids, params, request_id, priority)

    def _run(self, sequences: Sequence[RequestSequence]) -> list[RequestOutput]:
        try:
            for sequence in sequences:
                self.core.add(sequence)
            while unfinished := [each for each in sequences if each.finish_reason is None and each.error is None]:
                try:
                    self.core.step()
                except Exception as error:
                    if all(sequence.error is not None for sequence in sequences):
                        raise
                    self.core.go_on_after(error, unfinished)
        finally:
            for sequence in sequences:
                self.core.abort(sequence)
        errors = [sequence.error for sequence in sequences if sequence.error is not None]
        if errors and len(errors) == len(sequences):
            raise errors[0]
        return [sequence.request_output() for sequence in sequences]

    def _stream(self, sequence: RequestSequence) -> Stream:
        num_shown, is_finished = 0, False
        try:
            self.core.add(sequence)
            while not is_finished:
                # The steps of other requests advance this one, too.
                while sequence.num_output_tokens == num_shown:
                    if sequence.error is not None:
                        raise sequence.error
                    self.core.step()
                with self.core.lock:
                    chunk = sequence.chunk_since(num_shown)
                num_shown, is_finished = num_shown + len(chunk.token_ids), chunk.finish_reason is not None
                yield chunk
        finally:
            self.core.abort(sequence)


def _checked_path(name: str, path: Any) -> Path:
    if not isinstance(path, str | PathLike):
        raise BundleError(f"{name} is {path!r}; the path of a folder was expected")
    return Path(path)


def _checked_list(name: str, items: Any) -> list[Any]:
    if not isinstance(items, Iterable) or isinstance(items, str | bytes | Mapping):
        raise RequestError(f"{name} are a {type(items).__name__}; a list was expected")
    return list(items)

"""Finds the scales of quantized activations: runs the model on a text and notes what each projection reads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from qwen4exp_trt.builder.policy import is_of_token_mixer
from qwen4exp_trt.errors import BuildError, RequestError
from qwen4exp_trt.plugins.number_formats import E2M1_MAX, E4M3_MAX
from qwen4exp_trt.plugins.registry import spec_of
from qwen4exp_trt.runtime.calibration import Calibration
from qwen4exp_trt.runtime.engine_core import EngineCore
from qwen4exp_trt.runtime.evaluation import default_window
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.ngram_rows import NgramRows
from qwen4exp_trt.runtime.ngram_table import TokenWindow
from qwen4exp_trt.runtime.program import Program, identifier_from_path, path_from_identifier
from qwen4exp_trt.runtime.progress_line import Progress
from qwen4exp_trt.runtime.sampler import SampleRequest
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.state_pool import StatePool, allocate_states
from qwen4exp_trt.runtime.step_result import SampledStep, StepResult, sampled_step
from qwen4exp_trt.runtime.text_file import read_text
from qwen4exp_trt.runtime.tokenizer import Tokenizer

DEFAULT_CALIBRATION_TOKENS = 4096
_MOST_CHARACTERS_A_TOKEN = 64
"""On average over a text: a long one is not tokenized whole."""


@dataclass(frozen=True)
class CalibrationText:
    """The beginning of a text, as tokens."""

    path: Path
    sha256: str
    token_ids: tuple[int, ...]

    @classmethod
    def read(
        cls, path: Path, tokenizer: Tokenizer | None, max_tokens: int = DEFAULT_CALIBRATION_TOKENS
    ) -> CalibrationText:
        """The first ``max_tokens`` tokens of a UTF-8 file; `BuildError` for a file or tokenizer that gives too few."""
        if max_tokens < 2:
            raise BuildError(f"a calibration on {max_tokens} tokens is none; some thousand are usual")
        text = read_text(path, BuildError)
        if tokenizer is None:
            raise BuildError(f"{path}: to read it the checkpoint needs a tokenizer.json, which it lacks")
        beginning = text[: max_tokens * _MOST_CHARACTERS_A_TOKEN]
        token_ids = tokenizer.encode(beginning, add_special_tokens=False)[:max_tokens]
        if len(token_ids) < 2:
            raise BuildError(f"{path}: the text has {len(token_ids)} tokens; calibration needs at least two")
        return cls(path, hashlib.sha256(text.encode()).hexdigest(), tuple(token_ids))


def linears_of_layers(program: Program) -> list[str]:
    """The paths of the projections whose activations may be quantized: ``nvfp4_linear`` of the layers' token mixers."""
    nvfp4 = [node for node in program.calls() if (spec := spec_of(node.target)) and spec.name == "nvfp4_linear"]
    paths = [path_from_identifier(node.name) for node in nvfp4]
    return [path for path in paths if is_of_token_mixer(path)]


def calibrate(
    program: Program,
    weights: Mapping[str, Tensor],
    rows: NgramRows,
    limits: EngineLimits,
    text: CalibrationText,
    progress: Progress = lambda done, total: None,
) -> Calibration:
    """The input scale of each of `linears_of_layers`, by running ``program`` with 16-bit activations on the CPU.

    ``weights`` are those of the program by name, ``rows`` complete the inputs of one sequence. The text is cut into
    windows of at most 512 tokens, each computed on its own. `BuildError` naming the projection whose input is all zero
    or not finite.
    """
    window = default_window(limits.max_seq_len)
    num_blocks = -(-(window + 1) // limits.block_size)
    backend = _ObservingBackend(program, weights, rows, linears_of_layers(program), num_blocks)
    core = EngineCore(
        backend,
        EngineLimits(1, window + 1, window, limits.block_size),  # room for the token that ends a prompt's computation
        backend.num_blocks,
        vocab_size=int(program.outputs[0].shape[-1]),
        stop_token_ids=(),
        tokenizer=None,
    )
    starts, error = range(0, len(text.token_ids), window), None
    for index, start in enumerate(starts):
        error = error or _run_prompt(core, text.token_ids[start : start + window])
        progress(index + 1, len(starts))
    scales = {path: _input_scale(path, amax, text) for path, amax in backend.amax.items()}
    if error is not None:
        raise BuildError(f"calibration on {text.path}: {error}") from error
    return Calibration(scales, text.path.name, text.sha256, len(text.token_ids))


def _run_prompt(core: EngineCore, token_ids: Iterable[int]) -> RequestError | None:
    """Compute a prompt as the runtime does, with the logits of its last token only; why they are unusable, if so."""
    sequence = core.make_sequence(None, token_ids, SamplingParams(temperature=0, max_tokens=1))
    core.add(sequence)
    while sequence.finish_reason is None and sequence.error is None:
        core.step()
    return sequence.error


def _input_scale(path: str, amax: Tensor, text: CalibrationText) -> float:
    scale = float(amax.float() / (E2M1_MAX * E4M3_MAX))
    if not 0 < scale < torch.inf:
        found = "zero" if scale == 0 else "not finite"
        raise BuildError(
            f"calibration on {len(text.token_ids)} tokens of {text.path}: the largest input of {path} is {found}; the "
            f"weights before it are damaged, or give another text"
        )
    return scale


class _ObservingBackend:
    """Runs the program op by op for one sequence and notes the largest magnitude that each of some ops reads."""

    device = torch.device("cpu")

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, Tensor],
        rows: NgramRows,
        paths: Iterable[str],
        num_blocks: int,
    ) -> None:
        self.program, self.weights, self.rows, self.num_blocks = program, weights, rows, num_blocks
        self.states = StatePool(program.states, allocate_states(program.states, num_blocks, num_slots=1))
        self.amax = dict.fromkeys(paths, torch.zeros(()))

    def prefetch(self, windows: Iterable[TokenWindow], at_once: bool = False) -> None:
        self.rows.prefetch(windows, at_once)

    def sample_step(
        self, inputs: Mapping[str, Tensor], requests: Sequence[SampleRequest], vocab_limit: int | None
    ) -> SampledStep:
        """As that of `ProgramBackend`."""
        return sampled_step(StepResult(self.run(inputs), None), requests, vocab_limit)

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        observer = _Observer(self.program.module, {identifier_from_path(path) for path in self.amax})
        logits = self.program.run(self.rows.complete(inputs), self.states, self.weights, observer.run)["logits"]
        for path, amax in self.amax.items():
            # A NaN stays.
            self.amax[path] = torch.maximum(amax, observer.amax[identifier_from_path(path)])
        return logits.float()


class _Observer(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, names: set[str]) -> None:
        super().__init__(module)
        self.names, self.amax = names, dict[str, Tensor]()

    def run_node(self, n: fx.Node) -> Any:
        if n.name in self.names:
            x = self.env[n.args[0]]  # type: ignore[index]
            self.amax[n.name] = x.abs().amax().float()
        return super().run_node(n)

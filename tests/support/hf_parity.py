"""Our runtime beside `transformers` on one checkpoint: how the two are run, and when they are equal.

Tolerance, stated once. An error is ``max |reference - ours| / max |reference|`` over all logits of a prompt. In
float32 it is at most `REFERENCE_BOUND` against transformers, which sums in another order, and at most `SELF_BOUND`
between two ways of running our own program. The greedy token of each row must be equal; where it is not, the
reference must rate both tokens equal within the same bound. `check_bf16` says what holds in BF16.

Ties. transformers takes ``torch.topk`` of the indexer's group scores and of the router's probabilities, whose order
among equals is unspecified. The contract of our ops is: higher score first, then the lower index. Scores of exactly
zero (all index heads dead behind the relu) are common, so the reference runs under `StableTopk`, which gives its
``topk`` the same order and changes nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from model_zoo import write_hf_checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qwen4exp_trt.builder.build import build_bundle
from qwen4exp_trt.builder.options import BuildOptions
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.runtime import LLM, SamplingParams
from qwen4exp_trt.runtime.backend import EagerBackend
from qwen4exp_trt.runtime.engine_core import EngineCore
from qwen4exp_trt.runtime.scheduler import ScheduledSequence
from qwen4exp_trt.runtime.sequence import Sequence as RequestSequence
from qwen4exp_trt.runtime.specs import StateKind
from qwen4exp_trt.runtime.step_inputs import build_step_inputs

REFERENCE_BOUND = 1e-4
SELF_BOUND = 1e-5

BF16_MEDIAN_RATIO = 1.1
BF16_RMS_RATIO = 1.5

VISIBLE = 100 * REFERENCE_BOUND
"""How far a wrong model must be from the right one for a parity test to be worth something."""

EOS = 3
"""The eos token of the tiny models."""

SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "ple_layer_ids": [1],
}
"""Overrides of the tiny config: one layer of each kind, the first with PLE."""

Edit = Callable[[Path], None]
"""Changes a checkpoint on disk after transformers has written and read it."""


class StableTopk(TorchFunctionMode):
    """``torch.topk`` with the order of our contract: descending, equal values in ascending index order."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **(kwargs or {}))
        values, k, dim = _topk_arguments(*args, **(kwargs or {}))
        ordered = values.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk([part.narrow(dim, 0, k) for part in ordered])


def _topk_arguments(values: Tensor, k: int, dim: int = -1) -> tuple[Tensor, int, int]:
    return values, k, dim


@dataclass(frozen=True)
class Pair:
    """A transformers model, and our runtime on a bundle of the same checkpoint."""

    reference: Any
    llm: LLM
    checkpoint: Path

    @property
    def backend(self) -> EagerBackend:
        backend = self.llm.core.backend
        assert isinstance(backend, EagerBackend)
        return backend

    def core(self, **limits: int) -> EngineCore:
        """A serving loop on the same weights and states, with other limits (``prefill_chunk``, ``max_batch_size``)."""
        core = self.llm.core
        return EngineCore(
            core.backend, replace(core.limits, **limits), core.scheduler.num_blocks, core.vocab_size, (), None
        )

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_dir(self.checkpoint)

    def state(self, kind: StateKind) -> Tensor:
        """The buffer of the only state of this kind."""
        (spec,) = (spec for spec in self.backend.program.states if spec.kind is kind)
        return self.backend.states[spec.name]

    def check(self, token_ids: Sequence[int]) -> Tensor:
        """Score a prompt on both sides, hold them to the bound, and return the reference's logits ``[T, V]``."""
        expected = reference_logits(self.reference, token_ids)
        assert_logits_equal(expected, self.llm.score(token_ids), REFERENCE_BOUND)
        return expected


PairFactory = Callable[..., Pair]
"""`make_pair` without a folder; the tests' ``make`` fixture is one that keeps what it made."""


def make_pair(
    folder: Path,
    config_dict: dict[str, Any],
    edit: Edit | None = None,
    dtype: str = "float32",
    seed: int = 0,
    **build: int,
) -> Pair:
    """Write a random checkpoint with transformers, read it back with transformers, build it and load the bundle."""
    write_hf_checkpoint(folder / "checkpoint", config_dict, seed, dtype)
    reference = load_reference(folder / "checkpoint", dtype)
    if edit is not None:
        edit(folder / "checkpoint")
    llm = build_llm(folder / "checkpoint", folder / "bundle", dtype, **build)
    return Pair(reference, llm, folder / "checkpoint")


def build_llm(checkpoint: Path, output: Path, dtype: str, **build: Any) -> LLM:
    """Build a bundle and load it. By default prompts of up to 128 tokens are scored in one step."""
    limits = {"max_batch_size": 16, "max_seq_len": 512, "prefill_chunk": 128, "block_size": 24} | build
    build_bundle(BuildOptions(checkpoint=checkpoint, output=output, activation_dtype=dtype, **limits))
    return LLM(output)


def load_reference(checkpoint: Path, dtype: str) -> Any:
    """The transformers model of a checkpoint with its weights cast to ``dtype``; eager attention."""
    from transformers.models.qwen4_exp import modeling_qwen4_exp

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    name = "Qwen4ExpForConditionalGeneration" if "text_config" in config else "Qwen4ExpForCausalLM"
    model_class = getattr(modeling_qwen4_exp, name)
    return model_class.from_pretrained(checkpoint, dtype=getattr(torch, dtype), attn_implementation="eager").eval()


def reference_modules(reference: Any, class_name: str) -> list[Any]:
    """The modules of a transformers class, named without its prefix; at least one."""
    found = [module for module in reference.modules() if type(module).__name__ == f"Qwen4ExpText{class_name}"]
    assert found, class_name
    return found


@torch.no_grad()
def reference_logits(reference: Any, token_ids: Sequence[int], positions: Tensor | None = None) -> Tensor:
    """Logits ``[T, V]`` of one prompt in one pass; ``positions`` ``[3, T]`` for MRoPE."""
    position_ids = None if positions is None else positions[:, None]
    with StableTopk():
        out = reference(torch.tensor([list(token_ids)]), position_ids=position_ids, use_cache=False)
    return out.logits[0]


@torch.no_grad()
def reference_decode(reference: Any, token_ids: Sequence[int], prompt_len: int) -> Tensor:
    """Logits ``[T - prompt_len + 1, V]`` of the last prompt token and of the later ones, run one by one on a cache."""
    ids = torch.tensor([list(token_ids)])
    rows = []
    with StableTopk():
        out = reference(ids[:, :prompt_len], use_cache=True)
        rows.append(out.logits[0, -1])
        for t in range(prompt_len, ids.shape[1]):
            out = reference(ids[:, t : t + 1], cache=out.cache, use_cache=True)
            rows.append(out.logits[0, -1])
    return torch.stack(rows)


def relative_error(expected: Tensor, got: Tensor) -> float:
    """``max |expected - got| / max |expected|``; values that are not finite fail at once."""
    assert expected.shape == got.shape, (expected.shape, got.shape)
    assert expected.isfinite().all() and got.isfinite().all()
    return float((expected - got).abs().max() / expected.abs().max())


def assert_logits_equal(expected: Tensor, got: Tensor, bound: float) -> None:
    """Hold ``got`` ``[T, V]`` to ``bound``, and each greedy token to that of ``expected`` or to a tie with it."""
    error = relative_error(expected, got)
    assert error <= bound, f"relative error {error:.1e}, first in row {_first_bad_row(expected, got, bound)}"
    assert_greedy_tokens(expected, got.argmax(1), bound)


def assert_greedy_tokens(expected: Tensor, token_ids: Tensor, bound: float) -> None:
    """Each token must be the best of its row of ``expected`` ``[T, V]``, or tie with it within ``bound``."""
    lost = expected.amax(1) - expected.gather(1, token_ids[:, None]).squeeze(1)
    assert float(lost.max()) <= bound * float(expected.abs().max()), f"greedy tokens differ in row {int(lost.argmax())}"


def _first_bad_row(expected: Tensor, got: Tensor, bound: float) -> int:
    return int(((expected - got).abs().amax(1) > bound * expected.abs().max()).nonzero()[0])


def random_prompt(length: int, seed: int = 0, eos: Sequence[int] = (), vocab_size: int = 96) -> list[int]:
    """Random ids without `EOS`, then `EOS` at the places ``eos``."""
    ids = torch.randint(EOS + 1, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    for place in eos:
        ids[place] = EOS
    return ids


def generate_greedy(
    core: EngineCore, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[tuple[list[int], Tensor]]:
    """Token ids and log-probabilities ``[max_tokens, V]`` of each prompt, all served together, eos ignored."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=core.vocab_size)
    sequences = [core.make_sequence(None, list(prompt), params) for prompt in prompts]
    for sequence in sequences:
        core.add(sequence)
    while any(sequence.finish_reason is None for sequence in sequences):
        core.step()
    return [greedy_result(sequence, core.vocab_size) for sequence in sequences]


def greedy_result(sequence: RequestSequence, vocab_size: int) -> tuple[list[int], Tensor]:
    """Token ids and log-probabilities ``[N, V]`` of a sequence that asked for all of them."""
    output = sequence.request_output().outputs[0]
    assert output.logprobs is not None
    rows = [[entries[token].logprob for token in range(vocab_size)] for entries in output.logprobs]
    return output.token_ids, torch.tensor(rows)


class Stepper:
    """Runs one sequence piece by piece on a core, as the scheduler might, and gives the logits of every token."""

    def __init__(self, core: EngineCore, token_ids: Sequence[int]) -> None:
        self.core = core
        self.sequence = core.make_sequence(None, list(token_ids), SamplingParams(max_tokens=1))
        assert core.scheduler.acquire_memory(self.sequence)

    def next_entry(self, num_tokens: int) -> ScheduledSequence:
        """The next tokens, for a step that the caller runs."""
        return ScheduledSequence(self.sequence, num_tokens)

    def run(self, num_tokens: int) -> Tensor:
        """Logits ``[num_tokens, V]`` of the next tokens."""
        logits = self.core.backend.run(build_step_inputs([self.next_entry(num_tokens)], all_rows=True)[0])
        self.sequence.num_computed += num_tokens
        return logits

    def finish(self) -> None:
        self.core.abort(self.sequence)


def score_in_pieces(core: EngineCore, token_ids: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Logits ``[T, V]`` of a prompt that is run in steps of ``sizes`` tokens."""
    assert sum(sizes) == len(token_ids)
    stepper = Stepper(core, token_ids)
    logits = torch.cat([stepper.run(size) for size in sizes])
    stepper.finish()
    return logits


@dataclass(frozen=True)
class Bf16Errors:
    """What BF16 arithmetic costs, relative to the exact logits: over all of them, and in the median token."""

    rms: float
    median: float

    @classmethod
    def of(cls, exact: Tensor, got: Tensor) -> Bf16Errors:
        """Logits ``[T, V]`` of all prompts, one after another."""
        assert got.isfinite().all()
        per_token = (got - exact).norm(dim=1) / exact.norm(dim=1)
        return cls(float((got - exact).norm() / exact.norm()), float(per_token.median()))


def check_bf16(exact: Tensor, theirs: Tensor, ours: Tensor) -> None:
    """Hold our BF16 logits ``[T, V]`` to the error that transformers has in BF16.

    ``exact`` is the reference in float32 on the same BF16 weights; what transformers loses against it in BF16 is the
    cost of its own rounding points, and other rounding points are as good if they cost no more. The median token
    shows rounding alone: measured, ours loses 0.75 to 0.85 of what transformers loses, since our ops round less often.
    The RMS is ruled by the few tokens (about 1 in 100) where rounding flips a near tie of the router or the indexer,
    and by what they leave in the states. Either side may have more of them by chance (measured 0.7 to 0.9 over some
    hundred tokens, up to 1.9 in one prompt), so its bound is wider, and it needs several prompts.
    """
    reference, own = Bf16Errors.of(exact, theirs), Bf16Errors.of(exact, ours)
    assert own.median <= BF16_MEDIAN_RATIO * reference.median, (reference, own)
    assert own.rms <= BF16_RMS_RATIO * reference.rms, (reference, own)


def bf16_logits(checkpoint: Path, llm: LLM, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Logits ``[T, V]`` of all prompts: exact, of transformers in BF16, and of ``llm``."""
    exact, rounded = (load_reference(checkpoint, dtype) for dtype in ("float32", "bfloat16"))
    return (
        torch.cat([reference_logits(exact, prompt) for prompt in prompts]),
        torch.cat([reference_logits(rounded, prompt) for prompt in prompts]).float(),
        torch.cat([llm.score(prompt) for prompt in prompts]),
    )


def edit_config(path: Path, **changes: Any) -> None:
    """Change keys of a checkpoint's config.json; a value of None removes the key."""
    file = path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}), encoding="utf-8")

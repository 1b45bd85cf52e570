"""What a build will need on its target, from the config alone: memory, and the bytes that decoding a token reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from qwen4exp_trt.builder.weight_formats import Component, Formats, WeightGroup, weight_groups
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.states import state_specs
from qwen4exp_trt.runtime.limits import DRAFT_ROWS, EngineLimits
from qwen4exp_trt.runtime.specs import DTYPE_BYTES, StateKind, StateSpec

RESERVE_BYTES = 2 * 2**30
"""CUDA context, engine, inputs and outputs of a step, and what allocators lose."""


@dataclass(frozen=True)
class Device:
    """What is known about a target."""

    name: str
    usable_bytes: int
    """What a process can have of its memory while the system runs."""
    bytes_per_second: float
    """Of reading memory, as published measurements reached it."""


DEVICES = {"sm121": Device("GB10", usable_bytes=114 * 2**30, bytes_per_second=233e9)}
"""By GPU architecture. A GB10 shows 121.6 GiB, of which 114 to 117 can be used, and its memory runs at 273 GB/s, of
which published measurements reach 231 to 234."""


@dataclass(frozen=True)
class StateUse:
    """The states of one kind, of one sequence at the longest context."""

    num_bytes: int
    token_bytes: int
    """What decoding one token reads and writes of them."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All bytes are those of the limits: ``max_batch_size`` sequences of ``max_seq_len`` tokens."""

    target: str | None
    """None for a bundle without an engine."""
    precision: str
    limits: EngineLimits
    weights: tuple[WeightGroup, ...]
    states: Mapping[StateKind, StateUse]
    page_bytes: int
    """Of the paged states for ``limits.block_size`` tokens of one sequence."""
    logits_row_bytes: int
    activation_bytes: int | None = None
    """None before TensorRT has said it."""

    @property
    def device(self) -> Device | None:
        """The target, if its memory and bandwidth are known."""
        return None if self.target is None else DEVICES.get(self.target)

    @property
    def weight_bytes(self) -> int:
        return sum(group.num_bytes for group in self.weights)

    @property
    def ngram_table_bytes(self) -> int:
        return sum(group.num_bytes for group in self.weights if group.component is Component.NGRAM_TABLE)

    @property
    def sequence_bytes(self) -> int:
        """States of one sequence."""
        return sum(use.num_bytes for use in self.states.values())

    @property
    def state_bytes(self) -> int:
        return self.limits.max_batch_size * self.sequence_bytes

    @property
    def logits_bytes(self) -> int:
        return self.limits.max_logits_rows * self.logits_row_bytes

    @property
    def total_bytes(self) -> int:
        """Without activation memory as long as that is unknown."""
        return self._fixed_bytes + self.state_bytes + self.logits_bytes

    @property
    def _fixed_bytes(self) -> int:
        """What no limit changes; activation memory follows the prefill chunk, but nobody can say how."""
        return self.weight_bytes + RESERVE_BYTES + (self.activation_bytes or 0)

    @property
    def token_bytes(self) -> int:
        """What decoding one token of one sequence at the longest context moves; the new K and V are left out."""
        weights = sum(group.read_bytes for group in self.weights)
        return weights + sum(use.token_bytes for use in self.states.values())

    @property
    def decode_rate(self) -> float | None:
        """The tokens a second of one sequence that the target's bandwidth allows; None for an unknown target."""
        return None if self.device is None else self.device.bytes_per_second / self.token_bytes

    @property
    def missing_bytes(self) -> int:
        """How far the total exceeds the target's memory; 0 if it fits or if that is unknown."""
        return 0 if self.device is None else max(0, self.total_bytes - self.device.usable_bytes)

    @property
    def fitting_limits(self) -> dict[str, int]:
        """Limits of which each alone, lowered that far, makes the plan fit; none if the weights are too large."""
        if self.device is None:
            return {}
        room, batch = self.device.usable_bytes - self._fixed_bytes, self.limits.max_batch_size
        logits = DRAFT_ROWS * self.logits_row_bytes
        paged_bytes = self.limits.blocks_per_seq * self.page_bytes
        pages = (room // batch - logits - (self.sequence_bytes - paged_bytes)) // max(self.page_bytes, 1)
        fitting = {
            "max_seq_len": min(pages * self.limits.block_size, self.limits.max_seq_len),
            "max_batch_size": min(room // (self.sequence_bytes + logits), batch),
        }
        return {name: value for name, value in fitting.items() if value > 0}

    def with_activations(self, activation_bytes: int | None) -> Plan:
        return replace(self, activation_bytes=activation_bytes)


def make_plan(
    config: ModelConfig, limits: EngineLimits, precision: str, target: str | None, formats: Formats | None = None
) -> Plan:
    """The plan of a build; ``formats`` are those of components that the precision does not decide."""
    specs = state_specs(config, precision, limits.block_size)
    states: dict[StateKind, StateUse] = {}
    for spec in specs:
        use, old = _state_use(config, limits, spec), states.get(spec.kind, StateUse(0, 0))
        states[spec.kind] = StateUse(old.num_bytes + use.num_bytes, old.token_bytes + use.token_bytes)
    return Plan(
        target=target,
        precision=precision,
        limits=limits,
        weights=weight_groups(config, precision, formats or {}),
        states=states,
        page_bytes=sum(spec.row_bytes for spec in specs if spec.is_paged),
        logits_row_bytes=config.vocab_size * DTYPE_BYTES[precision],
    )


def _state_use(config: ModelConfig, limits: EngineLimits, spec: StateSpec) -> StateUse:
    """Per-sequence states are read and written; of the KV cache a token reads what it selects, of index keys all."""
    if not spec.is_paged:
        return StateUse(spec.row_bytes, 2 * spec.row_bytes)
    tokens = limits.max_seq_len
    if spec.kind is StateKind.KV_CACHE and config.indexer_budget is not None:
        assert config.indexer_compress_ratio is not None
        tokens = min(tokens, config.indexer_budget + config.indexer_compress_ratio - 1)
    return StateUse(limits.blocks_per_seq * spec.row_bytes, tokens * spec.row_bytes // limits.block_size)

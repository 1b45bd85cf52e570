"""What a build will need on its target, from the config alone: memory, and the bytes that decoding a token reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from qwen4exp_trt.builder.weight_bytes import Component, WeightGroup, weight_groups
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.states import RINGS, draft_state_specs, resolve_kv_dtype, state_specs
from qwen4exp_trt.passes.choose_formats import Formats
from qwen4exp_trt.plugins.cost import (
    StepSize,
    completed_groups,
    moved_kv_tokens,
    ring_bytes,
    scored_groups,
    selected_tokens,
)
from qwen4exp_trt.runtime.limits import DRAFT_ROWS, EngineLimits
from qwen4exp_trt.runtime.load_options import DEFAULT_ROW_CACHE_BYTES
from qwen4exp_trt.runtime.memory_plan import GPU_OVERHEAD_BYTES
from qwen4exp_trt.runtime.specs import DTYPE_BYTES, PleResidency, StateKind, StateSpec, TensorSpec
from qwen4exp_trt.runtime.target_devices import DEVICES, Device

FormatPolicy = Callable[[str, str], Formats]
"""The formats of the weights for the names of a precision and of a format of the n-gram table."""


@dataclass(frozen=True)
class ActivationMemory:
    """The intermediate tensors of a step."""

    num_bytes: int
    is_estimate: bool
    """False when the build of the engine told it."""
    workspace_bytes: int = 0
    """Of them, an estimate of what kernels need beside their operands."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """All that decides about a plan."""

    config: ModelConfig
    limits: EngineLimits
    target: str | None
    """None for a bundle without an engine."""
    precision: str
    ple: str
    has_stored_formats: bool
    """Whether the checkpoint's files told their formats; without them every weight is taken to be stored in float."""
    choose_formats: FormatPolicy
    """Is asked for the formats of ``precision`` and ``ple``, and when something has to become smaller, of others."""
    activations: ActivationMemory
    activation_dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    """``auto`` for the activation dtype."""
    ple_residency: PleResidency = PleResidency.DEVICE
    debug_outputs: tuple[TensorSpec, ...] = ()
    """Plugin inputs that are outputs as well."""

    @property
    def device(self) -> Device | None:
        """The target, if its memory and bandwidth are known."""
        return None if self.target is None else DEVICES.get(self.target)

    @property
    def has_resident_table(self) -> bool:
        """Whether the n-gram table takes memory of the device, or of the only memory that is known of."""
        if self.ple_residency is PleResidency.HOST:
            return self.device is None or self.device.is_unified
        return self.ple_residency is PleResidency.DEVICE

    @property
    def kv_dtype(self) -> str:
        """The dtype of the KV cache."""
        return resolve_kv_dtype(self.activation_dtype, self.kv_cache_dtype)

    def state_specs(self) -> tuple[StateSpec, ...]:
        """Those of the program: with the table on disk its hash, which has a state, is computed by the runtime."""
        specs = state_specs(self.config, self.activation_dtype, self.limits.block_size, self.kv_cache_dtype)
        is_hashed = self.ple_residency is not PleResidency.DISK
        return tuple(spec for spec in specs if is_hashed or spec.kind is not StateKind.NGRAM_IDS)

    def draft_state_specs(self) -> tuple[StateSpec, ...]:
        """Those of the draft head, if there is one."""
        if not self.config.has_draft_head:
            return ()
        return draft_state_specs(self.config, self.activation_dtype, self.limits.block_size, self.kv_cache_dtype)


@dataclass(frozen=True)
class StateUse:
    """The states of one kind, of one sequence at the longest context."""

    num_bytes: int
    token_bytes: int
    """What decoding one token reads and writes of them."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All bytes are those of the limits: ``max_batch_size`` sequences of ``max_seq_len`` tokens."""

    request: PlanRequest
    weights: tuple[WeightGroup, ...]
    states: Mapping[StateKind, StateUse]
    draft_states: Mapping[StateKind, StateUse]
    """Those of the draft head, and what drafting one token moves of them; empty without one."""

    @property
    def device(self) -> Device | None:
        return self.request.device

    @property
    def weight_bytes(self) -> int:
        """Of the resident weights."""
        return sum(group.num_bytes for group in self.weights if self.is_resident(group))

    def is_resident(self, group: WeightGroup) -> bool:
        return group.component is not Component.NGRAM_TABLE or self.request.has_resident_table

    @property
    def ngram_table_bytes(self) -> int:
        """Of the n-gram table, wherever it is."""
        return sum(group.num_bytes for group in self._table)

    @property
    def staged_bytes(self) -> int:
        """Rows of the n-gram table from disk: of the largest step, and where memory is one those that are kept."""
        request = self.request
        if request.ple_residency is not PleResidency.DISK:
            return 0
        token_bytes = request.config.ple_embed_dim * DTYPE_BYTES[request.activation_dtype]
        kept_bytes = DEFAULT_ROW_CACHE_BYTES if request.device is None or request.device.is_unified else 0
        return len(request.config.ple_layers) * (request.limits.max_step_tokens * token_bytes + kept_bytes)

    @property
    def _table(self) -> list[WeightGroup]:
        return [group for group in self.weights if group.component is Component.NGRAM_TABLE]

    @property
    def sequence_bytes(self) -> int:
        """States of one sequence."""
        return sum(use.num_bytes for use in (*self.states.values(), *self.draft_states.values()))

    @property
    def state_bytes(self) -> int:
        return self.request.limits.max_batch_size * self.sequence_bytes

    @property
    def logits_bytes(self) -> int:
        config, columns = self.request.config, self.request.config.vocab_size
        if config.has_draft_head:
            columns += config.draft_vocab_size or config.vocab_size
        return self.request.limits.max_logits_rows * columns * DTYPE_BYTES[self.request.activation_dtype]

    @property
    def stack_bytes(self) -> int:
        """What the model hands to the draft head of the largest step, and the draft head to itself."""
        config, limits = self.request.config, self.request.limits
        rows = limits.max_step_tokens + limits.max_logits_rows
        return rows * config.stack_width * DTYPE_BYTES[self.request.activation_dtype] if config.has_draft_head else 0

    @property
    def debug_bytes(self) -> int:
        """Of the plugin inputs that are outputs, in the largest step."""
        rows = self.request.limits.largest_step
        return sum(spec.num_bytes(rows) for spec in self.request.debug_outputs)

    @property
    def total_bytes(self) -> int:
        step_bytes = self.staged_bytes + self.logits_bytes + self.stack_bytes + self.debug_bytes
        step_bytes += self.request.activations.num_bytes
        return self.weight_bytes + self.state_bytes + step_bytes + GPU_OVERHEAD_BYTES

    @property
    def token_bytes(self) -> int:
        """What decoding one token of one sequence at the longest context moves, without drafts."""
        weights = sum(group.read_bytes for group in self.weights if not group.component.is_of_draft_head)
        return weights + sum(use.token_bytes for use in self.states.values())

    @property
    def draft_token_bytes(self) -> int:
        """What the draft head moves, likewise, for each token that it drafts; 0 without one."""
        config = self.request.config
        if not config.has_draft_head:
            return 0
        shared = {Component.EMBED_TOKENS} | ({Component.LM_HEAD} if config.draft_vocab_size is None else set())
        used = [group for group in self.weights if group.component.is_of_draft_head or group.component in shared]
        return sum(group.read_bytes for group in used) + sum(use.token_bytes for use in self.draft_states.values())

    @property
    def decode_rate(self) -> float | None:
        """The tokens a second of one sequence that the target's bandwidth allows; None for an unknown target."""
        return None if self.device is None else self.device.bytes_per_second / self.token_bytes

    @property
    def missing_bytes(self) -> int:
        """How far the total exceeds the target's memory; 0 if it fits or if that is unknown."""
        return 0 if self.device is None else max(0, self.total_bytes - self.device.usable_bytes)

    def with_debug_outputs(self, debug_outputs: tuple[TensorSpec, ...]) -> Plan:
        """With those of the engines."""
        return replace(self, request=replace(self.request, debug_outputs=debug_outputs))

    def with_activations(self, activation_bytes: int | None) -> Plan:
        """With what the engine's build told; if it told nothing, the same."""
        if activation_bytes is None:
            return self
        activations = replace(self.request.activations, num_bytes=activation_bytes, is_estimate=False)
        return replace(self, request=replace(self.request, activations=activations))


def make_plan(request: PlanRequest) -> Plan:
    """The plan of a build, or of one that could be asked for instead."""
    formats = request.choose_formats(request.precision, request.ple)
    return Plan(
        request=request,
        weights=weight_groups(request.config, formats, request.activation_dtype),
        states=_state_uses(request, request.state_specs()),
        draft_states=_state_uses(request, request.draft_state_specs()),
    )


def _state_uses(request: PlanRequest, specs: Iterable[StateSpec]) -> dict[StateKind, StateUse]:
    states: dict[StateKind, StateUse] = {}
    for spec in specs:
        use, old = _state_use(request, spec), states.get(spec.kind, StateUse(0, 0))
        states[spec.kind] = StateUse(old.num_bytes + use.num_bytes, old.token_bytes + use.token_bytes)
    return states


def _state_use(request: PlanRequest, spec: StateSpec) -> StateUse:
    """Of the KV cache a token reads what it selects, of index keys all; no draft is open."""
    config, limits = request.config, request.limits
    step = StepSize(num_seqs=1, num_tokens=1, context_len=limits.max_seq_len - 1)
    ratio = config.indexer_compress_ratio or 0
    selected = (config.indexer_budget or 0) // ratio if ratio else 0
    if spec.kind is StateKind.KV_CACHE:
        moved = moved_kv_tokens(step, selected_tokens(selected, ratio)) * (spec.row_bytes // limits.block_size)
    elif spec.kind is StateKind.INDEX_K_CACHE:
        keys = scored_groups(step, ratio, selected) + completed_groups(step, ratio)
        moved = keys * (spec.row_bytes // (limits.block_size // ratio))
    elif spec.kind in RINGS:
        rows = spec.shape[1]
        assert isinstance(rows, int)
        every = config.ngram_size if spec.kind is StateKind.PLE_CONV_STATE else 1  # a dilated convolution skips rows
        moved = ring_bytes(step, spec.row_bytes // rows, rows, rows_read=(rows - DRAFT_ROWS) // every)
    else:
        moved = 0 if spec.kind is StateKind.DRAFT_ROWS else 2 * spec.row_bytes
    return StateUse(spec.row_bytes * (limits.blocks_per_seq if spec.is_paged else 1), moved)

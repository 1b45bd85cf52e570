"""Decides in which format a bundle holds each weight, from what the checkpoint has and what was asked for."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from qwen4exp_trt.builder.weight_bytes import Component, component_of
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.weights import DRAFT_LM_HEAD, expected_weights, is_of_draft_head
from qwen4exp_trt.passes.choose_formats import MOE_OPS
from qwen4exp_trt.plugins.number_formats import NVFP4_BLOCK
from qwen4exp_trt.runtime.checkpoint import listing
from qwen4exp_trt.runtime.weight_formats import WeightFormat

FLOAT, FP8, FP8_BLOCKS, NVFP4 = WeightFormat.FLOAT, WeightFormat.FP8, WeightFormat.FP8_BLOCKS, WeightFormat.NVFP4

W4A4 = "nvfp4-w4a4"
PRECISIONS = ("checkpoint", "nvfp4", W4A4, "bf16")
PLE_PRECISIONS = ("checkpoint", "nvfp4", "bf16")

_CONVERTED = re.compile(
    r"\.mlp\.experts\.|\.mlp\.shared_expert\.|^(mtp\.)?lm_head\.|"
    r"\.linear_attn\.(in_proj_qkv|in_proj_z|out_proj)\.|\.self_attn\.[qkvo]_proj\."
)
"""The weights that NVFP4 precisions convert. All others are too sensitive or too small: hyper-connections, router,
indexer, the gates and the convolution of linear attention, norms, embeddings, the n-gram projections."""
_KEPT_BY_LINEARS = re.compile(r"\.ple\.(key|value)_proj\.")
"""Weights that are never converted, but whose op takes the format of a checkpoint that quantized them."""
_EXPERTS = re.compile(r"^(.*\.mlp)\.experts\.")

_MOE_FORMATS = {(FLOAT, FLOAT), *MOE_OPS}
"""Formats of the routed experts and of the shared expert for which there is an op."""


@dataclass(frozen=True)
class Choice:
    """What becomes of one weight."""

    name: str
    """Canonical."""
    stored: tuple[WeightFormat, ...]
    """In the checkpoint; several if it is in tensors of several formats."""
    format: WeightFormat
    """In the bundle."""
    reason: str = ""
    """Why it is not what was asked for; empty if it is."""
    has_nvfp4_activations: bool = False
    """Whether the projection that it belongs to reads its input in NVFP4 as well."""

    @property
    def is_kept(self) -> bool:
        return self.stored == (self.format,)

    @property
    def is_converted(self) -> bool:
        """Whether it is quantized once at the build, since that loses something and takes long."""
        return self.format is NVFP4 and not self.is_kept


def choose_weight_formats(
    config: ModelConfig,
    stored: Mapping[str, tuple[WeightFormat, ...]],
    precision: str,
    ple_precision: str,
    keep: Sequence[str] = (),
) -> tuple[Choice, ...]:
    """The choice of every weight of ``config``, in the order of `expected_weights`.

    ``stored``: the formats of each in the checkpoint. ``keep``: shell patterns of canonical names that stay as the
    checkpoint has them; `BuildError` for one that matches none.
    """
    shapes = expected_weights(config)
    choices = {name: _choose(name, shape, stored[name], precision, ple_precision) for name, shape in shapes.items()}
    for pattern in keep:
        matching = [name for name in choices if fnmatchcase(name, pattern)]
        if not matching:
            names = [name for name in choices if _is_convertible(name)]
            raise BuildError(
                f"--keep {pattern!r} matches no weight; the pattern is for names such as {listing(names[:4])}"
            )
        for name in matching:
            kept = _choose(name, shapes[name], stored[name], "checkpoint", "checkpoint")
            if kept.format is not choices[name].format:
                choices[name] = replace(kept, reason=kept.reason or f"--keep {pattern}")
    return tuple(_fit_moe_ops(choices).values())


def is_table(name: str) -> bool:
    """Whether it is the n-gram table, whose format is chosen on its own."""
    return component_of(name) is Component.NGRAM_TABLE


def is_of_token_mixer(name: str) -> bool:
    """Whether a weight or op is of an attention or linear-attention module: what W4A4 quantizes the activations of."""
    return re.search(r"\.(linear_attn|self_attn)\.", name) is not None


def _is_convertible(name: str) -> bool:
    return _CONVERTED.search(name) is not None


def _choose(
    name: str, shape: Sequence[int], stored: tuple[WeightFormat, ...], precision: str, ple_precision: str
) -> Choice:
    asked = ple_precision if is_table(name) else precision
    if asked == "bf16":
        return Choice(name, stored, FLOAT)
    if asked in ("nvfp4", W4A4) and (is_table(name) or _is_convertible(name)):
        if shape[-1] % NVFP4_BLOCK:
            return Choice(name, stored, FLOAT, f"its rows of {shape[-1]} are no multiple of {NVFP4_BLOCK}")
        # Calibration runs the model alone: the draft head, whose text is the model's in any case, has no scales.
        has_nvfp4_activations = precision == W4A4 and is_of_token_mixer(name) and not is_of_draft_head(name)
        return Choice(name, stored, NVFP4, has_nvfp4_activations=has_nvfp4_activations)
    if len(stored) != 1:
        return Choice(name, stored, FLOAT, "the checkpoint has it in several formats")
    held = (FLOAT, FP8, NVFP4) if is_table(name) else (FLOAT, FP8, FP8_BLOCKS, NVFP4)
    has_op = is_table(name) or _is_convertible(name) or _KEPT_BY_LINEARS.search(name) is not None
    (format,) = stored
    if name == DRAFT_LM_HEAD and format is FP8_BLOCKS:
        return Choice(name, stored, FLOAT, "its rows are some of those that share a scale")
    if has_op and format in held:
        return Choice(name, stored, format)
    return Choice(name, stored, FLOAT, "" if format is FLOAT else "its op takes no such format")


def _fit_moe_ops(choices: Mapping[str, Choice]) -> dict[str, Choice]:
    """``choices`` with the weights of each mixture of experts in formats that one op takes together."""
    fitted = dict(choices)
    for block in dict.fromkeys(match[1] for name in choices if (match := _EXPERTS.match(name))):
        experts = [name for name in choices if name.startswith(f"{block}.experts.")]
        shared = [name for name in choices if name.startswith(f"{block}.shared_expert.")]
        routed_format = _make_equal(fitted, experts, "the op takes all routed experts in one format")
        shared_format = _make_equal(fitted, shared, "the op takes the whole shared expert in one format")
        if (routed_format, shared_format) not in _MOE_FORMATS:
            reason = f"no op has a {shared_format} shared expert beside {routed_format} routed ones"
            _set_format(fitted, shared, FLOAT, reason)
    return fitted


def _make_equal(choices: dict[str, Choice], names: Sequence[str], reason: str) -> WeightFormat:
    """The format of all of ``names``; if they were chosen to differ, the one that all are stored in, or FLOAT."""
    formats = {choices[name].format for name in names}
    if len(formats) == 1:
        return formats.pop()
    # One of them is kept as it is stored, and the others follow it.
    stored = {format for name in names for format in choices[name].stored}
    common = stored.pop() if len(stored) == 1 else FLOAT
    _set_format(choices, names, common, reason)
    return common


def _set_format(choices: dict[str, Choice], names: Collection[str], format: WeightFormat, reason: str) -> None:
    for name in names:
        old = choices[name]
        if old.format is not format:
            choices[name] = Choice(name, old.stored, format, reason)

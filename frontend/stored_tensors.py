"""The tensors of a checkpoint under canonical names: which the model claims, and everything that is wrong with them."""

from __future__ import annotations

import re
from enum import StrEnum

import torch

from qwen4exp_trt.errors import CheckpointError
from qwen4exp_trt.frontend.quantized_weights import (
    INPUT_SCALE,
    SCALE_SUFFIXES,
    ScaleFormat,
    StoredFormat,
    choose_format,
    formats_for,
    missing_suffixes,
)
from qwen4exp_trt.frontend.stored_weights import Shape, StoredWeight
from qwen4exp_trt.runtime.checkpoint import Checkpoint, listing
from qwen4exp_trt.runtime.specs import Source, WeightRecipe
from qwen4exp_trt.runtime.tensor_reader import TensorReader
from qwen4exp_trt.runtime.weight_formats import PACKED_FP4, Part, WeightFormat
from qwen4exp_trt.runtime.weights import dequantize, transform

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
_DRAFT_HEAD = "mtp"
_SET_ASIDE = {
    _DRAFT_HEAD: re.compile(r"^mtp\."),
    "vision": re.compile(r"^(model\.)?visual\."),
    "unused": re.compile(r"\b(hashstats_\w+|token_lookup|hyper_connection_mixer\.block_inject_weight)\b"),
}
"""Checkpoint tensors that the text model does not have, by what they belong to."""
_ACTIVATION_SCALES = "activation scales"
_SHARD = re.compile(r"shard_\d+\.$")


class Problem(StrEnum):
    """What can be wrong with a checkpoint, in the order of the message."""

    MISSING = "missing"
    MISSING_SCALES = "missing scales"
    UNEXPECTED = "unexpected"
    ORPHAN_SCALES = "scales of no quantized weight"
    WRONG_SHAPE = "wrong shape"
    WRONG_DTYPE = "wrong dtype"
    WRONG_SCALES = "scales that are not positive and finite"
    WRONG_CONSTANTS = "wrong hash constants"
    TWICE = "one weight under two names"


class StoredTensors:
    """Problems are collected, so that `raise_problems` can list all of them.

    Tensors of the draft head are set aside unless ``has_draft_head``.
    """

    def __init__(self, checkpoint: Checkpoint, has_draft_head: bool = False) -> None:
        self.checkpoint = checkpoint
        self._to_set_aside = {
            kind: pattern for kind, pattern in _SET_ASIDE.items() if kind != _DRAFT_HEAD or not has_draft_head
        }
        self.stored: dict[str, str] = {}
        """Canonical name -> name in the checkpoint."""
        self.set_aside: dict[str, list[str]] = {kind: [] for kind in (*_SET_ASIDE, _ACTIVATION_SCALES)}
        self._claimed: set[str] = set()
        self._scales_to_check: dict[str, None] = {}
        self._problems: dict[Problem, dict[str, None]] = {problem: {} for problem in Problem}
        for name in checkpoint.names:
            self._add(name)

    def _add(self, name: str) -> None:
        kind = next((kind for kind, pattern in self._to_set_aside.items() if pattern.search(name)), None)
        if kind is not None:
            self.set_aside[kind].append(name)
            return
        canonical = name.removeprefix(next(prefix for prefix in _PREFIXES if name.startswith(prefix)))
        if canonical in self.stored:
            self.note(Problem.TWICE, f"{self.stored[canonical]} and {name}")
        self.stored[canonical] = name

    def note(self, problem: Problem, what: str) -> None:
        self._problems[problem][what] = None

    def _note_dtype(self, name: str, expected: tuple[str, ...]) -> None:
        self.note(Problem.WRONG_DTYPE, f"{name} {self.checkpoint.dtype(name)} instead of {' or '.join(expected)}")

    def claim(self, canonical: str, shape: Shape | None) -> StoredWeight:
        """How to get a weight, noting what is wrong with it and its scales; ``shape`` None for any."""
        name = self.stored.get(canonical)
        if name is None:
            self.note(Problem.MISSING, canonical)
            return StoredWeight(shape or (), Source(canonical))
        self._claimed.add(canonical)
        form, stored = self._format(canonical), self.checkpoint.shape(name)
        if form is None:
            dtypes = dict.fromkeys(dtype for form in formats_for(stored) for dtype in form.dtypes)
            self._note_dtype(name, tuple(dtypes))
            return StoredWeight(shape or stored, Source(name))
        found = form.unpacked_shape(stored)
        if shape is not None and found != shape:
            self.note(Problem.WRONG_SHAPE, f"{name} {list(found)} instead of {list(shape)}")
            self._claim_scales(canonical, form, None)
            return StoredWeight(shape, Source(name))
        scales = self._claim_scales(canonical, form, found)
        if len(scales) < len(form.scales) or form.format is WeightFormat.FLOAT:
            return StoredWeight(found, Source(name))
        codes = Source(name) if form.values_per_element == 1 else transform("view", Source(name), dtype=PACKED_FP4)
        parts = {Part.CODES: codes, **scales}
        return StoredWeight(found, dequantize(form.format, parts), form.format, parts)

    def _format(self, canonical: str) -> StoredFormat | None:
        name, scales = self.stored[canonical], self._scales_beside(canonical)
        shapes = {suffix: self.checkpoint.shape(self.stored[scale]) for suffix, scale in scales.items()}
        return choose_format(self.checkpoint.dtype(name), self.checkpoint.shape(name), shapes)

    def _scales_beside(self, canonical: str) -> dict[str, str]:
        """Suffix -> canonical name of the scales of a weight. Shards of a table may share those of the table."""
        if not canonical.endswith(".weight"):
            return {}
        module = canonical.removesuffix("weight")
        modules = (_SHARD.sub("", module), module)
        return {
            suffix: f"{owner}{suffix}"
            for owner in modules
            for suffix in (*SCALE_SUFFIXES, INPUT_SCALE)
            if f"{owner}{suffix}" in self.stored
        }

    def _claim_scales(self, canonical: str, form: StoredFormat, shape: Shape | None) -> dict[Part, WeightRecipe]:
        """The scales of a weight in ``form``; ``shape`` None when their own shapes cannot be judged."""
        beside = self._scales_beside(canonical) if form.scales else {}
        scales: dict[Part, WeightRecipe] = {}
        for scale in form.scales:
            if scale.suffix in beside:
                scales[scale.part] = self._claim_scale(beside[scale.suffix], scale, shape)
            else:
                module = canonical.removesuffix("weight")
                self.note(Problem.MISSING_SCALES, f"{module}{' or '.join(missing_suffixes(form, scale))}")
        activation_scale = beside.get(INPUT_SCALE)
        if activation_scale is not None and activation_scale not in self._claimed:
            self._claimed.add(activation_scale)
            self.set_aside[_ACTIVATION_SCALES].append(self.stored[activation_scale])
        return scales

    def _claim_scale(self, canonical: str, scale: ScaleFormat, weight_shape: Shape | None) -> WeightRecipe:
        self._claimed.add(canonical)
        name = self.stored[canonical]
        found = self.checkpoint.shape(name)
        if self.checkpoint.dtype(name) not in scale.dtypes:
            self._note_dtype(name, scale.dtypes)
        elif scale.is_read_at_once:
            self._scales_to_check[name] = None
        if weight_shape is None:
            return Source(name)
        shapes = scale.shapes(weight_shape)
        if found not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            self.note(Problem.WRONG_SHAPE, f"{name} {list(found)} instead of {wanted}")
        recipe = Source(name) if found == shapes[0] else transform("reshape", Source(name), shape=shapes[0])
        if scale.part is Part.BLOCK_SCALES:
            return transform("check_block_scales", recipe)
        return recipe if self.checkpoint.dtype(name) == "F32" else transform("cast", recipe, dtype="float32")

    def claim_constants(self, canonical: str, values: tuple[int, ...]) -> None:
        """Compare an int64 tensor with ``values``, if the checkpoint has it."""
        name = self.stored.get(canonical)
        if name is None:
            return
        self._claimed.add(canonical)
        if self.checkpoint.dtype(name) != "I64":
            self._note_dtype(name, ("I64",))
        elif (found := self.checkpoint.tensor(name).flatten().tolist()) != list(values):
            self.note(Problem.WRONG_CONSTANTS, f"{name} {found} instead of {list(values)}")

    def raise_problems(self) -> None:
        """Raise one `CheckpointError` if there is any problem; reads the scales that are small."""
        for canonical, name in self.stored.items():
            if canonical not in self._claimed:
                is_scale = canonical.endswith(tuple(f".{suffix}" for suffix in (*SCALE_SUFFIXES, INPUT_SCALE)))
                self.note(Problem.ORPHAN_SCALES if is_scale else Problem.UNEXPECTED, name)
        self._check_scale_values()
        found = [f"{problem} ({len(names)}): {listing(names)}" for problem, names in self._problems.items() if names]
        if found:
            is_of_draft_head = all("mtp." in name for names in self._problems.values() for name in names)
            advice = "; --draft-head none builds without its draft head" if is_of_draft_head else ""
            raise CheckpointError(f"{self.checkpoint.path} does not match its config. {'; '.join(found)}{advice}")

    def _check_scale_values(self) -> None:
        """All scales in one comparison: there are hundreds of thousands, and normally nothing is wrong with them."""
        names = list(self._scales_to_check)
        with TensorReader(self.checkpoint) as reader:
            values = [tensor.float().flatten() for tensor in reader.tensors(names)]
        if not names or bool(_are_scales(torch.cat(values)).all()):
            return
        for name, value in zip(names, values, strict=True):
            if not bool((good := _are_scales(value)).all()):
                self.note(Problem.WRONG_SCALES, f"{name} {value[~good][0].item():g}")


def _are_scales(values: torch.Tensor) -> torch.Tensor:
    return values.isfinite() & (values > 0)

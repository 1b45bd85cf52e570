"""Reads a bundle into an `Inspection`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qwen4exp_trt.builder.inspection.costs import Roofline
from qwen4exp_trt.builder.inspection.document import (
    Component,
    Engine,
    Inspection,
    Op,
    Part,
    Profile,
    State,
    Step,
    Target,
    Weight,
)
from qwen4exp_trt.builder.inspection.engine_report import layers_of_ops, read_engine
from qwen4exp_trt.builder.inspection.program_ops import ProgramOps, read_onnx, readers
from qwen4exp_trt.builder.profiles import profile_dims
from qwen4exp_trt.builder.weight_bytes import Component as ModelPart
from qwen4exp_trt.builder.weight_bytes import find_component
from qwen4exp_trt.errors import RequestError
from qwen4exp_trt.plugins.cost import StepSize
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.runtime.bundle_programs import load_programs
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.manifest import DRAFT_DIR, ENGINE_FILE, LAYERS_FILE, ONNX_FILE, Manifest
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.specs import StateSpec, Transform, WeightRecipe, WeightSpec
from qwen4exp_trt.runtime.step_costs import OpCost, step_costs, step_dims
from qwen4exp_trt.runtime.target_devices import DEVICES, Device
from qwen4exp_trt.runtime.weights import sources_of

MODEL, DRAFT_HEAD = "model", "draft head"
DECODE, PREFILL = "decode", "prefill"
OTHER = "other"

_LAYER = re.compile(r"^(?:mtp\.)?layers\.(\d+)\.")
_OPTIONS = (
    "precision",
    "ple_precision",
    "ple_residency",
    "host_weights",
    "activation_dtype",
    "kv_cache_dtype",
    "target",
    "backend",
    "kernel_targets",
    "vocab_size",
    "stop_token_ids",
)
"""The fields of a manifest that say how the bundle was built."""


@dataclass(frozen=True)
class StepRequest:
    """The steps of which costs are wanted: a token of each sequence, and a full chunk of one prompt."""

    batch: int = 1
    context: int | None = None
    """Tokens of each sequence before the decoding step; None for all but one of the longest sequence."""
    prefill_context: int = 0
    """Tokens of the prompt before the chunk."""

    def sizes(self, limits: EngineLimits) -> dict[str, StepSize]:
        """By profile. `RequestError` for steps that the bundle has no room for."""
        context = limits.max_seq_len - 1 if self.context is None else self.context
        chunk = limits.prefill_chunk
        if not 1 <= self.batch <= limits.max_batch_size:
            raise RequestError(f"--batch is {self.batch}; the bundle takes 1 to {limits.max_batch_size} sequences")
        for option, value, new in (("--context", context, 1), ("--prefill-context", self.prefill_context, chunk)):
            if not 0 <= value <= limits.max_seq_len - new:
                raise RequestError(
                    f"{option} is {value}; in front of {new} new tokens the bundle takes 0 to "
                    f"{limits.max_seq_len - new}, for sequences of {limits.max_seq_len}"
                )
        return {DECODE: StepSize(self.batch, self.batch, context), PREFILL: StepSize(1, chunk, self.prefill_context)}


def inspect_bundle(folder: Path, request: StepRequest) -> Inspection:
    """Everything that the files of the bundle tell. `BundleError` if one is missing or damaged."""
    manifest = Manifest.load(folder)
    manifest.check_files(folder)
    try:
        sizes = request.sizes(manifest.limits)
    except RequestError as error:
        raise RequestError(f"{folder}: {error}") from error
    device = None if manifest.target is None else DEVICES.get(manifest.target)
    programs = load_programs(folder, manifest, manifest.draft is not None)
    folders = (folder, folder / DRAFT_DIR)
    passes = [manifest.passes, *([manifest.draft.passes] if manifest.draft else [])]
    parts = [
        _PartReader(name, where, program, manifest, device, sizes).read(part_passes)
        for name, where, program, part_passes in zip((MODEL, DRAFT_HEAD), folders, programs, passes, strict=False)
    ]
    dims = profile_dims(manifest.limits)
    return Inspection(
        bundle=str(folder),
        versions={
            "qwen4exp-trt": manifest.package_version,
            "bundle format": str(manifest.format_version),
            **manifest.tools,
        },
        options={name: _plain(getattr(manifest, name)) for name in _OPTIONS},
        limits=asdict(manifest.limits),
        target=_target(manifest.target, device),
        profiles={
            name: Profile(
                dims={dim: list(extent) for dim, extent in dims[name].items()},
                step=_step(programs[0], size),
            )
            for name, size in sizes.items()
        },
        parts=parts,
        weight_table=manifest.weights,
        plugins=manifest.plugins,
        warnings=[warning for part in parts for warning in _warnings(part)],
    )


def _step(program: Program, size: StepSize) -> Step:
    return Step(
        num_seqs=size.num_seqs,
        num_tokens=size.num_tokens,
        context_len=size.context_len,
        dims=step_dims(program, size),
    )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _target(architecture: str | None, device: Device | None) -> Target | None:
    if architecture is None:
        return None
    known = (None, None, None) if device is None else (device.name, device.bytes_per_second, device.matmul_flops)
    name, bytes_per_second, matmul_flops = known
    return Target(architecture=architecture, name=name, bytes_per_second=bytes_per_second, matmul_flops=matmul_flops)


def _warnings(part: Part) -> list[str]:
    if part.engine is None or not part.engine.unread:
        return []
    unread = part.engine.unread
    return [f"{part.name}: {len(unread)} lines of TensorRT's layer report could not be read, such as: {unread[0]}"]


class _PartReader:
    """Reads the model or the draft head of a bundle."""

    def __init__(
        self,
        name: str,
        folder: Path,
        program: Program,
        manifest: Manifest,
        device: Device | None,
        sizes: Mapping[str, StepSize],
    ) -> None:
        self._name, self._program, self._limits = name, program, manifest.limits
        self._ops = ProgramOps(program, read_onnx(folder / ONNX_FILE), folder / ONNX_FILE)
        self._op_costs = {profile: step_costs(program, size) for profile, size in sizes.items()}
        self._rooflines = {
            profile: Roofline({each.path: each.cost for each in costs}, device)
            for profile, costs in self._op_costs.items()
        }
        self._weight_bytes = {spec.name: spec.tensor.num_bytes({}) for spec in program.weights}
        self._readers = readers({path: self._ops.inputs(path) for path in self._ops.paths})
        self._engine = self._read_engine(folder, manifest)
        marked = manifest if name == MODEL else manifest.draft
        self._debug_outputs = [spec.name for spec in marked.debug_outputs] if marked else []

    def _read_engine(self, folder: Path, manifest: Manifest) -> Engine | None:
        if manifest.target is None:
            return None
        return read_engine(folder / LAYERS_FILE, (folder / ENGINE_FILE).stat().st_size, self._ops)

    def read(self, passes: list[dict[str, Any]]) -> Part:
        engine_layers = layers_of_ops(self._engine.layers if self._engine else [])
        ops = [self._op(cost, engine_layers.get(cost.path, {})) for cost in self._op_costs[DECODE]]
        return Part(
            name=self._name,
            inputs=[spec.name for spec in self._program.inputs],
            outputs=[spec.name for spec in self._program.outputs],
            debug_outputs=self._debug_outputs,
            values=self._ops.values,
            ops=ops,
            states=[self._state(spec) for spec in self._program.states],
            weights=[self._weight(spec) for spec in self._program.weights],
            passes=passes,
            totals={profile: roofline.of_all() for profile, roofline in self._rooflines.items()},
            components=self._components(ops),
            engine=self._engine,
        )

    def _op(self, cost: OpCost, engine_layers: dict[str, list[int]]) -> Op:
        path, layer = cost.path, _LAYER.match(cost.path)
        return Op(
            path=path,
            op=cost.op,
            kind=_kind(cost),
            layer=int(layer[1]) if layer else None,
            component=self._component(path),
            inputs=self._ops.inputs(path),
            outputs=self._ops.outputs(path),
            updates=self._ops.updates(path),
            onnx_nodes=self._ops.onnx_nodes(path),
            costs={profile: roofline.of_ops([path]) for profile, roofline in self._rooflines.items()},
            engine_layers=engine_layers,
        )

    def _component(self, path: str) -> str:
        """That of the largest weight that the op reads; without one, of its module."""
        weights = [name for name in self._ops.inputs(path) if name in self._weight_bytes]
        largest = max(weights, key=self._weight_bytes.__getitem__, default=path)
        component = find_component(largest) or find_component(f"{path}.")
        return OTHER if component is None else component.value

    def _components(self, ops: Sequence[Op]) -> list[Component]:
        weights: dict[str, int] = {}
        for name, num_bytes in self._weight_bytes.items():
            component = _weight_component(name)
            weights[component] = weights.get(component, 0) + num_bytes
        names = [*(component.value for component in ModelPart), OTHER]
        members = {name: [op.path for op in ops if op.component == name] for name in names}
        return [
            Component(
                name=name,
                num_ops=len(members[name]),
                weight_bytes=weights.get(name, 0),
                costs={profile: roofline.of_ops(members[name]) for profile, roofline in self._rooflines.items()},
            )
            for name in names
            if members[name] or name in weights
        ]

    def _state(self, spec: StateSpec) -> State:
        readers_of_state = self._readers.get(spec.name, [])
        updaters = [path for path in readers_of_state if spec.name in self._ops.updates(path)]
        return State(
            name=spec.name,
            kind=spec.kind.value,
            layer=spec.layer,
            dtype=spec.dtype,
            shape=list(spec.shape),
            is_paged=spec.is_paged,
            row_bytes=spec.row_bytes,
            sequence_bytes=spec.row_bytes * (self._limits.blocks_per_seq if spec.is_paged else 1),
            read_by=readers_of_state,
            updated_by=updaters[0],
        )

    def _weight(self, spec: WeightSpec) -> Weight:
        value = self._ops.values[spec.name]
        return Weight(
            name=spec.name,
            dtype=value.dtype,
            shape=value.shape,
            num_bytes=self._weight_bytes[spec.name],
            component=_weight_component(spec.name),
            sources=sources_of(spec.recipe),
            transforms=_transforms(spec.recipe),
            read_by=self._readers.get(spec.name, []),
        )


def _weight_component(name: str) -> str:
    component = find_component(name)
    return OTHER if component is None else component.value


def _transforms(recipe: WeightRecipe) -> list[str]:
    """The names of the recipe's transforms, innermost first, each once."""
    if not isinstance(recipe, Transform):
        return []
    names = [name for part in recipe.inputs for name in _transforms(part)]
    return list(dict.fromkeys([*names, recipe.op]))


def _kind(cost: OpCost) -> str:
    namespace, _, name = cost.op.partition(".")
    if namespace == "q4e":
        return "native" if all_specs()[name].is_native else "plugin"
    return "view" if cost.is_view else "native"

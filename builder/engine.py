"""Builds a TensorRT engine from a lowered model. With TensorRT for RTX no GPU is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import onnx
import torch

from qwen4exp_trt.builder.layers import REPORT_START, layer_report
from qwen4exp_trt.builder.profiles import Profile
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.plugins.tensorrt import register_creators, take_callback_errors
from qwen4exp_trt.runtime.tensorrt.log import make_log, one_line

_MIN_ENGINE_BYTES = 4096
"""An engine of one node is larger. A builder that ran out of memory may report success and return a stump."""


_MIN_SM = 80
"""The first GPU architecture with BF16 arithmetic."""


@dataclass(frozen=True)
class EngineBuild:
    """A serialized engine and what `builder.layers` read about it."""

    engine: bytes
    layers: dict[str, Any]

    @property
    def activation_bytes(self) -> int | None:
        """Of the profile that needs most, as only one runs at a time; None if TensorRT did not log it."""
        return max(self.layers["activation_bytes"].values(), default=None)


def build_engine(
    trt: ModuleType,
    model: onnx.ModelProto,
    profiles: Mapping[str, Profile],
    target: str = "sm121",
) -> EngineBuild:
    """Build ``model`` for the GPU architecture ``target`` with the given TensorRT module.

    Raises BuildError with what TensorRT logged when the target is impossible or TensorRT refuses the model.
    """
    log = make_log(trt, lambda message: message.startswith(REPORT_START))
    register_creators(trt)
    take_callback_errors()  # of builds and steps before
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    config = _builder_config(trt, builder, target)
    _parse(trt, model, network, log)
    _add_profiles(builder, network, config, profiles, log)
    serialized = builder.build_serialized_network(network, config)
    if serialized is None or serialized.nbytes < _MIN_ENGINE_BYTES:
        size = "no engine" if serialized is None else f"an engine of {serialized.nbytes} bytes"
        raise BuildError(f"TensorRT made {size} from {model.graph.name}: {log.problems()}")
    report = {"tensorrt": f"{trt.__name__} {trt.__version__}", "target": target}
    return EngineBuild(bytes(serialized), report | layer_report(log.messages, list(profiles)))


def check_target(trt: ModuleType, target: str) -> None:
    """BuildError naming the choices unless ``trt`` can build for the GPU architecture ``target``."""
    if hasattr(trt, "ComputeCapability"):
        _compute_capability(trt, target)
    else:
        _check_own_gpu(trt, target)


def _builder_config(trt: ModuleType, builder: Any, target: str) -> Any:
    config = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.max_aux_streams = 0  # kernels share their counters, so they have to run one after another
    if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # else a step might allocate, and not be captured
    if hasattr(trt, "ComputeCapability"):
        config.num_compute_capabilities = 1
        config.set_compute_capability(_compute_capability(trt, target), 0)
    else:
        _check_own_gpu(trt, target)
    return config


def _compute_capability(trt: ModuleType, target: str) -> Any:
    members = trt.ComputeCapability.__members__.items()
    choices = {name.lower(): value for name, value in members if name[2:].isdigit() and int(name[2:]) >= _MIN_SM}
    if target not in choices:
        raise BuildError(
            f"target {target!r} is not one that {trt.__name__} {trt.__version__} builds for; "
            f"choose one of {', '.join(choices)}"
        )
    return choices[target]


def _check_own_gpu(trt: ModuleType, target: str) -> None:
    """A TensorRT that cannot be told a target builds for the GPU it runs on."""
    if torch.cuda.is_available():
        own = "sm{}{}".format(*torch.cuda.get_device_capability())
        if own != target:
            raise BuildError(f"{trt.__name__} builds for this machine's GPU, {own}, only; the target is {target!r}")


def _parse(trt: ModuleType, model: onnx.ModelProto, network: Any, log: Any) -> None:
    parser = trt.OnnxParser(network, log)
    if not parser.parse(model.SerializeToString()):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        described = [f"node {e.node_name()} ({e.node_operator()}): {one_line(e.desc())}" for e in errors]
        described[:0] = take_callback_errors()
        raise BuildError(f"TensorRT cannot parse {model.graph.name}: {'; '.join(described)}")


def _add_profiles(builder: Any, network: Any, config: Any, profiles: Mapping[str, Profile], log: Any) -> None:
    """TensorRT ignores a range for an input that it does not have, and a profile that it does not like."""
    inputs = {network.get_input(index).name for index in range(network.num_inputs)}
    for profile_name, shapes in profiles.items():
        unknown = sorted(shapes.keys() - inputs)
        if unknown:
            raise BuildError(f"profile {profile_name} has shapes of {', '.join(unknown)}, which are no network inputs")
        profile = builder.create_optimization_profile()
        for name, shape_range in shapes.items():
            profile.set_shape(name, *shape_range)
        if config.add_optimization_profile(profile) < 0:
            raise BuildError(f"TensorRT refuses the profile {profile_name}: {log.problems()}; shapes: {shapes}")

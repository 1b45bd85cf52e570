"""SM121 engines of the tiny model, built without a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx
import pytest
from model_zoo import tiny_config_dict

from qwen4exp_trt.builder.engine import EngineBuild, _builder_config, build_engine, check_target
from qwen4exp_trt.builder.lower import lower_program
from qwen4exp_trt.builder.profiles import Profile, ShapeRange, optimization_profiles
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.export import export_program
from qwen4exp_trt.passes.base import PassManager
from qwen4exp_trt.passes.pipeline import Quantization, make_pipeline
from qwen4exp_trt.plugins.spec import NAMESPACE
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.tensorrt.log import make_log
from qwen4exp_trt.runtime.tensorrt.module import load_trt

pytestmark = pytest.mark.trt

LIMITS = EngineLimits(max_batch_size=2, max_seq_len=256, prefill_chunk=64, block_size=16)


@dataclass(frozen=True)
class Lowered:
    """A BF16 program with what a build needs."""

    program: Program
    model: onnx.ModelProto
    profiles: dict[str, Profile]


@pytest.fixture(scope="module")
def trt() -> Any:
    return load_trt("tensorrt-rtx")


@pytest.fixture(scope="module", params=["as traced", "after the passes", "with an FP8 cache"])
def lowered(request: pytest.FixtureRequest) -> Lowered:
    config = ModelConfig.from_dict(tiny_config_dict(), "tiny")
    kv_cache_dtype = "float8_e4m3fn" if request.param == "with an FP8 cache" else "auto"
    program = export_program(config, "bfloat16", LIMITS.block_size, kv_cache_dtype)
    if request.param != "as traced":
        program, _ = PassManager(make_pipeline(Quantization())).run(program)
    profiles = optimization_profiles(LIMITS, (*program.inputs, *program.states))
    return Lowered(program, lower_program(program), profiles)


@pytest.fixture(scope="module")
def build(trt: Any, lowered: Lowered) -> EngineBuild:
    return build_engine(trt, lowered.model, lowered.profiles)


def test_engine_holds_no_weights_and_no_scratch_for_states(build: EngineBuild) -> None:
    assert 4096 < len(build.engine) < 16 * 2**20
    assert build.layers["activation_bytes"].keys() == {"decode", "prefill"}


def test_report_was_read_completely(build: EngineBuild) -> None:
    assert build.layers["unread"] == []
    assert build.layers["target"] == "sm121"
    assert build.layers["tensorrt"].startswith("tensorrt_rtx ")


def test_every_plugin_node_is_a_layer_of_each_profile(build: EngineBuild, lowered: Lowered) -> None:
    nodes = {node.name for node in lowered.model.graph.node if node.domain == NAMESPACE}
    for profile in ("decode", "prefill"):
        layers = [layer for layer in build.layers["layers"] if layer["profile"] == profile]
        assert nodes <= {path for layer in layers for path in layer["modules"]}


def test_inputs_and_outputs_are_those_of_the_program(build: EngineBuild, lowered: Lowered) -> None:
    program = lowered.program
    tensors = {t["name"]: t for t in build.layers["io_tensors"]}
    names = [spec.name for spec in (*program.inputs, *program.states, *program.weights, *program.outputs)]
    assert tensors.keys() == {*names, *(spec.out_name for spec in program.states)}
    for spec in (*program.inputs, *program.states, *program.outputs):
        assert tensors[spec.name]["dims"] == [-1 if isinstance(dim, str) else dim for dim in spec.shape]
    names = {"bfloat16": "BFloat16", "float32": "Float", "int32": "Int32", "float8_e4m3fn": "FP8"}
    for spec in program.states:
        assert tensors[spec.name]["dtype"] == names[spec.dtype]
        assert tensors[spec.out_name] == tensors[spec.name] | {"name": spec.out_name, "mode": "output"}


def test_states_are_updated_in_place_by_one_plugin_layer(build: EngineBuild, lowered: Lowered) -> None:
    """Nobody else reads the old state, so no copy is made of it."""
    for spec in lowered.program.states:
        for profile in ("decode", "prefill"):
            layers = [layer for layer in build.layers["layers"] if layer["profile"] == profile]
            readers = [layer for layer in layers if spec.name in {t["name"] for t in layer["inputs"]}]
            writers = [layer for layer in layers if spec.out_name in {t["name"] for t in layer["outputs"]}]
            assert readers == writers, spec.name
            assert [layer["type"] for layer in writers] == ["PluginV3"]


def test_terminal_stays_quiet(trt: Any, lowered: Lowered, capfd: pytest.CaptureFixture[str]) -> None:
    build_engine(trt, lowered.model, lowered.profiles)
    assert capfd.readouterr() == ("", "")


def test_layers_run_one_after_another(trt: Any) -> None:
    """The kernels of all plugins count their blocks in the same memory."""
    assert _builder_config(trt, trt.Builder(make_log(trt)), "sm121").max_aux_streams == 0


@pytest.mark.parametrize("target", ["sm90", "sm100", "sm75", "gb10", ""])
def test_impossible_target_lists_the_choices(trt: Any, target: str) -> None:
    with pytest.raises(BuildError, match=f"target '{target}' is not one .*; choose one of sm80, .*sm120, sm121"):
        check_target(trt, target)


@pytest.fixture
def plain(lowered: Lowered) -> Lowered:
    return Lowered(lowered.program, copy.deepcopy(lowered.model), copy.deepcopy(lowered.profiles))


def plugin_node(lowered: Lowered, op_type: str) -> onnx.NodeProto:
    return next(node for node in lowered.model.graph.node if node.op_type == op_type)


def call_an_unknown_plugin(lowered: Lowered) -> None:
    plugin_node(lowered, "Q4eMoe").op_type = "Q4eNothing"


def take_the_wrong_operand(lowered: Lowered) -> None:
    node = plugin_node(lowered, "Q4eMoe")
    node.input[0] = node.input[2]


def drop_an_attribute(lowered: Lowered) -> None:
    attributes = plugin_node(lowered, "Q4eMoe").attribute
    attributes.remove(next(a for a in attributes if a.name == "num_experts_per_tok"))


def forget_a_range(lowered: Lowered) -> None:
    del lowered.profiles["decode"]["seq_lens"]


def invent_an_input(lowered: Lowered) -> None:
    lowered.profiles["prefill"]["pixels"] = lowered.profiles["prefill"]["seq_lens"]


def swap_a_range(lowered: Lowered) -> None:
    lowered.profiles["decode"]["seq_lens"] = ShapeRange((2,), (2,), (1,))


def read_an_old_state(lowered: Lowered) -> None:
    node = plugin_node(lowered, "Q4eQsaSelect")
    node.input[1] = node.input[1].removesuffix("_out")


@pytest.mark.parametrize(
    "damage,message",
    [
        (call_an_unknown_plugin, r"node layers\.0\.mlp\.moe \(Q4eNothing\): .*Plugin not found"),
        (take_the_wrong_operand, r"node layers\.0\.mlp\.moe \(Q4eMoe\)"),
        (drop_an_attribute, r"node layers\.0\.mlp\.moe \(Q4eMoe\): .*Could not create the plugin"),
        (forget_a_range, r"no engine from decoder: .*seq_lens is missing dimensions in profile 0"),
        (invent_an_input, "profile prefill has shapes of pixels, which are no network inputs"),
        (swap_a_range, "refuses the profile decode: .*seq_lens"),
        (read_an_old_state, "no engine from decoder: .*Cannot reformat"),
    ],
)
def test_what_tensorrt_refuses_is_one_clear_error(
    trt: Any, plain: Lowered, damage: Callable[[Lowered], None], message: str
) -> None:
    damage(plain)
    with pytest.raises(BuildError, match=message) as error:
        build_engine(trt, plain.model, plain.profiles)
    assert "\n" not in str(error.value)

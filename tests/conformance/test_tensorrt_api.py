"""Every name, method and argument of TensorRT that the project uses, against the bindings of both packages."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import tensorrt_api
from one_node_engines import TARGET, Variant, one_node_model, profiles_of
from source_tree import PACKAGES, ROOT, parse, source_files
from trt_api import Api, Use
from trt_flow import Flow
from trt_recorder import record_uses

from qwen4exp_trt.builder.engine import build_engine
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.runtime.tensorrt.module import load_trt

pytestmark = pytest.mark.trt

CHECKED = (*PACKAGES, "benchmarks")
RECORDED = ROOT / "tests" / "fixtures" / "tensorrt_11_api.json"


@pytest.fixture(scope="module")
def rtx() -> Api:
    """TensorRT for RTX, as it is installed."""
    return Api(tensorrt_api.describe(load_trt("tensorrt-rtx")))


@pytest.fixture(scope="module")
def tensorrt() -> Api:
    """The package ``tensorrt``, as it was recorded."""
    return Api(json.loads(RECORDED.read_text()))


@pytest.fixture(scope="module")
def flow(rtx: Api) -> Flow:
    return Flow(rtx, {module_path(path): parse(path) for path in source_files(*CHECKED)})


def module_path(path: Path) -> str:
    return str(path.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__")


def problems_in_rtx(flow: Flow, rtx: Api) -> list[str]:
    """A name that it is asked for is one of its own: `hasattr` would leave out what a misspelt one guards."""
    unknown = [f"hasattr is asked about {name}, which is absent" for name in asked_names(flow, rtx, are_there=False)]
    return sorted([*unknown, *filter(None, map(rtx.problem, flow.uses))])


def problems_in_tensorrt(flow: Flow, tensorrt: Api) -> list[str]:
    """Names that TensorRT for RTX has alone may be used where the module was asked for such a name."""
    has = asked_names(flow, tensorrt, are_there=True)
    assert not has, f"hasattr is asked about {', '.join(has)}, which both packages have"
    unguarded = [use for use in flow.uses if not flow.is_guarded(use) and not is_of_a_missing_class(use, tensorrt)]
    return sorted(filter(None, map(tensorrt.problem, unguarded)))


def asked_names(flow: Flow, api: Api, are_there: bool) -> list[str]:
    guards = [guard for guard in flow.guards if api.has(*guard) == are_there]
    return sorted(".".join(filter(None, guard)) for guard in guards)


def is_of_a_missing_class(use: Use, tensorrt: Api) -> bool:
    """Nothing makes an instance of it but what is guarded itself."""
    return use.owner is not None and use.owner not in tensorrt.classes


def test_tensorrt_rtx_has_everything_that_is_used(flow: Flow, rtx: Api) -> None:
    assert problems_in_rtx(flow, rtx) == []


def test_tensorrt_has_everything_that_is_used_without_asking(flow: Flow, tensorrt: Api) -> None:
    assert problems_in_tensorrt(flow, tensorrt) == []
    assert problems_in_tensorrt_if_nothing_were_guarded(flow, tensorrt)


def problems_in_tensorrt_if_nothing_were_guarded(flow: Flow, tensorrt: Api) -> bool:
    return any("ComputeCapability is absent" in str(tensorrt.problem(use)) for use in flow.uses)


def test_uses_are_found_in_every_part(flow: Flow) -> None:
    found = {(use.kind, use.name) for use in flow.uses}
    for expected in [
        ("call", "Builder.build_serialized_network"),
        ("write", "IBuilderConfig.max_aux_streams"),
        ("call", "ParserError.desc"),
        ("override", "IPluginV3OneRuntime.enqueue"),
        ("read", "DataType.FP4"),
        ("read", "DimensionOperation.FLOOR_DIV"),
        ("read", "PluginTensorDesc.dims"),
        ("override", "ILogger.log"),
        ("call", "ICudaEngine.get_tensor_dtype"),
        ("call", "IExecutionContext.execute_async_v3"),
    ]:
        assert expected in found


def test_nothing_that_runs_is_overlooked(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a build asks of TensorRT's objects, and one that fails, is what was read off the source."""
    trt = load_trt("tensorrt-rtx")
    seen = record_uses(trt, monkeypatch)
    variant = Variant("gated_delta_rule")
    model, profiles = one_node_model(variant), profiles_of(variant)
    build_engine(trt, model, profiles, TARGET)
    model.graph.node[0].op_type = "Q4eNothing"
    with pytest.raises(BuildError):
        build_engine(trt, model, profiles, TARGET)
    assert {cls for cls, _ in seen} >= {"Builder", "IBuilderConfig", "OnnxParser", "ParserError", "PluginTensorDesc"}
    assert seen <= {(use.owner, use.member) for use in flow.uses}


# --- it finds what is wrong -----------------------------------------------------------------------------------------


def flow_of(rtx: Api, source: str) -> Flow:
    return Flow(rtx, {"builder.example": ast.parse(dedent(source))})


WRONG = {
    "a name": ("trt.Bilder(log)", "Bilder is absent"),
    "a member of an enum": ("trt.DataType.BF17", r"DataType\.BF17 is absent"),
    "a member by its name": ("getattr(trt.DataType, {1: 'BF17'}[n])", r"DataType\.BF17 is absent"),
    "a name that nobody knows": ("getattr(trt.DataType, n)", "of which class is this"),
    "a method": ("trt.Builder(log).build_engine(n)", r"Builder\.build_engine is absent"),
    "a keyword": ("trt.Builder(log).create_network(flag=1)", r"create_network takes \['flags: SupportsInt='\], given"),
    "a name of an argument that has none": (
        "trt.Builder(log).create_builder_config().clear_flag(arg0=1)",
        r"clear_flag takes .*arg0=",
    ),
    "too many arguments": ("trt.Builder(log).create_network(1, 2)", "create_network takes .* given 2 arguments"),
    "too few arguments": ("trt.Builder()", r"Builder\.__init__ takes .* given 0 arguments"),
    "a property that is read only": ("trt.Builder(log).num_DLA_cores = 1", "num_DLA_cores cannot be set"),
    "a property that there is none": ("trt.Builder(log).max_batch_size = 1", "max_batch_size is absent"),
    "what RTX lacks": ("trt.Builder(log).create_network(1).add_plugin_v3([], [], n)", r"add_plugin_v3 is absent"),
}


@pytest.mark.parametrize("source,message", WRONG.values(), ids=WRONG)
def test_what_tensorrt_rtx_lacks_is_found(rtx: Api, source: str, message: str) -> None:
    used = flow_of(rtx, f"def f(trt, log, n):\n    {source}")
    assert any(re.search(message, problem) for problem in problems_in_rtx(used, rtx))


ROUNDABOUT = """
    from dataclasses import dataclass

    @dataclass
    class Part:
        context: object

    def make(trt, log):
        engine = trt.Runtime(log).deserialize_cuda_engine(b"")
        return {{"decode": Part(context=engine.create_execution_context())}}

    class Backend:
        def __init__(self, trt, log):
            self.parts = make(trt, log)

        def run(self):
            for name, part in self.parts.items():
                context, other = part.context, name
                (lambda c: c.{member})(context)
"""


def test_values_are_followed_through_our_code(rtx: Api) -> None:
    assert problems_in_rtx(flow_of(rtx, ROUNDABOUT.format(member="execute_v2([])")), rtx) == []
    (problem,) = problems_in_rtx(flow_of(rtx, ROUNDABOUT.format(member="execute_v1([])")), rtx)
    assert problem == "builder.example:19: IExecutionContext.execute_v1 is absent"


@pytest.mark.parametrize(
    "source",
    [
        "from types import ModuleType\ndef load() -> ModuleType: ...\nmodule = load()\nmodule.Bilder",
        "from types import ModuleType\ndef f(module: ModuleType):\n    module.Bilder",
        "def f(trt):\n    g({'a': trt})\ndef g(modules):\n    modules['a'].Bilder",
    ],
)
def test_the_module_is_followed_under_other_names(rtx: Api, source: str) -> None:
    (problem,) = problems_in_rtx(flow_of(rtx, source), rtx)
    assert problem.endswith(": Bilder is absent")


OVERRIDE = """
    class Log:
        def log(self, {args}):
            severity.{member}

    def make(trt):
        class Real(Log, trt.ILogger):
            pass
        return Real()
"""


def test_our_methods_take_the_arguments_that_tensorrt_gives(rtx: Api) -> None:
    assert problems_in_rtx(flow_of(rtx, OVERRIDE.format(args="severity, message", member="name")), rtx) == []
    (problem,) = problems_in_rtx(flow_of(rtx, OVERRIDE.format(args="severity", member="name")), rtx)
    assert problem == "builder.example:3: ILogger.log takes {2} arguments, ours 1"


GUARDS = {
    "if": ("def f(trt, config):\n    if hasattr(trt, 'IRuntimeCache'):\n        USE", True),
    "not at all": ("def f(trt, config):\n    USE", False),
    "in the other branch": (
        "def f(trt, config):\n    if hasattr(trt, 'IRuntimeCache'):\n        0\n    else:\n        USE",
        False,
    ),
    "behind a return": (
        "def f(trt, config):\n    if not hasattr(trt, 'IRuntimeCache'):\n        return\n    USE",
        True,
    ),
    "by who calls": (
        "def f(trt, config):\n    if hasattr(trt, 'IRuntimeCache'):\n        g(trt)\ndef g(trt):\n    USE",
        True,
    ),
    "by one of two who call": (
        "def f(trt):\n    if hasattr(trt, 'IRuntimeCache'):\n        g(trt)\n    g(trt)\ndef g(trt):\n    USE",
        False,
    ),
    "in an attribute": (
        "class A:\n    def __init__(self, trt):\n        self.is_rtx = hasattr(trt, 'IRuntimeCache')\n"
        "    def f(self, trt):\n        if self.is_rtx:\n            USE",
        True,
    ),
    "of who makes the object": (
        "class A:\n    def f(self, trt):\n        USE\n"
        "def make(trt):\n    return A() if hasattr(trt, 'IRuntimeCache') else None",
        True,
    ),
}


@pytest.mark.parametrize("source,is_guarded", GUARDS.values(), ids=GUARDS)
@pytest.mark.parametrize("used", ["trt.CudaGraphStrategy", "trt.BuilderFlag.REQUIRE_USER_ALLOCATION"])
def test_what_tensorrt_lacks_is_found(rtx: Api, tensorrt: Api, source: str, is_guarded: bool, used: str) -> None:
    found = flow_of(rtx, source.replace("USE", used))
    assert problems_in_rtx(found, rtx) == []
    lacking = problems_in_tensorrt(found, tensorrt)
    assert not lacking if is_guarded else [problem.endswith(f"{used[4:]} is absent") for problem in lacking] == [True]


@pytest.mark.parametrize("asked,name", [("trt, 'Builder'", "Builder"), ("trt.DataType, 'FP8'", "DataType.FP8")])
def test_asking_for_what_both_have_is_no_guard(rtx: Api, tensorrt: Api, asked: str, name: str) -> None:
    found = flow_of(rtx, f"def f(trt):\n    if hasattr({asked}):\n        trt.CudaGraphStrategy")
    with pytest.raises(AssertionError, match=f"asked about {name}, which both packages have"):
        problems_in_tensorrt(found, tensorrt)


@pytest.mark.parametrize("asked,name", [("trt, 'Bilder'", "Bilder"), ("trt.DataType, 'BF17'", r"DataType\.BF17")])
def test_asking_for_what_rtx_lacks_is_found(rtx: Api, asked: str, name: str) -> None:
    (problem,) = problems_in_rtx(flow_of(rtx, f"def f(trt):\n    return hasattr({asked})"), rtx)
    assert re.fullmatch(f"hasattr is asked about {name}, which is absent", problem)


# --- the record -----------------------------------------------------------------------------------------------------


def test_the_record_is_of_a_version_that_may_be_installed(tensorrt: Api) -> None:
    assert tensorrt.description["version"] == tensorrt_api.VERSION
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["tensorrt"] == ["tensorrt>=11.0"]
    assert tensorrt.description["version"].startswith("11.")


@pytest.mark.slow
@pytest.mark.parametrize("version", [tensorrt_api.VERSION, "11.0.0.114"])
def test_the_bindings_in_the_wheel_are_those_recorded(flow: Flow, tensorrt: Api, version: str) -> None:
    """Of the oldest version that may be installed, that they have what is used. Needs network."""
    described = described_wheel(version)
    assert problems_in_tensorrt(flow, Api(described)) == []
    assert (described == tensorrt.description) == (version == tensorrt_api.VERSION)


def described_wheel(version: str) -> dict[str, Any]:
    try:
        return tensorrt_api.describe_wheel(version)
    except tensorrt_api.NoWheelError as error:
        pytest.skip(str(error))

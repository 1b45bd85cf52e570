"""``qwen4exp-polygraphy``: NVIDIA's Polygraphy with the plugins of this package.

Polygraphy imports TensorRT by itself, without what the plugins need of it. So this loads TensorRT first (`load_trt`),
registers the plugins, and hands over all arguments. Two options of its own print arguments for Polygraphy, which are
long and follow from a bundle.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen4exp_trt.builder.inspection.program_ops import read_onnx
from qwen4exp_trt.builder.interpret import NodeFunction, node_functions
from qwen4exp_trt.builder.onnx_graph import ONNX_DTYPES
from qwen4exp_trt.errors import BuildError, BundleError
from qwen4exp_trt.plugins.tensorrt import register_creators
from qwen4exp_trt.runtime.checkpoint import listing
from qwen4exp_trt.runtime.command_line import OneLineParser, run_command
from qwen4exp_trt.runtime.manifest import DRAFT_DIR, ONNX_FILE, Manifest
from qwen4exp_trt.runtime.tensorrt.module import load_trt

PROG = "qwen4exp-polygraphy"

USE_RTX = "POLYGRAPHY_USE_TENSORRT_RTX"
"""Polygraphy's own environment variable: which TensorRT it works with."""


def backend_from_environment(environment: Mapping[str, str]) -> str:
    """The backend that Polygraphy will ask for, by its own rule."""
    return "tensorrt-rtx" if environment.get(USE_RTX, "0") != "0" else "tensorrt"


def load_plugins(backend: str) -> ModuleType:
    """TensorRT with our plugins, importable as ``tensorrt`` too, the one name that parts of Polygraphy know.

    BuildError when it or Polygraphy is not installed.
    """
    if importlib.util.find_spec("polygraphy") is None:
        raise BuildError("polygraphy is not installed; run: pip install 'qwen4exp-trt[polygraphy]'")
    if backend == "tensorrt" and importlib.util.find_spec(backend) is None:
        raise BuildError(
            f"the Python module {backend} is not installed; set {USE_RTX}=1 to work with TensorRT for RTX, or run: "
            f"pip install 'qwen4exp-trt[{backend}]'"
        )
    trt = load_trt(backend)
    sys.modules["tensorrt"] = trt
    register_creators(trt)
    _register_references()
    return trt


def _register_references() -> None:
    """Give ``polygraphy run --pluginref`` what executes our ONNX on the CPU."""
    from polygraphy.backend.pluginref.references import register  # an extra

    for (_, op_type), function in node_functions().items():
        register(op_type)(reference_of(function))


def reference_of(function: NodeFunction) -> Callable[..., Sequence[Tensor]]:
    """``function`` as Polygraphy calls it: with GraphSurgeon's attributes and constants, and leaving its operands."""

    def run(attrs: Mapping[str, Any], *operands: Any) -> Sequence[Tensor]:
        # States are updated in copies: other runners read the same operands.
        tensors = [torch.as_tensor(operand).clone() for operand in operands]
        values = {name: _onnx_dtype(value) if name == "to" else value for name, value in attrs.items()}
        return function(tensors, values)

    return run


def _onnx_dtype(dtype: Any) -> int:
    """GraphSurgeon has NumPy's dtypes where there are any."""
    return dtype if isinstance(dtype, int) else ONNX_DTYPES[torch.from_numpy(np.empty(0, dtype)).dtype]


def convert_flags(model: Path, backend: str) -> list[str]:
    """Arguments for ``polygraphy convert MODEL`` that build what `builder.engine` builds of a bundle's ``MODEL``."""
    folder, is_draft = model.resolve().parent, model.resolve().parent.name == DRAFT_DIR
    manifest = Manifest.load(folder.parent if is_draft else folder)
    if model.name != ONNX_FILE or manifest.target is None:
        expected = f"the {ONNX_FILE} of a bundle with an engine, which was built with --activation-dtype bfloat16"
        raise BundleError(f"{model}: not {expected}; its manifest has the target {manifest.target}")
    profiles = manifest.draft.profiles if is_draft and manifest.draft else manifest.profiles
    flags = ["--preview-features", "ALIASED_PLUGIN_IO_10_03", "--profiling-verbosity", "detailed"]
    flags += ["--max-aux-streams", "0"]
    if backend == "tensorrt-rtx":
        flags += ["--compute-capabilities", f"{manifest.target[2:-1]}.{manifest.target[-1]}"]
    for profile in profiles.values():
        for index, bound in enumerate(("min", "opt", "max")):
            shapes = (f"{name}:[{','.join(map(str, bounds[index]))}]" for name, bounds in profile.items())
            flags += [f"--trt-{bound}-shapes", *shapes]
    return flags


def extract_flags(model: Path, module: str) -> list[str]:
    """Arguments for ``polygraphy surgeon extract MODEL`` that cut out the nodes of ``module`` (`BundleError` if none).

    Polygraphy cuts at the inputs that it is told, weights and the batch among them, and leaves out all others.
    """
    if not model.is_file():
        raise BundleError(f"{model}: no such file; give the {ONNX_FILE} of a bundle")
    graph = read_onnx(model).graph
    inside = [node for node in graph.node if f"{node.name}.".startswith(f"{module}.")]
    if not inside:
        modules = dict.fromkeys(node.name.rpartition(".")[0] for node in graph.node if "." in node.name)
        raise BundleError(f"{model}: no node is of the module {module}; modules that have some: {listing(modules)}")
    names = {node.name for node in inside}
    made = dict.fromkeys(name for node in inside for name in node.output)
    read = dict.fromkeys(name for node in inside for name in node.input)
    read_outside = {name for node in graph.node if node.name not in names for name in node.input}
    read_outside |= {value.name for value in graph.output}
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [f"{name}:auto:auto" for name in read if name not in made and name not in constants]
    return ["--inputs", *inputs, "--outputs", *(f"{name}:auto" for name in made if name in read_outside)]


def run_polygraphy(backend: str, arguments: Sequence[str]) -> int:
    """Polygraphy's own command line, with the plugins; returns its exit code."""
    load_plugins(backend)
    from polygraphy.tools import main as polygraphy  # an extra, which imports TensorRT

    sys.argv = [PROG, *arguments]
    code = polygraphy()
    reads_engine = arguments[0] != "convert" and any(
        argument == "--trt" or argument.endswith(".engine") for argument in arguments
    )
    if code and reads_engine and not torch.cuda.is_available():
        print(
            f"{PROG}: PyTorch sees no GPU here; an engine can be read only on the GPU that it is for", file=sys.stderr
        )
    return code


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = OneLineParser(
        prog=PROG,
        usage=f"{PROG} TOOL ... | --convert-flags MODEL | --extract-flags MODEL MODULE",
        description="Polygraphy with the plugins: TOOL and all behind it are as in `polygraphy --help`. The options "
        "print arguments for it instead.",
        epilog=f"{USE_RTX}=1 in the environment selects TensorRT for RTX; without it, TensorRT is the module tensorrt.",
    )
    add = parser.add_mutually_exclusive_group().add_argument
    text = "for `convert MODEL`: target, profiles and builder flags of the bundle that MODEL is in"
    add("--convert-flags", type=Path, metavar="MODEL", help=text)
    text = "for `surgeon extract MODEL`: what a module, such as layers.3.self_attn, reads and gives"
    add("--extract-flags", nargs=2, metavar=("MODEL", "MODULE"), help=text)
    args = parser.parse_args(argv)
    if args.convert_flags is None and args.extract_flags is None:
        parser.error("give a tool of Polygraphy, such as inspect, or one of --convert-flags and --extract-flags")
    return args


def print_flags(args: argparse.Namespace, backend: str) -> None:
    """One line, to be put into a command by ``$(...)``."""
    if args.convert_flags is not None:
        print(*convert_flags(args.convert_flags, backend))
    else:
        model, module = args.extract_flags
        print(*extract_flags(Path(model), module))


def main(argv: Sequence[str] | None = None) -> int:
    """Polygraphy's exit code, or 2 with one line on stderr if TensorRT or a bundle is not as it has to be."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    backend = backend_from_environment(os.environ)
    if not arguments or arguments[0].startswith("-"):
        args = parse_args(arguments)
        return run_command(PROG, lambda: print_flags(args, backend))
    return run_command(PROG, lambda: run_polygraphy(backend, arguments))


if __name__ == "__main__":
    sys.exit(main())

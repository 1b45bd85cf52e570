"""The options of `LLM` on the command line: one table for all commands that load a bundle."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qwen4exp_trt.runtime.backend import BACKENDS
from qwen4exp_trt.runtime.command_line import byte_count
from qwen4exp_trt.runtime.load_options import CudaGraphs


@dataclass(frozen=True)
class RuntimeOption:
    """A keyword argument of `LLM` as a flag. Not given, `LLM` decides.

    ``kind`` is of the value; None makes a pair of flags, ``--name`` and ``--no-name``. ``default`` says in the help
    what `LLM` does.
    """

    name: str
    text: str
    default: str
    kind: Any = str
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


RUNTIME_OPTIONS = (
    RuntimeOption("backend", "what executes", "eager", more={"choices": BACKENDS}),
    RuntimeOption("device", "where: cpu, cuda or cuda:N", "cpu, and cuda for an engine"),
    RuntimeOption(
        "checkpoint", "where the checkpoint is now", "where it was at the build", Path, {"metavar": "FOLDER"}
    ),
    RuntimeOption("num_blocks", "pages of the KV cache", "of a full batch, or what fits", int, {"metavar": "N"}),
    RuntimeOption(
        "max_num_seqs", "sequences that run at a time", "what the bundle is built for", int, {"metavar": "N"}
    ),
    RuntimeOption("enable_prefix_caching", "keep the states of prompts for those that begin alike", "on", None),
    RuntimeOption(
        "prefix_cache_bytes", "memory of the device for snapshots", "two a sequence", byte_count, {"metavar": "SIZE"}
    ),
    RuntimeOption(
        "host_cache_bytes",
        "memory of the host for what the device has no room for",
        "0",
        byte_count,
        {"metavar": "SIZE"},
    ),
    RuntimeOption("cache_dir", "folder for states that outlive the process", "none", Path, {"metavar": "FOLDER"}),
    RuntimeOption("disk_cache_bytes", "what that folder may take", "64GiB", byte_count, {"metavar": "SIZE"}),
    RuntimeOption("snapshot_interval", "tokens of a prompt between snapshots", "2048", int, {"metavar": "TOKENS"}),
    RuntimeOption("speculate", "drafts: mtp:K or ngram:K, with K from 1 to 7", "none", more={"metavar": "DRAFTS"}),
    RuntimeOption(
        "row_cache_bytes", "memory for rows of an n-gram table on disk", "64MiB", byte_count, {"metavar": "SIZE"}
    ),
    RuntimeOption(
        "memory_reserve_bytes",
        "of the host's memory, what is left to other processes: a bundle that needs more is refused",
        "4GiB, or a sixteenth of a smaller machine",
        byte_count,
        {"metavar": "SIZE"},
    ),
    RuntimeOption(
        "cuda_graphs",
        "who makes CUDA graphs of decode steps: this runtime, TensorRT for RTX, or nobody",
        "own on a GPU",
        more={"choices": [choice.value for choice in CudaGraphs]},
    ),
    RuntimeOption(
        "jit_cache",
        "where to keep what TensorRT for RTX compiles: user (below ~/.cache), bundle (inside it), none, or a folder",
        "user",
        more={"metavar": "WHERE"},
    ),
    RuntimeOption("debug_nan", "of logits that are NaN, say in which module that began; slow, for eager", "no", None),
)


def add_runtime_options(parser: argparse.ArgumentParser) -> None:
    """Add all `RUNTIME_OPTIONS` to ``parser``, in a group of their own."""
    group = parser.add_argument_group("loading and running")
    for option in RUNTIME_OPTIONS:
        text = f"{option.text} (default: {option.default})"
        if option.kind is None:
            group.add_argument(option.flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            group.add_argument(option.flag, type=option.kind, help=text, **option.more)


def llm_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `LLM` that were given."""
    names = (option.name for option in RUNTIME_OPTIONS)
    return {name: value for name in names if (value := getattr(args, name)) is not None}

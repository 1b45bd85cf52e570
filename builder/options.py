"""What a build is asked to do, checked against the model before any work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from qwen4exp_trt.builder.compile import ExportOptions
from qwen4exp_trt.builder.policy import PLE_PRECISIONS, PRECISIONS, W4A4
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.states import resolve_kv_dtype
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.specs import PleResidency

ACTIVATION_DTYPES = ("bfloat16", "float32")
KV_CACHE_DTYPES = {"auto": "auto", "fp8": "float8_e4m3fn"}
"""Choice -> dtype; ``auto`` is that of the activations."""
PLE_RESIDENCIES = tuple(PleResidency)
CONVERT_DEVICES = ("cpu", "cuda")
DRAFT_HEADS = ("checkpoint", "none")
DEFAULT_TARGET = "sm121"
DEFAULT_WEIGHTS_DIR = "converted-weights"
DEFAULT_PREFILL_CHUNK = 2048
DEFAULT_BLOCK_SIZE = 64


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What decides how much memory a bundle takes.

    ``checkpoint``: its folder, or with ``config_only`` a folder with (or the path of) a config.json.
    """

    checkpoint: Path
    target: str | None = None
    """None for `DEFAULT_TARGET`, or where there is no engine."""
    precision: str = "checkpoint"
    """The format of the weights: one of `PRECISIONS`."""
    ple: str | None = None
    """The format of the n-gram table, one of `PLE_PRECISIONS`; None for bf16 if all weights are, else checkpoint."""
    keep: tuple[str, ...] = ()
    """Shell patterns of canonical names of weights that stay as the checkpoint has them."""
    activation_dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    ple_residency: str = PleResidency.DEVICE
    """Where the n-gram table is at run time."""
    draft_head: str = "checkpoint"
    """Whether the checkpoint's draft head is built in, if it has one: one of `DRAFT_HEADS`."""
    draft_vocab_size: int | None = None
    """How many ids the draft head can propose; None for all."""
    draft_vocab: Path | None = None
    """A text whose most frequent ids these are."""
    max_batch_size: int = 8
    max_seq_len: int | None = None
    """None for the model's own limit."""
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK
    block_size: int = DEFAULT_BLOCK_SIZE
    mark_plugin_inputs: tuple[str, ...] = ()
    """Shell patterns of module paths of plugins whose inputs the engine gives as outputs, for `qwen4exp-verify`."""
    config_only: bool = False

    @property
    def has_engine(self) -> bool:
        """Float32 activations serve verification by the eager backend only."""
        return self.activation_dtype != "float32"

    @property
    def ple_precision(self) -> str:
        return self.ple or ("bf16" if self.precision == "bf16" else "checkpoint")

    @property
    def kv_dtype(self) -> str:
        """The dtype of the KV cache."""
        return resolve_kv_dtype(self.activation_dtype, KV_CACHE_DTYPES[self.kv_cache_dtype])

    @property
    def export(self) -> ExportOptions:
        return ExportOptions(
            self.activation_dtype, KV_CACHE_DTYPES[self.kv_cache_dtype], self.block_size, self.ple_residency
        )

    @property
    def engine_target(self) -> str:
        """The GPU architecture that an engine is built for."""
        return DEFAULT_TARGET if self.target is None else self.target

    @property
    def text_folder(self) -> Path | None:
        """Where tokenizer files may be: the checkpoint, unless that is a config.json alone."""
        return None if self.config_only and self.checkpoint.is_file() else self.checkpoint

    def read_config(self) -> ModelConfig:
        if self.text_folder is None:
            return ModelConfig.from_file(self.checkpoint)
        return ModelConfig.from_dir(self.checkpoint)

    def limits_for(self, config: ModelConfig) -> EngineLimits:
        """The limits of the engine; `BuildError` for those that the model does not allow."""
        longest = config.max_position_embeddings
        max_seq_len = longest if self.max_seq_len is None else self.max_seq_len
        if max_seq_len > longest:
            raise BuildError(f"--max-seq-len is {max_seq_len}, the model's max_position_embeddings allows {longest}")
        ratio = config.indexer_compress_ratio or 1
        if self.block_size % ratio:
            raise BuildError(
                f"--block-size is {self.block_size}; it must be a multiple of the model's "
                f"indexer_compress_ratio {ratio}"
            )
        chunk = min(self.prefill_chunk, max(max_seq_len, 1))
        return EngineLimits(self.max_batch_size, max_seq_len, chunk, self.block_size)

    def check(self) -> None:
        """`BuildError` for options that are impossible or contradict each other."""
        for option, value, choices in (
            ("--precision", self.precision, PRECISIONS),
            ("--ple", self.ple_precision, PLE_PRECISIONS),
            ("--activation-dtype", self.activation_dtype, ACTIVATION_DTYPES),
            ("--kv-cache-dtype", self.kv_cache_dtype, tuple(KV_CACHE_DTYPES)),
            ("--ple-residency", self.ple_residency, PLE_RESIDENCIES),
            ("--draft-head", self.draft_head, DRAFT_HEADS),
        ):
            if value not in choices:
                raise BuildError(f"{option} is {value!r}; it must be one of {', '.join(choices)}")
        if self.target is not None and not self.has_engine:
            raise BuildError(
                f"--target is {self.target!r}, but a bundle with {self.activation_dtype} activations has no engine; "
                "leave it out"
            )
        if self.mark_plugin_inputs and not self.has_engine:
            raise BuildError(
                f"--mark-plugin-inputs makes outputs of an engine, and a bundle with {self.activation_dtype} "
                "activations has none; leave it out, or build with --activation-dtype bfloat16"
            )
        if self.draft_vocab is not None and self.draft_vocab_size is None:
            raise BuildError("--draft-vocab is given without --draft-vocab-size, which says how many ids to take")


@dataclass(frozen=True, kw_only=True)
class BuildOptions(PlanOptions):
    """A build that is carried out."""

    output: Path
    backend: str = "tensorrt-rtx"
    kernel_target: tuple[str, ...] = ()
    """GPU architectures that CUDA kernels are compiled for, besides the engine's."""
    verify: bool = False
    convert_device: str = "cpu"
    """Where weights are converted."""
    weights_dir: Path | None = None
    """Where converted weights are; None for `DEFAULT_WEIGHTS_DIR` beside the bundle."""
    calibration: Path | None = None
    """The text whose activations give the scales that `W4A4` needs."""

    @property
    def all_kernel_targets(self) -> list[str]:
        """Every GPU architecture that the bundle has CUDA kernels for, once."""
        return list(dict.fromkeys(((self.engine_target,) if self.has_engine else ()) + self.kernel_target))

    @property
    def converted_dir(self) -> Path:
        return self.output.parent / DEFAULT_WEIGHTS_DIR if self.weights_dir is None else self.weights_dir

    def check(self) -> None:
        super().check()
        self._check_converted_dir()
        if self.convert_device not in CONVERT_DEVICES:
            raise BuildError(f"--convert-device is {self.convert_device!r}; it must be {' or '.join(CONVERT_DEVICES)}")
        if self.convert_device == "cuda" and not torch.cuda.is_available():
            raise BuildError("--convert-device is 'cuda', but torch finds no CUDA device here; leave it out")
        if self.verify and self.config_only:
            raise BuildError("--verify executes the program with its weights, which --config-only does not read")
        if self.precision == W4A4 and self.config_only:
            raise BuildError(f"--precision {W4A4} runs the model on a text, for which --config-only has no weights")
        if (self.calibration is not None) != (self.precision == W4A4):
            found = "is missing" if self.calibration is None else f"is given with --precision {self.precision}"
            raise BuildError(
                f"--calibration {found}; give a text for --precision {W4A4}, and only for that: its activations are "
                "quantized with scales that are measured on the text"
            )

    def _check_converted_dir(self) -> None:
        folder, output = self.converted_dir.resolve(), self.output.resolve()
        if folder.is_relative_to(output):
            raise BuildError(
                f"{self.converted_dir}, where converted weights would be kept, is in the bundle {self.output}, which a "
                "build replaces; choose a folder beside it with --weights-dir"
            )
        if folder == self.checkpoint.resolve():
            raise BuildError(
                f"--weights-dir is the checkpoint {self.checkpoint}, whose tensors the files would seem to be; choose "
                "another folder"
            )

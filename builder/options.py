"""What a build is asked to do, checked against the model before any work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.runtime.limits import EngineLimits

PRECISIONS = ("bfloat16", "float32")
DEFAULT_TARGET = "sm121"
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
    precision: str = "bfloat16"
    max_batch_size: int = 8
    max_seq_len: int | None = None
    """None for the model's own limit."""
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK
    block_size: int = DEFAULT_BLOCK_SIZE
    config_only: bool = False

    @property
    def has_engine(self) -> bool:
        """A float32 bundle serves verification by the eager backend only."""
        return self.precision != "float32"

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
        if self.precision not in PRECISIONS:
            raise BuildError(f"--precision is {self.precision!r}; it must be one of {', '.join(PRECISIONS)}")
        if self.target is not None and not self.has_engine:
            raise BuildError(f"--target is {self.target!r}, but a {self.precision} bundle has no engine; leave it out")


@dataclass(frozen=True, kw_only=True)
class BuildOptions(PlanOptions):
    """A build that is carried out."""

    output: Path
    backend: str = "tensorrt-rtx"
    verify: bool = False

    def check(self) -> None:
        super().check()
        if self.verify and self.config_only:
            raise BuildError("--verify executes the program with its weights, which --config-only does not read")

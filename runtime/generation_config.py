"""``generation_config.json``: how the makers of a checkpoint sample from it, and where its texts end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qwen4exp_trt.errors import BundleError, RequestError
from qwen4exp_trt.runtime.json_files import read_json_object
from qwen4exp_trt.runtime.sampling_params import SamplingParams

GENERATION_CONFIG_FILE = "generation_config.json"

_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p")
_PENALTY_KEYS = ("repetition_penalty",)


@dataclass(frozen=True)
class GenerationConfig:
    """``sampling_params`` are greedy unless the file says ``do_sample``, as in transformers."""

    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_dir(cls, path: str | Path) -> GenerationConfig:
        """Read the file of a checkpoint or bundle folder; without one, `SamplingParams()` and no ids.

        Raises `BundleError` for a file that is not so shaped.
        """
        file = Path(path) / GENERATION_CONFIG_FILE
        if not file.exists():
            return cls()
        data = read_json_object(file, BundleError)
        return cls(_sampling_params(data, file), _eos_token_ids(data.get("eos_token_id"), file))


def _sampling_params(data: dict[str, Any], file: Path) -> SamplingParams:
    is_sampling = data.get("do_sample", False)
    keys = (*_SAMPLING_KEYS, *_PENALTY_KEYS) if is_sampling else _PENALTY_KEYS
    values: dict[str, Any] = {key: data[key] for key in keys if data.get(key) is not None}
    try:
        return SamplingParams(**({} if is_sampling else {"temperature": 0.0}), **values)
    except RequestError as error:
        raise BundleError(f"{file}: {error}") from error


def _eos_token_ids(found: Any, file: Path) -> tuple[int, ...]:
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise BundleError(f"{file}: eos_token_id is {found!r}; an id or a list of ids was expected")
    return tuple(ids)

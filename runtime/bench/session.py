"""One run of ``qwen4exp-bench``: load, check, measure every case, and keep what is known in a `Document`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from qwen4exp_trt.errors import BundleError, Q4eError
from qwen4exp_trt.plugins.compile import cache_dir
from qwen4exp_trt.runtime.bench.cases import Effort, LeftOut, Selection, choose_cases
from qwen4exp_trt.runtime.bench.checks import check_bundle, check_can_compare
from qwen4exp_trt.runtime.bench.document import (
    COMPLETE,
    FAILED,
    INTERRUPTED,
    Document,
    describe_bundle,
    frames_of,
    plain,
)
from qwen4exp_trt.runtime.bench.environment import describe_environment
from qwen4exp_trt.runtime.bench.gpu_reader import open_reader
from qwen4exp_trt.runtime.bench.loaded import LoadedBundle
from qwen4exp_trt.runtime.bench.random_weights import RandomWeights
from qwen4exp_trt.runtime.bench.rates import measure_bandwidth, measure_matmul_rate
from qwen4exp_trt.runtime.bench.results import describe, measure
from qwen4exp_trt.runtime.bench.roofline import Rooflines, make_rooflines
from qwen4exp_trt.runtime.bench.sensors import Sensors
from qwen4exp_trt.runtime.cuda_device import device_from_name, is_lost
from qwen4exp_trt.runtime.host_memory import available_memory, meminfo
from qwen4exp_trt.runtime.llm import LLM
from qwen4exp_trt.runtime.manifest import Manifest
from qwen4exp_trt.runtime.progress_line import loading_line
from qwen4exp_trt.runtime.tensorrt.backend import TensorRTBackend

DEFAULT_DRAFTS = "mtp:3"
"""With which a bundle that has a draft head is loaded, unless asked otherwise."""


@dataclass(frozen=True)
class Settings:
    """What the command line asks for."""

    bundle: Path
    json: Path | None
    effort_name: str
    effort: Effort
    selection: Selection
    llm_options: Mapping[str, Any]
    """Those of `LLM` that were given."""
    random_seed: int | None = None
    """Of random weights; None for the checkpoint's."""
    with_agreement: bool = False
    with_host_name: bool = False


class Session:
    """Measures one bundle; `document` has what is known at any time."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.perf_counter) -> None:
        self.settings, self._clock = settings, clock
        self.document = Document(datetime.now(UTC).isoformat(timespec="seconds"), _options(settings))
        self._start = clock()

    def run(self) -> None:
        """Fill the document, and write it after every case if it has a file. Q4eError if the bundle cannot be run;
        a case that fails is only noted."""
        settings = self.settings
        manifest = Manifest.load(settings.bundle)
        if manifest.checkpoint is None and settings.random_seed is None:
            raise BundleError(
                f"{settings.bundle}: built with --config-only, so it has no weights; build it from the checkpoint, or "
                "measure it with --random-weights"
            )
        device = device_from_name(settings.llm_options.get("device") or self._default_device())
        if settings.with_agreement:
            check_can_compare(self._backend_name, device)
        with self._kept_in_file():
            self._measure(manifest, device)

    @property
    def _backend_name(self) -> str:
        return self.settings.llm_options.get("backend", "eager")

    def _default_device(self) -> str:
        return "cpu" if self._backend_name == "eager" else "cuda"

    @contextmanager
    def _kept_in_file(self) -> Iterator[None]:
        """Whatever ends the run, the file says so, and has what was measured."""
        document = self.document
        try:
            yield
        except KeyboardInterrupt:
            document.state, document.ended_by = INTERRUPTED, "interrupted by the user"
            raise
        except BaseException as error:
            document.state, document.ended_by = FAILED, self._in_words(error)
            document.ended_where = frames_of(error)
            raise
        else:
            document.state = COMPLETE
        finally:
            self._write()

    def _measure(self, manifest: Manifest, device: torch.device) -> None:
        document, settings = self.document, self.settings
        reader, source = open_reader(device)
        document.bundle = describe_bundle(settings.bundle, manifest)
        document.environment = describe_environment(device, reader, source, settings.with_host_name)
        self._say("measuring the bandwidth and the rate of products")
        rooflines = self._measure_rates(device)
        with Sensors(reader, source) as sensors, self._load(manifest, device) as llm:
            bundle = LoadedBundle(llm)
            document.load |= _describe_backend(bundle)
            self._say("checking the logits")
            document.checked = plain(check_bundle(bundle, settings.with_agreement))
            self._measure_cases(bundle, sensors, rooflines)
            document.memory |= {
                "least_available_bytes": sensors.least_available_bytes,
                "after_the_run": _memory_now(device),
            }

    def _measure_rates(self, device: torch.device) -> Rooflines:
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
        bandwidth, rate = measure_bandwidth(device, min(free, available_memory())), measure_matmul_rate(device)
        rooflines = make_rooflines(device, bandwidth, rate)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        self.document.rates = {
            "copy_bytes_per_second": bandwidth.copy,
            "read_bytes_per_second": bandwidth.read,
            "matmul_flops": rate,
            "published": plain(rooflines.published),
        }
        return rooflines

    @contextmanager
    def _load(self, manifest: Manifest, device: torch.device) -> Iterator[LLM]:
        settings, options = self.settings, dict(self.settings.llm_options)
        options.setdefault("enable_prefix_caching", False)
        if manifest.draft is not None and settings.selection.drafts != (0,):
            options.setdefault("speculate", DEFAULT_DRAFTS)
        if settings.random_seed is not None:
            options["weight_maker"] = RandomWeights(settings.random_seed)
        self._say(f"loading {settings.bundle.resolve().name}")
        before, kernels, start = _memory_now(device), _num_cached_kernels(), self._clock()
        with LLM(settings.bundle, progress=loading_line().show, **options) as llm:
            document = self.document
            document.load = {
                "seconds": self._clock() - start,
                "weights": "checkpoint" if settings.random_seed is None else f"random, seed {settings.random_seed}",
                **_without_paths(llm.info),
            }
            document.memory = {"before_loading": before, "after_loading": _memory_now(device)}
            try:
                yield llm
            finally:
                document.load["kernels_compiled"] = _num_cached_kernels() - kernels

    def _measure_cases(self, bundle: LoadedBundle, sensors: Sensors, rooflines: Rooflines) -> None:
        document, settings = self.document, self.settings
        chosen = choose_cases(settings.selection, settings.effort, bundle.room)
        for left_out in chosen.left_out:
            document.leave_out(left_out)
        if not chosen.cases:
            first, *others = document.left_out
            more = f"; nor can {len(others)} others" if others else ""
            raise BundleError(f"nothing that was asked for can be measured: {first['what']}: {first['reason']}{more}")
        for index, case in enumerate(chosen.cases):
            self._say(f"{index + 1} of {len(chosen.cases)}: {case}")
            try:
                with sensors.window() as sampled:
                    times = measure(bundle, case, settings.effort)
                    during = sampled()
                document.add(case, {**describe(bundle, case, times, rooflines), "sensors": during})
            except Exception as error:
                document.fail(case, self._in_words(error), frames_of(error))
                self._say(f"failed: {document.failed[-1]['reason']}")
                if is_lost(bundle.device):
                    for other in chosen.cases[index + 1 :]:
                        document.leave_out(LeftOut(other, f"the GPU was lost by the {case}"))
                    break
            document.load |= _describe_backend(bundle)  # steps of new sizes were prepared
            self._write()

    def _say(self, text: str) -> None:
        print(f"[{self._clock() - self._start:6.1f} s] {text}", file=sys.stderr, flush=True)

    def _write(self) -> None:
        self.document.seconds = self._clock() - self._start
        self.document.write(self.settings.json)

    def _in_words(self, error: BaseException) -> str:
        """One line, without the paths of this machine that we know of."""
        text = " ".join(str(error).split())
        if not isinstance(error, Q4eError):
            text = f"{type(error).__name__}: {text}"
        given, folder = self.settings.bundle, self.settings.bundle.resolve()
        for path, name in ((folder, folder.name), (given, folder.name), (Path.home(), "~")):
            text = text.replace(str(path), name)
        return text


def _options(settings: Settings) -> dict[str, Any]:
    """What was given and chosen, without paths."""
    given = {name: value for name, value in settings.llm_options.items() if not isinstance(value, Path)}
    given |= {name: "given" for name, value in settings.llm_options.items() if isinstance(value, Path)}
    return {
        "effort": settings.effort_name,
        **plain(settings.effort),
        "selection": plain(settings.selection),
        "llm": given,
        "random_weights": settings.random_seed,
        "check": settings.with_agreement,
    }


def _describe_backend(bundle: LoadedBundle) -> dict[str, Any]:
    backend, head = bundle.backend, bundle.backend.draft
    weights = {**backend.weights, **(head.weights if head is not None else {})}
    sizes = {
        "weight_bytes": sum(weight.nbytes for weight in weights.values()),
        "state_bytes": sum(state.nbytes for state in bundle.llm.core.states.pool.values()),
    }
    engines = [_describe_engine(part) for part in (backend, head) if isinstance(part, TensorRTBackend)]
    return {
        "backend": bundle.manifest.backend if engines else "eager",
        "device": bundle.device.type,
        "cuda_graphs": str(backend.cuda_graphs),
        "engines": engines,
        "prepared_steps": _describe_preparation(bundle),
        **sizes,
    }


def _describe_engine(backend: TensorRTBackend) -> dict[str, Any]:
    """Of the model, and behind it of the draft head."""
    session, cache = backend.session, backend.session.jit_cache
    return {
        "tensorrt": backend.info["tensorrt"],
        "deserialize_seconds": session.deserialize_seconds,
        "context_seconds": session.context_seconds,
        "activation_bytes": session.activations.nbytes,
        "jit_cache": None if cache.path is None else {"is_hit": cache.loaded_bytes > 0, "bytes": cache.loaded_bytes},
    }


def _without_paths(info: Mapping[str, Any]) -> dict[str, Any]:
    """`LLM.info` as it is, but for where the files of an n-gram table are."""
    disks = info["ngram_table"].get("disks")
    if disks is None:
        return dict(info)
    named = {name: {key: value for key, value in disk.items() if key != "path"} for name, disk in disks.items()}
    return {**info, "ngram_table": {**info["ngram_table"], "disks": named}}


def _describe_preparation(bundle: LoadedBundle) -> dict[str, Any]:
    parts = [part for part in (bundle.backend, bundle.backend.draft) if part is not None]
    shapes, seconds = zip(*(part.preparation for part in parts), strict=True)
    return {"shapes": sum(shapes), "seconds": sum(seconds)}


def _memory_now(device: torch.device) -> dict[str, int | None]:
    """Bytes of the host's memory, of this process and of torch on the GPU."""
    host, resident_pages = meminfo(), int(Path("/proc/self/statm").read_text().split()[1])
    is_gpu = device.type == "cuda"
    return {
        "available": host["MemAvailable"],
        "page_cache": host["Cached"],
        "swap_free": host["SwapFree"],
        "resident": resident_pages * os.sysconf("SC_PAGE_SIZE"),
        "gpu_free": torch.cuda.mem_get_info(device)[0] if is_gpu else None,
        "gpu_allocated": torch.cuda.memory_allocated(device) if is_gpu else None,
        "gpu_most_allocated": torch.cuda.max_memory_allocated(device) if is_gpu else None,
    }


def _num_cached_kernels() -> int:
    return sum(1 for _ in cache_dir().rglob("*.cubin"))

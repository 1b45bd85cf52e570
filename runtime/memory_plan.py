"""What a bundle will take of memory, held against what there is before any of it is read.

On a device whose memory is the host's, running out of it takes the host down with it, so a bundle that does not fit is
refused. Where the GPU has memory of its own the same figures save minutes of loading that would end in an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.host_memory import available_memory, total_memory
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.load_options import LoadOptions
from qwen4exp_trt.runtime.manifest import DRAFT_DIR, ENGINE_FILE, Manifest
from qwen4exp_trt.runtime.prefix_cache.options import PrefixCacheOptions
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.specs import DTYPE_BYTES, NgramRowsSpec, PleResidency, extent_of
from qwen4exp_trt.runtime.state_pool import state_bytes

logger = logging.getLogger(__name__)

GPU_OVERHEAD_BYTES = 2 * 2**30
"""CUDA context, captured steps, inputs and outputs of a step, and what allocators lose.

Also what TensorRT keeps in each execution context beside activations: it depends on layers and shapes, and nothing
tells its size beforehand.
"""
CPU_OVERHEAD_BYTES = 128 * 2**20
"""What loading takes beside the weights, and what allocators lose."""
MOST_RESERVE_BYTES = 4 * 2**30
_RESERVE_SHARE = 16
_GIB = 2**30


def default_reserve() -> int:
    """What is left to the rest of the system: 4 GiB, or a sixteenth of a smaller machine."""
    return min(MOST_RESERVE_BYTES, total_memory() // _RESERVE_SHARE)


def staged_row_bytes(spec: NgramRowsSpec, limits: EngineLimits) -> int:
    """One copy of the rows that the largest step takes of a table on disk."""
    return spec.num_bytes({"T": limits.max_step_tokens})


@dataclass(frozen=True)
class Memory:
    """What a process may have of a memory."""

    name: str
    available: int
    reserve: int

    @property
    def usable(self) -> int:
        return max(0, self.available - self.reserve)


@dataclass(frozen=True)
class MemoryUse:
    """What part of a loaded bundle takes."""

    name: str
    num_bytes: int
    is_on_host: bool = False
    """Whether it is in the host's memory, also with a GPU that has its own."""


@dataclass(frozen=True)
class MemoryPlan:
    """Where a bundle's memory goes. ``device`` and ``host`` are the same `Memory` if there is one only."""

    uses: tuple[MemoryUse, ...]
    num_blocks: int
    page_bytes: int
    device: Memory
    host: Memory

    @property
    def is_unified(self) -> bool:
        return self.device is self.host

    def needed(self, memory: Memory) -> int:
        """Bytes that are taken of ``memory``."""
        return sum(use.num_bytes for use in self.uses_of(memory))

    def missing(self, memory: Memory) -> int:
        """How far that exceeds what is usable."""
        return max(0, self.needed(memory) - memory.usable)

    @property
    def memories(self) -> tuple[Memory, ...]:
        return (self.host,) if self.is_unified else (self.device, self.host)

    def table(self) -> Iterator[str]:
        """A line for each use, and what there is."""
        for memory in self.memories:
            for use in self.uses_of(memory):
                yield f"{use.name}: {_size(use.num_bytes)}"
            yield f"in all: {_size(self.needed(memory))} of {_describe(memory)}"

    def to_dict(self) -> dict[str, object]:
        """For logs and `LLM.info`: bytes by use, and of each memory what is available and kept free."""
        return {
            "uses": {use.name: use.num_bytes for use in self.uses if use.num_bytes},
            "num_blocks": self.num_blocks,
            "memories": {
                memory.name: {
                    "needed": self.needed(memory),
                    "available": memory.available,
                    "reserve": memory.reserve,
                }
                for memory in self.memories
            },
        }

    def uses_of(self, memory: Memory) -> list[MemoryUse]:
        """What is taken of ``memory``."""
        on_host = memory is self.host
        return [use for use in self.uses if use.num_bytes and (self.is_unified or use.is_on_host == on_host)]


def memories_of(device: torch.device, reserve: int | None) -> tuple[Memory, Memory]:
    """Of ``device`` and of the host, which are one for the CPU and for a GPU that is integrated."""
    host = Memory("the memory of this machine", available_memory(), default_reserve() if reserve is None else reserve)
    if device.type == "cpu":
        return host, host
    if torch.cuda.get_device_properties(device).is_integrated:
        # What CUDA calls free leaves out what the kernel would take back from the page cache.
        shared = Memory(f"the memory that {device} shares with the host", host.available, host.reserve)
        return shared, shared
    return Memory(f"the memory of {device}", torch.cuda.mem_get_info(device)[0], 0), host


def plan_memory(
    programs: Sequence[Program],
    manifest: Manifest,
    options: LoadOptions,
    device: torch.device,
    runs_engine: bool = False,
) -> MemoryPlan:
    """What ``programs`` of a bundle take on ``device``, with as many pages as ``options`` ask for or as fit.

    `BundleError` with the figures, and what to change, if it does not fit. Nothing is read but sizes.
    """
    limits, states = manifest.limits, [state for program in programs for state in program.states]
    page_bytes = state_bytes(states, 1, 0)
    memories = memories_of(device, options.memory_reserve_bytes)
    fixed = _fixed_uses(programs, manifest, options, device, runs_engine)
    fixed.append(MemoryUse(f"states of {limits.num_slots} sequences", state_bytes(states, 0, limits.num_slots)))

    def with_pages(num_blocks: int) -> MemoryPlan:
        pages = MemoryUse(f"{num_blocks:,} pages of {limits.block_size} tokens", num_blocks * page_bytes)
        return MemoryPlan((*fixed, pages), num_blocks, page_bytes, *memories)

    def most_that_fit() -> int:
        room = memories[0].usable - with_pages(0).needed(memories[0])
        return min(limits.max_num_blocks, room // page_bytes if page_bytes else limits.max_num_blocks)

    chosen = max(1, most_that_fit()) if options.num_blocks is None else options.num_blocks
    plan = with_pages(chosen)
    if any(plan.missing(memory) for memory in plan.memories):
        raise BundleError(_refusal(plan, manifest, most_that_fit()))
    _log(plan, limits, is_choice=options.num_blocks is None)
    return plan


def _fixed_uses(
    programs: Sequence[Program], manifest: Manifest, options: LoadOptions, device: torch.device, runs_engine: bool
) -> list[MemoryUse]:
    """All but the states."""
    limits, is_gpu = manifest.limits, device.type == "cuda"
    states = [state for program in programs for state in program.states]
    files = [manifest.files.get(name) for name in (ENGINE_FILE, f"{DRAFT_DIR}/{ENGINE_FILE}")]
    marked = manifest.all_debug_outputs if len(programs) > 1 else manifest.debug_outputs
    engines = [0 if file is None else file.size for file in files]
    weights = {spec.name: spec.tensor.num_bytes({}) for program in programs for spec in program.weights}
    on_host = sum(size for name, size in weights.items() if name in manifest.host_weights)
    tables = [spec for program in programs for spec in program.inputs if isinstance(spec, NgramRowsSpec)]
    staged = sum(staged_row_bytes(spec, limits) for spec in tables)
    rows = limits.largest_step
    outputs = [output for program in programs for output in program.outputs]
    results = sum(output.num_bytes(rows) for output in outputs)
    # Besides, what is read of them: logits in float32, and copies of stacks.
    results += sum(
        extent_of(output.shape[0], rows) * int(output.shape[1]) * DTYPE_BYTES["float32"] for output in outputs
    )
    return [
        MemoryUse("weights", sum(weights.values()) - on_host),
        MemoryUse("n-gram table in the host's memory", on_host, is_on_host=True),
        MemoryUse("n-gram rows that are kept", len(tables) * options.row_cache_bytes, is_on_host=True),
        # Looked up, and for a GPU packed in pinned memory, of which torch makes powers of two.
        MemoryUse("n-gram rows of a step, on the host", staged * (1 + 2 * is_gpu), is_on_host=True),
        MemoryUse("n-gram rows of a step", staged * is_gpu),
        MemoryUse("activations and results of a step", manifest.activation_bytes + results),
        MemoryUse("engine", sum(engines[: len(programs)]) if runs_engine else 0),
        MemoryUse("debug outputs", sum(spec.num_bytes(rows) for spec in marked) if runs_engine else 0),
        MemoryUse("CUDA context and buffers" if is_gpu else "buffers", _overhead(is_gpu)),
        *(MemoryUse(name, size) for name, size in options.other_uses.items()),
        *_cache_uses(options.prefix_cache, limits, state_bytes(states, 0, 1)),
    ]


def _cache_uses(options: PrefixCacheOptions | None, limits: EngineLimits, slot_bytes: int) -> list[MemoryUse]:
    """What the prefix cache may grow to."""
    if options is None:
        return []
    return [
        MemoryUse("prefix cache: snapshots", options.device_bytes(limits.num_slots, slot_bytes)),
        MemoryUse("prefix cache: host tier", options.host_cache_bytes, is_on_host=True),
        MemoryUse("prefix cache: queue of the disk", options.queue_bytes(slot_bytes), is_on_host=True),
    ]


def _overhead(is_gpu: bool) -> int:
    return GPU_OVERHEAD_BYTES if is_gpu else CPU_OVERHEAD_BYTES


_FLAG_OF_CACHE = {
    "n-gram rows that are kept": "--row-cache-bytes",
    "prefix cache: snapshots": "--prefix-cache-bytes",
    "prefix cache: host tier": "--host-cache-bytes",
}
"""By the name of a use: what gives it less."""


def _refusal(plan: MemoryPlan, manifest: Manifest, most_blocks: int) -> str:
    memory = max(plan.memories, key=plan.missing)
    if memory.reserve >= memory.available:
        return (
            f"nothing is left of {_describe(memory)}; free memory, or give a --memory-reserve-bytes below "
            f"{memory.available:,}"
        )
    uses = ";\n".join(plan.table())
    return (
        f"the bundle does not fit: {_size(plan.missing(memory))} too much for {_describe(memory)}.\n{uses}.\n"
        f"{_advice(plan, memory, manifest, most_blocks)}"
    )


def _advice(plan: MemoryPlan, memory: Memory, manifest: Manifest, most_blocks: int) -> str:
    """What would help, the cheapest first."""
    if most_blocks >= 1 and memory is plan.device:
        return f"Load it with num_blocks={most_blocks} (--num-blocks) or less, or free memory"
    sizes = {use.name: use.num_bytes for use in plan.uses_of(memory)}
    caches = [flag for name, flag in _FLAG_OF_CACHE.items() if sizes.get(name, 0) >= plan.missing(memory)]
    if caches:
        return f"Give a smaller {' or '.join(caches)}, or free memory"
    options = []
    if manifest.ple_residency != PleResidency.DISK and (plan.is_unified or memory is plan.device):
        options.append("--ple-residency disk")
    if manifest.precision != "nvfp4":
        options.append("--precision nvfp4")
    options.append("a smaller --prefill-chunk or --max-batch-size")
    advice = f"Free memory, or build the bundle with {' or '.join(options)}"
    if memory.reserve:
        advice += "; a smaller --memory-reserve-bytes leaves less to the rest of the system"
    return advice


def _log(plan: MemoryPlan, limits: EngineLimits, is_choice: bool) -> None:
    logger.info("memory: %s", "; ".join(plan.table()))
    if is_choice and plan.num_blocks < limits.max_num_blocks:
        logger.warning(
            "memory is left for %s of the %s pages of a full batch: %s tokens in all sequences together%s",
            f"{plan.num_blocks:,}",
            f"{limits.max_num_blocks:,}",
            f"{plan.num_blocks * limits.block_size:,}",
            "" if plan.num_blocks >= limits.blocks_per_seq else f", fewer than one of {limits.max_seq_len:,} may have",
        )


def _describe(memory: Memory) -> str:
    kept = f" less {_size(memory.reserve)} in reserve" if memory.reserve else ""
    return f"{memory.name}, where {_size(memory.available)} are available{kept}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:,.2f} GiB" if num_bytes >= _GIB // 100 else f"{num_bytes / 2**20:,.2f} MiB"

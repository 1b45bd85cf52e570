"""Looks up the rows of n-gram tables that stay in their files: the inputs of a program that are `NgramRowsSpec`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen4exp_trt.errors import BundleError, CheckpointError, UnreadableRowsError
from qwen4exp_trt.plugins.number_formats import scales_of_rows
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.runtime.disk_speed import DiskSpeed, measure, warn
from qwen4exp_trt.runtime.limits import DRAFT_ROWS
from qwen4exp_trt.runtime.load_options import DEFAULT_ROW_CACHE_BYTES
from qwen4exp_trt.runtime.materialize import materialize
from qwen4exp_trt.runtime.ngram_table import TokenWindow
from qwen4exp_trt.runtime.row_cache import RowCache
from qwen4exp_trt.runtime.row_files import FailedRowsError
from qwen4exp_trt.runtime.row_table import RowTable
from qwen4exp_trt.runtime.specs import NUM_SLOTS, NgramRowsSpec, PleResidency, StateKind, StateSpec, TensorSpec
from qwen4exp_trt.runtime.state_pool import StatePool, allocate_states
from qwen4exp_trt.runtime.tensor_source import TensorSource
from qwen4exp_trt.runtime.weights import dtype_from_name

logger = logging.getLogger(__name__)


class NgramRows:
    """An `NgramTable` on disk. Completes steps by what ``specs`` say, reading rows from ``source``, which stays open.

    The hash looks back at the tokens before a step, which are kept here for each of ``num_slots`` sequences as the op
    keeps them: by position, so that tokens can be taken back. Of recently used rows ``cache_bytes`` stay in memory. A
    thread reads the rows of announced tokens into that memory while a step runs.
    """

    residency = PleResidency.DISK
    states: StatePool
    """Those tokens, ``layers.N.ple.ngram_ids`` of each table: on the CPU, states like those of a program."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        source: TensorSource,
        num_slots: int,
        cache_bytes: int = DEFAULT_ROW_CACHE_BYTES,
    ) -> None:
        tables = [spec for spec in specs if isinstance(spec, NgramRowsSpec)]
        rings = {spec.name: ngram_ring(spec) for spec in tables}
        self.states = StatePool(rings.values(), allocate_states(tuple(rings.values()), 0, num_slots))
        self._source, self._is_closed = source, False
        self._tables = {
            spec.name: _Table(spec, source, self.states[rings[spec.name].name], cache_bytes) for spec in tables
        }
        self._speeds: dict[str, DiskSpeed] = {}
        self._announced: list[tuple[list[int], int]] = []
        """Tokens of later steps, and how many in front of them only say what was before."""

    @property
    def info(self) -> Mapping[str, Any]:
        return {
            "residency": str(self.residency),
            "row_cache_bytes": sum(table.cache_bytes for table in self._tables.values()),
            "disks": {name: speed.to_dict() for name, speed in self._speeds.items()},
        }

    def measure_disks(self) -> None:
        """Measure the disk of each table by some hundred reads, and warn of one that is slow or remote."""
        for name, table in self._tables.items():
            speed = table.measure_disk()
            if speed is not None:
                self._speeds[name] = speed
                warn(speed)

    def complete(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``inputs`` of a step (on the CPU) with the rows that they lack. Steps must come in their order.

        `UnreadableRowsError` for rows that cannot be read: then nothing has changed, and the same step may be run again
        with other sequences.
        """
        if self._is_closed:
            raise BundleError("the files of the n-gram table are closed; load the bundle again")
        missing = [table for name, table in self._tables.items() if name not in inputs]
        hashed = [table.hash(inputs) for table in missing]
        found: dict[str, Tensor] = {}
        errors: dict[int, CheckpointError] = {}
        for table, hashes in zip(missing, hashed, strict=True):
            try:
                found[table.name] = table.look_up(hashes.rows)
            except FailedRowsError as error:
                errors = hashes.by_sequence(error) | errors
        if errors:
            raise UnreadableRowsError(dict(sorted(errors.items())))
        for table, hashes in zip(missing, hashed, strict=True):
            table.keep(hashes)
        self._start_prefetch()
        return {**inputs, **found}

    def prefetch(self, windows: Iterable[TokenWindow], at_once: bool = False) -> None:
        """Say which tokens will come after the next step: their rows are read while that runs, or from now on."""
        reach = max((table.reach for table in self._tables.values()), default=0)
        self._announced = []
        for window in windows:
            first = max(0, window.start - reach)
            self._announced.append((list(window.token_ids[first : window.stop]), window.start - first))
        if at_once:
            self._start_prefetch()

    def close(self) -> None:
        self._is_closed = True
        for table in self._tables.values():
            table.close()
        self._source.close()

    def _start_prefetch(self) -> None:
        windows, self._announced = self._announced, []
        if windows:
            for table in self._tables.values():
                table.prefetch(windows)


def ngram_ring(spec: NgramRowsSpec) -> StateSpec:
    """The state that the hash of an input keeps on the host; its name has that of the input's layer."""
    layer = next((int(part) for part in spec.name.split(".") if part.isdigit()), 0)
    name = ".".join([*spec.name.split(".")[:-1], StateKind.NGRAM_IDS.value])
    rows = len(spec.multipliers) - 1 + DRAFT_ROWS
    return StateSpec(name, StateKind.NGRAM_IDS, layer, (NUM_SLOTS, rows), "int32", init=spec.eos_token_id)


@dataclass(frozen=True)
class _Hashes:
    """The rows that a step needs, and the rings behind it, which are not kept yet."""

    rows: np.ndarray
    """int64 ids ``[T, P]``."""
    slots: Tensor
    rings: Tensor
    ends: np.ndarray
    """Where the tokens of each sequence end."""

    def by_sequence(self, error: FailedRowsError) -> dict[int, CheckpointError]:
        """The first of the failures of each sequence."""
        found: dict[int, CheckpointError] = {}
        for place, failure in sorted(error.failures.items()):
            sequence = int(np.searchsorted(self.ends, place // self.rows.shape[1], side="right"))
            found.setdefault(min(sequence, len(self.ends) - 1), failure)
        return found


@dataclass
class _Prefetch:
    """What the thread is reading; ``rows`` are known once it is at it."""

    windows: Sequence[tuple[list[int], int]]
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    future: Future[None] = field(init=False)


class _Table:
    """One input; ``ngram_ids`` is its ring."""

    def __init__(self, spec: NgramRowsSpec, source: TensorSource, ngram_ids: Tensor, cache_bytes: int) -> None:
        self._spec, self._ngram_ids = spec, ngram_ids
        constants = (spec.multipliers, spec.head_sizes, spec.head_offsets)
        self._constants = [torch.tensor(values) for values in constants]
        self._reader = DequantizingReader(spec, source)
        self._dtype = dtype_from_name(spec.dtype)
        self._width = int(spec.shape[-1]) // len(spec.head_sizes)
        row = self._width, self._dtype
        self._cache = RowCache(RowCache.capacity_within(cache_bytes, *row), *row)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ngram-rows")
        self._prefetches: list[_Prefetch] = []

    @property
    def name(self) -> str:
        return self._spec.name

    @property
    def reach(self) -> int:
        """How many tokens the hash of a token looks back."""
        return len(self._spec.multipliers) - 1

    @property
    def cache_bytes(self) -> int:
        """All memory that the rows which are kept ever take."""
        return self._cache.num_bytes

    def measure_disk(self) -> DiskSpeed | None:
        return measure(list(self._reader.tables.values()), len(self._spec.head_sizes))

    def hash(self, inputs: Mapping[str, Tensor]) -> _Hashes:
        """Of a step, leaving the rings as they are."""
        count = int(inputs["num_seqs"])
        slots = inputs["slot_ids"][:count].long()
        rings, own = self._ngram_ids[slots], torch.arange(count, dtype=torch.int32)
        batch = [inputs["query_start_loc"], inputs["seq_lens"], own, inputs["num_seqs"]]
        rows = self._hash(inputs["input_ids"], rings, batch)
        return _Hashes(rows, slots, rings, inputs["query_start_loc"][1 : count + 1].numpy())

    def keep(self, hashes: _Hashes) -> None:
        """The step is going to run: its tokens are history from now on."""
        self._ngram_ids[hashes.slots] = hashes.rings

    def look_up(self, rows: np.ndarray) -> Tensor:
        """The embeddings ``[T, P*E]`` of row ids ``[T, P]``. `FailedRowsError` with places among these ids."""
        ids = rows.reshape(-1)
        out = torch.empty((len(ids), self._width), dtype=self._dtype)
        missing = np.flatnonzero(~self._cache.take(ids, out))
        if len(missing) and self._await_prefetch(ids[missing]):
            missing = np.flatnonzero(~self._cache.take(ids, out))
        if len(missing):
            unique, places = np.unique(ids[missing], return_inverse=True)
            try:
                values = self._reader.read(unique)
            except FailedRowsError as error:
                failures = [error.failures.get(place) for place in places.tolist()]
                raise FailedRowsError(
                    {int(at): why for at, why in zip(missing, failures, strict=True) if why is not None}
                ) from error
            out.index_copy_(0, torch.from_numpy(missing), values.index_select(0, torch.from_numpy(places)))
            self._cache.put(unique, values)
        return out.view(len(rows), -1)

    def prefetch(self, windows: Sequence[tuple[list[int], int]]) -> None:
        """Read what these tokens need in the background; what was asked for before and has not begun is dropped."""
        for one in self._prefetches:
            one.future.cancel()
        self._prefetches = [one for one in self._prefetches if not one.future.done()]
        new = _Prefetch(windows)
        new.future = self._thread.submit(self._read_ahead, new)
        self._prefetches.append(new)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _hash(self, input_ids: Tensor, rings: Tensor, batch: Sequence[Tensor]) -> np.ndarray:
        body = all_specs()["ple_hash"].body
        return body(input_ids, rings, *self._constants, *batch, self._spec.eos_token_id).numpy()

    def _await_prefetch(self, missing: np.ndarray) -> bool:
        """Wait for what reads any of these rows; whether there was such."""
        awaited = [one for one in self._prefetches if np.isin(missing, one.rows).any()]
        for one in awaited:
            one.future.result()
        return bool(awaited)

    def _read_ahead(self, prefetch: _Prefetch) -> None:
        """In the thread. What cannot be read is left to the step that needs it, which then says why."""
        try:
            rows = np.unique(self._rows_of(prefetch.windows))
            # More would push out each other.
            prefetch.rows = rows[~self._cache.has(rows)][: self._cache.capacity // 2]
            if len(prefetch.rows):
                self._cache.put(prefetch.rows, self._reader.read(prefetch.rows))
        except CheckpointError as error:
            logger.debug("rows were not read ahead: %s", error)
        except Exception:
            logger.exception("rows were not read ahead")

    def _rows_of(self, windows: Sequence[tuple[list[int], int]]) -> np.ndarray:
        """What the tokens of windows need; each window is hashed as a sequence of its own."""
        lengths = [len(ids) for ids, _ in windows]
        ends = np.cumsum(lengths)
        input_ids = torch.tensor([token for ids, _ in windows for token in ids], dtype=torch.int32)
        values = ([0, *ends], lengths, range(len(windows)), [len(windows)])
        batch = [torch.tensor(list(value), dtype=torch.int32) for value in values]
        rings = self._ngram_ids.new_empty(len(windows), self._ngram_ids.shape[1])
        rows = self._hash(input_ids, rings, batch)
        starts = ends - lengths
        is_behind = [np.arange(skipped) + start for start, (_, skipped) in zip(starts, windows, strict=True)]
        return np.delete(rows, np.concatenate(is_behind), axis=0).reshape(-1)


class DequantizingReader:
    """Reads rows of a table on disk by the op that gathers them, to which those that are read are the whole table."""

    def __init__(self, spec: NgramRowsSpec, source: TensorSource) -> None:
        self._op, self.num_rows = all_specs()[spec.gather], int(spec.operands[0].tensor.shape[0])
        operands = dict(zip(self._op.inputs[1:], spec.operands, strict=True))
        self.tables = {arg: RowTable(weight.recipe, source) for arg, weight in operands.items() if arg.dims[0] == "R"}
        """By operand, those that have a row for each of the table's."""
        self._scales = {
            arg: materialize(weight.recipe, source) for arg, weight in operands.items() if arg not in self.tables
        }
        self._operands, self._attrs = tuple(operands), [spec.dtype] if self._op.attrs else []

    def read(self, rows: np.ndarray) -> Tensor:
        """Rows ``[n, E]`` of distinct ids ``[n]``. `FailedRowsError` if some cannot be read."""
        ids = torch.from_numpy(rows)
        of_rows = [
            self.tables[arg].read(rows) if arg in self.tables else scales_of_rows(self._scales[arg], ids, self.num_rows)
            for arg in self._operands
        ]
        return self._op.body(torch.arange(len(rows)).unsqueeze(1), *of_rows, *self._attrs)

"""Looks up the rows of n-gram tables that stay in their files: the inputs of a program that are `NgramRowsSpec`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from qwen4exp_trt.plugins.number_formats import scales_of_rows
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.runtime.limits import DRAFT_ROWS
from qwen4exp_trt.runtime.load_options import DEFAULT_ROW_CACHE_BYTES
from qwen4exp_trt.runtime.materialize import materialize
from qwen4exp_trt.runtime.row_table import RowTable
from qwen4exp_trt.runtime.specs import NUM_SLOTS, NgramRowsSpec, StateKind, StateSpec, TensorSpec
from qwen4exp_trt.runtime.state_pool import StatePool, allocate_states
from qwen4exp_trt.runtime.tensor_source import TensorSource
from qwen4exp_trt.runtime.weights import dtype_from_name

_BATCH = ("query_start_loc", "seq_lens", "slot_ids", "num_seqs")


class NgramRows:
    """Completes the inputs of steps by what ``specs`` says, reading rows of tables from ``source``, which stays open.

    The hash looks back at the tokens before a step, which are kept here for each of ``num_slots`` sequences as the op
    keeps them: by position, so that tokens can be taken back. Of recently used rows ``cache_bytes`` stay in memory.
    """

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
        self._tables = {
            spec.name: _Table(spec, source, self.states[rings[spec.name].name], cache_bytes) for spec in tables
        }

    def complete(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``inputs`` of a step (on the CPU) with the rows that they lack. Steps must come in their order."""
        missing = [name for name in self._tables if name not in inputs]
        return {**inputs, **{name: self._tables[name].look_up(inputs) for name in missing}}


def ngram_ring(spec: NgramRowsSpec) -> StateSpec:
    """The state that the hash of an input keeps on the host; its name has that of the input's layer."""
    layer = next((int(part) for part in spec.name.split(".") if part.isdigit()), 0)
    name = ".".join([*spec.name.split(".")[:-1], StateKind.NGRAM_IDS.value])
    rows = len(spec.multipliers) - 1 + DRAFT_ROWS
    return StateSpec(name, StateKind.NGRAM_IDS, layer, (NUM_SLOTS, rows), "int32", init=spec.eos_token_id)


class _Table:
    """One input; ``ngram_ids`` is its ring."""

    def __init__(self, spec: NgramRowsSpec, source: TensorSource, ngram_ids: Tensor, cache_bytes: int) -> None:
        self._spec, self._ngram_ids = spec, ngram_ids
        constants = (spec.multipliers, spec.head_sizes, spec.head_offsets)
        self._constants = [torch.tensor(values) for values in constants]
        self._read = _dequantizing_reader(spec, source)
        dtype = dtype_from_name(spec.dtype)
        width = int(spec.shape[-1]) // len(spec.head_sizes)
        self._cache = RowCache(cache_bytes // (width * dtype.itemsize), width, dtype)

    def look_up(self, inputs: Mapping[str, Tensor]) -> Tensor:
        batch = [inputs[name] for name in _BATCH]
        ids = all_specs()["ple_hash"].body(
            inputs["input_ids"], self._ngram_ids, *self._constants, *batch, self._spec.eos_token_id
        )
        rows, places = np.unique(ids.numpy(), return_inverse=True)
        embeddings = self._cache.get(rows, self._read)
        return embeddings[torch.from_numpy(places.reshape(ids.shape))].flatten(1)


def _dequantizing_reader(spec: NgramRowsSpec, source: TensorSource) -> Callable[[np.ndarray], Tensor]:
    """Reads rows ``[n, E]`` of the table by its op, to which those that are read are the whole table."""
    op, num_rows = all_specs()[spec.gather], int(spec.operands[0].tensor.shape[0])
    operands = dict(zip(op.inputs[1:], spec.operands, strict=True))
    tables = {arg: RowTable(weight.recipe, source) for arg, weight in operands.items() if arg.dims[0] == "R"}
    scales = {arg: materialize(weight.recipe, source) for arg, weight in operands.items() if arg not in tables}
    attrs = [spec.dtype] if op.attrs else []

    def read(rows: np.ndarray) -> Tensor:
        ids = torch.from_numpy(rows)
        of_rows = [
            tables[arg].read(rows) if arg in tables else scales_of_rows(scales[arg], ids, num_rows) for arg in operands
        ]
        return op.body(torch.arange(len(rows)).unsqueeze(1), *of_rows, *attrs)

    return read


class RowCache:
    """The last used of rows of ``width`` elements, ``capacity`` of them."""

    def __init__(self, capacity: int, width: int, dtype: torch.dtype) -> None:
        self._memory = torch.empty((capacity, width), dtype=dtype)
        self._places: OrderedDict[int, int] = OrderedDict()
        """Row id -> its place in memory; the least recently used first."""

    def get(self, rows: np.ndarray, read: Callable[[np.ndarray], Tensor]) -> Tensor:
        """The rows ``[n, width]`` of distinct ids ``[n]``; ``read`` gives those that are not here."""
        found = np.array([self._places.get(row, -1) for row in rows.tolist()], dtype=np.int64)
        for row in rows[found >= 0].tolist():
            self._places.move_to_end(row)
        out = self._memory.new_empty((len(rows), self._memory.shape[1]))
        is_here = torch.from_numpy(found >= 0)
        out[is_here] = self._memory[torch.from_numpy(found[found >= 0])]
        missing = rows[found < 0]
        if len(missing):
            values = read(missing)
            out[~is_here] = values
            self._keep(missing, values)
        return out

    def _keep(self, rows: np.ndarray, values: Tensor) -> None:
        capacity = len(self._memory)
        rows, values = rows[:capacity], values[:capacity]
        places = []
        for row in rows.tolist():
            is_full = len(self._places) == capacity
            place = self._places.popitem(last=False)[1] if is_full else len(self._places)
            self._places[row] = place
            places.append(place)
        self._memory[torch.tensor(places, dtype=torch.int64)] = values

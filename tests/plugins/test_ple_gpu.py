"""The n-gram kernels on a GPU at released sizes, against the CPU bodies in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from op_checks import as_tuple, errors_of, run_on_gpu
from torch import Tensor

from qwen4exp_trt.plugins.number_formats import e4m3_from_float, quantize_nvfp4
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.sample_batches import gain, normal, sample_batch
from qwen4exp_trt.plugins.spec import OpSpec
from qwen4exp_trt.runtime.host_memory import map_into_gpu

pytestmark = pytest.mark.gpu

HIDDEN, STREAMS, TAPS, DILATION, RING = 2560, 4, 4, 3, 17
WIDTH = STREAMS * HIDDEN
HEADS, ROW = 16, 160
EOS, VOCAB = 248_044, 248_320
MULTIPLIERS = torch.tensor([23703573157769, 20109073645365, 8052911324071])
HEAD_SIZES = 20_000_000 + torch.tensor([3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171])
BATCHES = {
    "B1-T1": ([1], [700]),
    "B1-T8": ([8], [3]),
    "B1-T1-fresh": ([1], [0]),
    "B64-T1": ([1] * 64, list(range(64))),
    "B64-T8": ([8] * 64, list(range(0, 640, 10))),
    "mixed": ([1, 300, 5, 1, 9, 17, 18, 26], [40, 0, 2, 0, 9, 8, 100, 1]),
}


def names_of(spec: OpSpec) -> list[str]:
    return [*(arg.name for arg in spec.inputs), *(attr.name for attr in spec.attrs)]


def compare(op: str, operands: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
    spec = all_specs()[op]
    args = [operands[name] for name in names_of(spec)]
    oracle = replace(spec, reference=spec.body)
    errors = errors_of(oracle, args, lambda *a: run_on_gpu(spec, list(a)))
    assert all(error <= spec.tolerance.get(dtype, 0.0) for error in errors.values()), errors


def conv_operands(batch: dict[str, Any], dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
    batch, generator = dict(batch), torch.Generator().manual_seed(seed)
    tokens, slots = batch.pop("T"), batch.pop("num_slots")
    return {
        "stack": normal(generator, tokens, WIDTH, dtype=dtype, scale=3),
        "key": normal(generator, tokens, WIDTH, dtype=dtype),
        "value": normal(generator, tokens, HIDDEN, dtype=dtype, scale=0.1),
        "key_gain": gain(generator, WIDTH),
        "query_gain": gain(generator, WIDTH),
        "conv_gain": gain(generator, WIDTH),
        "conv_weight": normal(generator, WIDTH, TAPS, dtype=dtype),
        "ple_conv_state": normal(generator, slots, RING, WIDTH, dtype=dtype),
        **batch,
        "dilation": DILATION,
        "eps": 1e-6,
    }


def hash_operands(batch: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    batch, generator = dict(batch), torch.Generator().manual_seed(seed)
    tokens, slots = batch.pop("T"), batch.pop("num_slots")

    def ids(*shape: int) -> Tensor:
        drawn = torch.randint(VOCAB, shape, generator=generator)
        return torch.where(torch.rand(shape, generator=generator) < 0.2, EOS, drawn).int()

    return {
        "input_ids": ids(tokens),
        "ngram_ids": ids(slots, 10),
        "multipliers": MULTIPLIERS,
        "head_sizes": HEAD_SIZES,
        "head_offsets": HEAD_SIZES.cumsum(0) - HEAD_SIZES,
        **batch,
        "eos_token_id": EOS,
    }


@pytest.mark.parametrize("name", BATCHES)
def test_conv(name: str) -> None:
    compare("ple_conv", conv_operands(sample_batch(*BATCHES[name], padding_seqs=2, padding_rows=3), torch.bfloat16))


def test_conv_in_float32() -> None:
    compare("ple_conv", conv_operands(sample_batch(*BATCHES["mixed"]), torch.float32), torch.float32)


@pytest.mark.parametrize("name", BATCHES)
def test_hash(name: str) -> None:
    compare("ple_hash", hash_operands(sample_batch(*BATCHES[name], padding_seqs=2, padding_rows=3)))


def test_rows_of_padding_name_the_first_row() -> None:
    """A gather reads them, too."""
    spec, batch = all_specs()["ple_hash"], sample_batch([3], [1], padding_seqs=1, padding_rows=70)
    for num_seqs, first in ((1, 3), (0, 0)):
        operands = hash_operands({**batch, "num_seqs": torch.tensor([num_seqs], dtype=torch.int32)})
        if not num_seqs:
            operands["query_start_loc"].zero_()
        before = operands["ngram_ids"].clone()
        (rows,) = run_on_gpu(spec, [operands[name] for name in names_of(spec)])
        assert not rows[first:].any()
        assert num_seqs or torch.equal(before, operands["ngram_ids"])


def test_states_after_a_thousand_steps() -> None:
    """Steps of 1 to 8 tokens; the ring is that of all tokens at once in float32, up to one rounding."""
    generator, total, done = torch.Generator().manual_seed(5), 0, []
    lengths = torch.randint(1, 9, (1000,), generator=generator).tolist()
    whole = conv_operands(sample_batch([sum(lengths)], [0]), torch.bfloat16)
    hashes = hash_operands(sample_batch([sum(lengths)], [0]))
    conv, hashed = all_specs()["ple_conv"], all_specs()["ple_hash"]
    moved = {name: value.cuda() for name, value in (hashes | whole).items() if isinstance(value, Tensor)}
    attrs = {"dilation": DILATION, "eps": 1e-6, "eos_token_id": EOS}
    per_token = ("input_ids", "stack", "key", "value")
    metadata = torch.tensor([[0, n, end, 1] for n, end in zip(lengths, torch.tensor(lengths).cumsum(0), strict=True)])
    metadata = metadata.int().cuda()
    for index, length in enumerate(lengths):
        step = {**attrs, **moved} | {name: moved[name][total : total + length] for name in per_token}
        _, _, end, count = metadata[index]
        step |= {"query_start_loc": metadata[index, :2], "seq_lens": end[None], "num_seqs": count[None]}
        done.append(as_tuple(hashed.overload(*[step[name] for name in names_of(hashed)]))[0])
        conv.overload(*[step[name] for name in names_of(conv)])
        total += length
    expected = hashed.body(*[hashes[name] for name in names_of(hashed)])
    assert torch.equal(torch.cat(done).cpu(), expected)
    in_float32 = [v.float() if isinstance(v, Tensor) and v.dtype == torch.bfloat16 else v for v in whole.values()]
    oracle = dict(zip(whole, in_float32, strict=True))
    conv.body(*[oracle[name] for name in names_of(conv)])
    slot = int(whole["slot_ids"][0])
    ring, expected = moved["ple_conv_state"][slot].cpu().float(), oracle["ple_conv_state"][slot]
    assert float((ring - expected).norm() / expected.norm()) <= conv.tolerance[torch.bfloat16]


# --- gathers --------------------------------------------------------------------------------------------------------


def table_operands(table_format: str, num_rows: int, device: str) -> tuple[str, dict[str, Any]]:
    """The op and its table: on the ``device``, or in the host's memory but for the scales of its shards."""
    generator = torch.Generator().manual_seed(1)
    values, scales = normal(generator, num_rows, ROW), torch.rand(8, generator=generator) + 0.1
    op, tensors = {
        "bf16": lambda: ("ple_gather", {"table": values.bfloat16()}),
        "fp8": lambda: ("fp8_ple_gather", {"table": e4m3_from_float(values), "scales": scales}),
        "nvfp4": lambda: ("nvfp4_ple_gather", _nvfp4_table(values, scales)),
    }[table_format]()
    is_mapped = {name: device == "host" and name != "scales" for name in tensors}
    return op, {name: map_into_gpu(t, name) if is_mapped[name] else t.cuda() for name, t in tensors.items()}


def _nvfp4_table(values: Tensor, scales: Tensor) -> dict[str, Tensor]:
    packed, block_scales, _ = quantize_nvfp4(values)
    return {"table": packed.view(torch.float4_e2m1fn_x2), "block_scales": block_scales, "scales": scales}


@pytest.mark.parametrize("table_format", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("device", ["cuda", "host"])
def test_gathers(table_format: str, device: str) -> None:
    op, tensors = table_operands(table_format, 4096, device)
    spec = all_specs()[op]
    on_cpu = {name: tensor.view(torch.uint8).cpu().view(tensor.dtype) for name, tensor in tensors.items()}
    for tokens in (1, 8, 512, 5000):
        rows = torch.randint(4096, (tokens, HEADS), generator=torch.Generator().manual_seed(tokens))
        attrs = [] if op == "ple_gather" else ["bfloat16"]
        expected = spec.body(rows, *on_cpu.values(), *attrs)
        got = spec.overload(rows.cuda(), *tensors.values(), *attrs)
        assert torch.equal(got.cpu(), expected), tokens


def test_rows_beyond_four_gigabytes() -> None:
    table = torch.zeros(30_000_000, ROW, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    table.view(torch.uint8)[-1] = 0x38  # one
    rows = torch.tensor([[29_999_999, 0, 13_421_773, 29_999_999]], device="cuda")
    got = torch.ops.q4e.fp8_ple_gather(rows, table, torch.tensor([3.0, 5.0], device="cuda"), "bfloat16")
    assert got.view(4, ROW)[:, 0].tolist() == [5.0, 0.0, 0.0, 5.0] and got.sum() == 10 * ROW

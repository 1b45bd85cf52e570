"""The linear attention kernels on a GPU at released sizes; the references are the CPU bodies run there in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_checks import as_tuple, clone, rms_error
from op_steps import OpSteps
from torch import Tensor
from torch.nn.functional import softplus

from qwen4exp_trt.plugins.gated_delta_rule.cases import make_operands
from qwen4exp_trt.plugins.gated_delta_rule.op import l2_norm, recurrent_steps
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.sample_batches import normal, sample_batch
from qwen4exp_trt.plugins.spec import OpSpec

pytestmark = pytest.mark.gpu

RELEASED = (16, 48, 128, 128)
DRAFT_ROWS = 8
CHANNELS, WIDTH, TAPS = 10_240, 16_384, 4
BATCHES = {
    "B1-T1": ([1], [700], [0]),
    "B1-T1-fresh": ([1], [0], [0]),
    "B1-T8-replay": ([8], [40], [7]),
    "B2-T8-replay": ([8, 3], [40, 5], [7, 2]),
    "B3-T4-replay": ([4, 1, 3], [9, 100_000, 3], [3, 1, 2]),
    "B64-T1": ([1] * 64, list(range(64)), [b % 3 if b > 3 else 0 for b in range(64)]),
    "B64-T8": ([8] * 64, list(range(0, 640, 10)), [b % 8 if b else 0 for b in range(64)]),
    "mixed": ([1, 300, 5, 1, 9, 17, 18, 26], [40, 0, 2, 0, 9, 8, 100, 1], [7, 0, 1, 0, 3, 0, 7, 0]),
}


def delta_operands(name: str, dtype: torch.dtype = torch.bfloat16, heads: Any = RELEASED) -> list[Any]:
    spec, generator = all_specs()["gated_delta_rule"], torch.Generator().manual_seed(0)
    values = make_operands(dtype, generator, *BATCHES[name], heads, DRAFT_ROWS, padding_seqs=2, padding_rows=3)
    return arguments(spec, values)


def conv_operands(name: str, dtype: torch.dtype) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    batch = sample_batch(*BATCHES[name][:2], padding_seqs=2, padding_rows=3)
    tokens, slots = batch.pop("T"), batch.pop("num_slots")
    values = {
        "x": normal(generator, tokens, WIDTH, dtype=dtype),
        "weight": normal(generator, CHANNELS, TAPS, dtype=dtype),
        "conv_state": normal(generator, slots, TAPS - 1 + DRAFT_ROWS, CHANNELS, dtype=dtype),
        **batch,
    }
    return arguments(all_specs()["causal_conv1d"], values)


def arguments(spec: OpSpec, values: dict[str, Any]) -> list[Any]:
    return [values[arg.name] for arg in spec.inputs] + [values[attr.name] for attr in spec.attrs]


def compare(spec: OpSpec, args: list[Any], dtype: torch.dtype = torch.bfloat16) -> None:
    """Rows of real sequences and all states. The slots of fresh sequences are full of NaN: nothing of them is read."""
    names = [arg.name for arg in spec.inputs]
    count = int(args[names.index("num_seqs")])
    starts, lens, slots = (args[names.index(name)] for name in ("query_start_loc", "seq_lens", "slot_ids"))
    fresh = slots[:count][lens[:count] == starts.diff()[:count]].long()
    for arg, value in zip(spec.inputs, args, strict=False):
        if arg.mutated and value.is_floating_point():
            value[fresh] = torch.nan
    moved = [arg.cuda() if isinstance(arg, Tensor) else arg for arg in args]
    oracle, rows = clone(moved, upcast=True), int(starts[count])
    with torch.device("cuda"):
        (expected,), (got,) = as_tuple(spec.body(*oracle)), as_tuple(spec.overload(*moved))
    errors = {"out": rms_error(expected[:rows], got[:rows])}
    for arg, e, g in zip(spec.inputs, oracle, moved, strict=False):
        if arg.mutated:
            errors[arg.name] = rms_error(*(torch.nan_to_num(v) if v.is_floating_point() else v for v in (e, g)))
    assert all(error <= spec.tolerance[dtype] for error in errors.values()), errors


@pytest.mark.parametrize("name", BATCHES)
def test_delta_rule(name: str) -> None:
    compare(all_specs()["gated_delta_rule"], delta_operands(name))


@pytest.mark.parametrize("tokens,context,pending", [(1, 700, 0), (1, 0, 0), (8, 40, 0), (4, 40, 3), (20, 9, 2)])
@pytest.mark.parametrize("slot", [0, 2])
def test_delta_rule_of_a_lone_sequence(slot: int, tokens: int, context: int, pending: int) -> None:
    """Its state is fetched from the first slot before its slot is known."""
    values = make_operands(
        torch.bfloat16, torch.Generator().manual_seed(1), [tokens], [context], [pending], RELEASED, DRAFT_ROWS
    )
    for name in ("recurrent_state", "draft_rows", "committed_len"):
        values[name][slot] = values[name][int(values["slot_ids"][0])].clone()
    values["slot_ids"].fill_(slot)
    spec = all_specs()["gated_delta_rule"]
    compare(spec, arguments(spec, values))


@pytest.mark.parametrize("heads", [RELEASED, (4, 16, 32, 32), (1, 3, 68, 36), (2, 2, 128, 64)])
def test_delta_rule_in_float32(heads: Any) -> None:
    compare(all_specs()["gated_delta_rule"], delta_operands("mixed", torch.float32, heads), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", BATCHES)
def test_convolution(name: str, dtype: torch.dtype) -> None:
    compare(all_specs()["causal_conv1d"], conv_operands(name, dtype), dtype)


def test_a_batch_of_padding_changes_nothing() -> None:
    for spec, args in (
        (all_specs()["gated_delta_rule"], delta_operands("B3-T4-replay")),
        (all_specs()["causal_conv1d"], conv_operands("B3-T4-replay", torch.bfloat16)),
    ):
        names = [arg.name for arg in spec.inputs]
        for name in ("query_start_loc", "seq_lens", "slot_ids", "num_seqs"):
            args[names.index(name)].zero_()
        moved = [arg.cuda() if isinstance(arg, Tensor) else arg for arg in args]
        spec.overload(*moved)
        for arg, before, after in zip(spec.inputs, args, moved, strict=False):
            assert torch.equal(before, after.cpu()), arg.name


# --- many steps ------------------------------------------------------------------------------------------------------


def delta_steps(tokens: int, count: int) -> OpSteps:
    num_k_heads, heads, key_dim, value_dim = RELEASED
    one = [1] * count
    values = make_operands(torch.bfloat16, torch.Generator().manual_seed(3), one, one, one, RELEASED, DRAFT_ROWS)
    moved = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in values.items()}
    conv_width = 2 * num_k_heads * key_dim + heads * value_dim
    widths = {"conv_out": conv_width, "qkvz": conv_width + heads * value_dim, "ba": 2 * heads}
    rows = {
        name: torch.randn(count, tokens, width, device="cuda", dtype=torch.bfloat16) for name, width in widths.items()
    }
    return OpSteps("gated_delta_rule", rows, {name: value for name, value in moved.items() if name not in rows})


def state_in_float64(steps: OpSteps, until: int) -> Tensor:
    """The states ``[B, HV, K, V]`` after ``until`` tokens of each sequence."""
    num_k_heads, heads, key_dim, value_dim = RELEASED
    k, v = (
        steps.rows["conv_out"][:, :until]
        .double()[..., num_k_heads * key_dim :]
        .split([num_k_heads * key_dim, heads * value_dim], -1)
    )
    b, a = steps.rows["ba"][:, :until].double().chunk(2, -1)
    k = l2_norm(k.unflatten(-1, (num_k_heads, key_dim))).repeat_interleave(heads // num_k_heads, -2)
    g = -steps.others["A_log"].double().exp() * softplus(a + steps.others["dt_bias"].double())
    lens = torch.full((len(k),), until, device="cuda")
    state = torch.zeros(len(k), heads, key_dim, value_dim, dtype=torch.float64, device="cuda")
    v = v.unflatten(-1, (heads, value_dim))
    return recurrent_steps(k, k, v, g, b.sigmoid(), state, lens, lens)[1]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("remembers", [False, True])
def test_state_after_a_thousand_steps(remembers: bool, count: int) -> None:
    """Also with gates that forget a few parts in a thousand a token, so that errors would pile up."""
    steps = delta_steps(1000, count)
    if remembers:
        steps.others["A_log"].fill_(-5.0)
    for context in range(1000):
        steps.step([context] * count, [1] * count)
    states = steps.states["recurrent_state"][1 : count + 1].flip(0)
    assert rms_error(state_in_float64(steps, 1000), states) <= 1e-5


@pytest.mark.parametrize("count", [2, 3])
def test_state_after_a_thousand_drafts_some_of_which_are_rejected(count: int) -> None:
    """The last step has one row, so that the state holds every token."""
    generator, steps, contexts = torch.Generator().manual_seed(4), delta_steps(3200, count), [0] * count
    steps.others["A_log"].fill_(-5.0)
    for _ in range(1000):
        length = int(torch.randint(1, DRAFT_ROWS + 1, (1,), generator=generator))
        kept = torch.randint(1, length + 1, (count,), generator=generator).tolist()
        steps.draft_step(contexts, length, kept)
        contexts = [context + rows for context, rows in zip(contexts, kept, strict=True)]
    steps.step(contexts, [1] * count)
    for b, context in enumerate(contexts):
        expected = state_in_float64(steps, context + 1)[b]
        assert rms_error(expected, steps.states["recurrent_state"][count - b]) <= 1e-5


def test_convolution_over_a_thousand_drafts() -> None:
    generator, contexts = torch.Generator().manual_seed(6), [0, 0, 0]
    x = torch.randn(3, 3200, WIDTH, device="cuda", dtype=torch.bfloat16)
    weight = normal(generator, CHANNELS, TAPS, dtype=torch.bfloat16).cuda()
    state = torch.full((4, TAPS - 1 + DRAFT_ROWS, CHANNELS), torch.nan, dtype=torch.bfloat16, device="cuda")
    steps = OpSteps("causal_conv1d", {"x": x}, {"weight": weight, "conv_state": state})
    outputs: list[list[Tensor]] = [[], [], []]
    for _ in range(1000):
        length = int(torch.randint(1, DRAFT_ROWS + 1, (1,), generator=generator))
        kept = torch.randint(1, length + 1, (3,), generator=generator).tolist()
        for b, rows in enumerate(steps.draft_step(contexts, length, kept)):
            outputs[b].append(rows)
        contexts = [context + count for context, count in zip(contexts, kept, strict=True)]
    for b, context in enumerate(contexts):
        inputs = torch.nn.functional.pad(x[b, :context, :CHANNELS].float().T, (TAPS - 1, 0))
        expected = torch.nn.functional.conv1d(inputs[None], weight.float()[:, None], groups=CHANNELS)[0].T
        assert rms_error(torch.nn.functional.silu(expected), torch.cat(outputs[b])) <= 3e-3

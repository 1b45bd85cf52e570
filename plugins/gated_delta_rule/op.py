"""The gated delta rule with its gates, L2 norms and the gated RMSNorm behind it, over packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.cost import CostCall, Work
from qwen4exp_trt.plugins.gated_delta_rule.cases import CASES
from qwen4exp_trt.plugins.gated_delta_rule.launch import launches
from qwen4exp_trt.plugins.gated_delta_rule.reference import reference
from qwen4exp_trt.plugins.numerics import rms_norm
from qwen4exp_trt.plugins.packed import NUM_SEQS, QUERY_START_LOC, SEQ_LENS, SLOT_IDS, PackedBatch
from qwen4exp_trt.plugins.spec import Attr, OpSpec, TensorArg

L2_EPS = 1e-6
OUTPUT_GATES = {"sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu}


def l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def recurrent_steps(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, query_lens: Tensor, kept_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence, all sequences at once: ``q k`` ``[B, L, HV, K]``, ``v`` ``[B, L, HV, V]``, ``g beta``
    ``[B, L, HV]``, ``state`` ``[B, HV, K, V]`` -> (outputs ``[B, L, HV, V]``, the states after ``kept_lens`` rows)."""
    outputs, kept = torch.zeros_like(v), state
    for t in range(v.shape[1]):
        active = (t < query_lens)[:, None, None, None]
        decayed = state * g[:, t, :, None, None].exp()
        read = torch.einsum("bhkv,bhk->bhv", decayed, k[:, t])
        delta = beta[:, t, :, None] * (v[:, t] - read)
        updated = decayed + k[:, t, :, :, None] * delta[:, :, None, :]
        state = torch.where(active, updated, state)
        kept = torch.where((t < kept_lens)[:, None, None, None], state, kept)
        outputs[:, t] = torch.einsum("bhkv,bhk->bhv", updated, q[:, t])
    return outputs, kept


def held_lens(committed_len: Tensor, context_lens: Tensor, num_drafts: int) -> Tensor:
    """How many tokens of each sequence its state holds, ``[B]``: the larger of two lengths that is within the context.

    Raises `PluginError` where up to ``num_drafts - 1`` rows cannot bring the state to the context.
    """
    lens = committed_len.long()
    held = torch.where(lens <= context_lens[:, None], lens, -1).amax(1)
    held = torch.where(context_lens == 0, 0, held)
    if bool(((held < 0) | (context_lens - held >= num_drafts)).any()):
        raise PluginError(
            f"q4e::gated_delta_rule: the states hold {committed_len.tolist()} tokens (the latest two lengths of each "
            f"sequence), which at most {num_drafts - 1} rows must bring to the contexts {context_lens.tolist()}; of a "
            f"step of at most {num_drafts} rows any but the first can be taken back, until the next step"
        )
    return held


def body(
    conv_out: Tensor,
    qkvz: Tensor,
    ba: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    recurrent_state: Tensor,
    draft_rows: Tensor,
    committed_len: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_ids: Tensor,
    num_seqs: Tensor,
    num_k_heads: int,
    eps: float,
    output_gate: str,
) -> Tensor:
    _, num_v_heads, key_dim, value_dim = recurrent_state.shape
    key_width, repeats = num_k_heads * key_dim, num_v_heads // num_k_heads
    num_drafts = draft_rows.shape[1] // 2
    batch = PackedBatch.from_metadata(conv_out.shape[0], query_start_loc, seq_lens, num_seqs)
    slots = slot_ids[: len(batch.query_lens)].long()

    def key_heads(x: Tensor) -> Tensor:
        return l2_norm(x.unflatten(-1, (num_k_heads, key_dim))).repeat_interleave(repeats, -2)

    def operands(rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """k, v, g and beta from rows of k | v | b | a."""
        k, v, b, a = rows.float().split([key_width, num_v_heads * value_dim, num_v_heads, num_v_heads], -1)
        g = -A_log.float().exp() * softplus(a + dt_bias.float())
        return key_heads(k), v.unflatten(-1, (num_v_heads, value_dim)), g, b.sigmoid()

    held = held_lens(committed_len[slots], batch.context_lens, num_drafts)
    pending = batch.context_lens - held
    positions = held[:, None] + torch.arange(int(pending.max()) if len(pending) else 0)
    k, v, g, beta = operands(draft_rows[slots[:, None], positions % (2 * num_drafts)])
    initial = batch.load_state(recurrent_state, slot_ids)
    _, initial = recurrent_steps(k, k, v, g, beta, initial, pending, pending)

    rows = torch.cat([conv_out[:, key_width:], ba], -1)
    q = batch.pad(key_heads(conv_out[:, :key_width].float()) * key_dim**-0.5)
    k, v, g, beta = map(batch.pad, operands(rows))
    commits = torch.where(batch.query_lens <= num_drafts, batch.query_lens.clamp_max(1), batch.query_lens)
    padded, kept = recurrent_steps(q, k, v, g, beta, initial, batch.query_lens, commits)
    recurrent_state[slots] = kept
    store_drafts(batch, draft_rows, slots, rows, commits)
    store_lens(committed_len, slots, batch.context_lens, held, commits)

    z = qkvz[:, conv_out.shape[1] :].float().unflatten(-1, (num_v_heads, value_dim))
    out = rms_norm(batch.unpad(padded), norm_weight, eps) * OUTPUT_GATES[output_gate](z)
    return out.flatten(1).to(conv_out.dtype)


def store_drafts(batch: PackedBatch, draft_rows: Tensor, slots: Tensor, rows: Tensor, commits: Tensor) -> None:
    """Keep the rows ``[T, CK]`` that the states do not hold, in a ring addressed by position."""
    drafted = batch.offset_of_token >= commits[batch.seq_of_token]
    target = batch.position_of_token[drafted] % draft_rows.shape[1]
    draft_rows[slots[batch.seq_of_token[drafted]], target] = rows[: batch.num_tokens][drafted]


def store_lens(committed_len: Tensor, slots: Tensor, context_lens: Tensor, held: Tensor, commits: Tensor) -> None:
    """Write the new length over the older one; a sequence's first step begins with 0 in column 1."""
    old = committed_len[slots]
    column = torch.where(context_lens == 0, 0, (old[:, 0] == held).long())
    old[context_lens == 0] = 0
    old[torch.arange(len(slots)), column] = (context_lens + commits).int()
    committed_len[slots] = old


FLOPS_OF_STATE = 6
"""For an element of a head's state and a token: what the state holds of k, the update by it, and what it gives for q;
a product and a sum each. Chunked forms of the rule take more."""


def cost(call: CostCall) -> Work:
    """States are read, but for a first step, and written. A step of few rows keeps all but the first as drafts; no
    drafts of the step before are open."""
    dims, size = call.dims, call.size
    slot_bytes = {arg: call.num_bytes[arg] // dims["S"] for arg in ("recurrent_state", "draft_rows", "committed_len")}
    drafts = size.new_tokens - 1 if size.new_tokens <= dims["R"] // 2 else 0
    values = dims["HV"] * dims["V"]
    return Work(
        FLOPS_OF_STATE * dims["T"] * values * dims["K"],
        {
            "qkvz": call.num_bytes["qkvz"] * values // (2 * dims["num_k_heads"] * dims["K"] + 2 * values),
            "recurrent_state": size.num_seqs * slot_bytes["recurrent_state"] * (2 if size.context_len else 1),
            "draft_rows": size.num_seqs * slot_bytes["draft_rows"] // dims["R"] * drafts,
            "committed_len": size.num_seqs * slot_bytes["committed_len"] * 2,
        },
    )


SPEC = OpSpec(
    name="gated_delta_rule",
    version=1,
    inputs=(
        TensorArg("conv_out", ("T", "2*num_k_heads*K + HV*V")),  # q | k | v, heads contiguous
        TensorArg("qkvz", ("T", "2*num_k_heads*K + 2*HV*V")),  # only z, the last HV*V columns, is read
        TensorArg("ba", ("T", "2*HV")),  # b | a
        TensorArg("A_log", ("HV",)),
        TensorArg("dt_bias", ("HV",)),
        TensorArg("norm_weight", ("V",)),
        TensorArg("recurrent_state", ("S", "HV", "K", "V"), "float32", mutated=True),
        TensorArg("draft_rows", ("S", "R", "num_k_heads*K + HV*V + 2*HV"), mutated=True),  # k | v | b | a
        TensorArg("committed_len", ("S", 2), "int32", mutated=True),  # the latest two lengths of the state
        QUERY_START_LOC,
        SEQ_LENS,
        SLOT_IDS,
        NUM_SEQS,
    ),
    outputs=(TensorArg("out", ("T", "HV*V")),),
    attrs=(Attr("num_k_heads", "int"), Attr("eps", "float"), Attr("output_gate", "str")),
    body=body,
    reference=reference,
    cases=CASES,
    launches=launches,
    cost=cost,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 3e-3},
)

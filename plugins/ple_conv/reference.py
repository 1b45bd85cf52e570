"""Slow float32 oracle: token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.plugins.hc_norm.reference import reference as norm_reference


def reference(
    stack: Tensor,
    key: Tensor,
    value: Tensor,
    key_gain: Tensor,
    query_gain: Tensor,
    conv_gain: Tensor,
    conv_weight: Tensor,
    ple_conv_state: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_ids: Tensor,
    num_seqs: Tensor,
    dilation: int,
    eps: float,
) -> Tensor:
    H = value.shape[1]
    HC = stack.shape[1] // H
    k, q = norm_reference(key, key_gain, HC, eps), norm_reference(stack, query_gain, HC, eps)
    out = stack.clone()
    for b in range(int(num_seqs)):
        start, end = int(query_start_loc[b]), int(query_start_loc[b + 1])
        ring = ple_conv_state[int(slot_ids[b])]
        for t in range(start, end):
            p = int(seq_lens[b]) - (end - t)
            gated = torch.empty(HC * H)
            for c in range(HC):
                part = slice(c * H, (c + 1) * H)
                score = (k[t, part] * q[t, part]).sum() / H**0.5
                root = torch.sign(score) * torch.sqrt(torch.clamp(score.abs(), min=1e-6))
                gated[part] = value[t] / (1 + torch.exp(-root))
            ring[p % len(ring)] = norm_reference(gated[None], conv_gain, HC, eps)[0]
            conv = torch.zeros(HC * H)
            for j in range(conv_weight.shape[1]):
                age = (conv_weight.shape[1] - 1 - j) * dilation
                if age <= p:
                    conv += conv_weight[:, j] * ring[(p - age) % len(ring)]
            out[t] += gated + conv / (1 + torch.exp(-conv))
    return out

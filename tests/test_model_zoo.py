from __future__ import annotations

import pytest
import torch
from model_zoo import build_hf_model, tiny_config_dict


@torch.no_grad()
def test_every_weight_of_the_tiny_model_shows_in_its_logits() -> None:
    model = build_hf_model(tiny_config_dict(), seed=1)
    input_ids = torch.randint(0, 96, (1, 48), generator=torch.Generator().manual_seed(2))
    logits = model(input_ids).logits
    assert logits.isfinite().all()
    for name, parameter in model.named_parameters():
        kept = parameter.clone()
        parameter.copy_(parameter.flip(-1))
        change = (model(input_ids).logits - logits).norm() / logits.norm()
        parameter.copy_(kept)
        assert change > 1e-2, f"{name} changes the logits by {change:.1%} only: parity tests would miss it"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_seed_decides_the_weights(dtype: str) -> None:
    first, second, other = (build_hf_model(tiny_config_dict(), seed, dtype).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert first["lm_head.weight"].dtype == getattr(torch, dtype)

"""Single modules of the frontend against transformers' own, on the same random input and weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from hf_parity import REFERENCE_BOUND, SELF_BOUND, VISIBLE, StableTopk, random_prompt, relative_error
from model_zoo import build_hf_model, tiny_config_dict
from torch import Tensor

from qwen4exp_trt.frontend.attention import GatedDeltaNet, QsaAttention
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.model import rotary_frequencies
from qwen4exp_trt.frontend.modules import Batch, HyperConnection, States
from qwen4exp_trt.frontend.ple import Ple
from qwen4exp_trt.frontend.states import state_specs
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.runtime.state_pool import allocate_states

all_specs()

BLOCK_SIZE = 64

FULL_LAYER = tiny_config_dict(
    num_hidden_layers=1, layer_types=["full_attention"], ple_layer_ids=[], indexer_budget=2048, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=8192,
)  # fmt: skip
"""The released budget and ratio on small heads."""

LINEAR_LAYER = tiny_config_dict(num_hidden_layers=1, layer_types=["linear_attention"], ple_layer_ids=[1])


def reference_layer(config_dict: dict[str, Any]) -> Any:
    return build_hf_model(config_dict, seed=3).model.layers[0]


def load(module: Any, reference: Any) -> Any:
    module.load_state_dict(reference.state_dict())
    return module


def random_rows(num_rows: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))


def fresh_states(config: ModelConfig, num_tokens: int) -> States:
    """One slot, and pages for ``num_tokens``."""
    specs = state_specs(config, "float32", BLOCK_SIZE)
    buffers = allocate_states(specs, -(-num_tokens // BLOCK_SIZE), 1)
    return {(spec.layer, spec.kind): buffers[spec.name] for spec in specs}


def batch_of(token_ids: Tensor, start: int, end: int) -> Batch:
    """The tokens ``start:end`` of one sequence, which owns slot 0 and the pages in order."""
    length, num_pages = end - start, -(-end // BLOCK_SIZE)
    i32 = torch.int32
    return Batch(
        input_ids=token_ids[start:end].to(i32),
        positions=torch.arange(start, end, dtype=i32).expand(3, -1),
        query_start_loc=torch.tensor([0, length], dtype=i32),
        seq_lens=torch.tensor([end], dtype=i32),
        slot_ids=torch.zeros(1, dtype=i32),
        block_table=torch.arange(num_pages, dtype=i32)[None],
        num_seqs=torch.ones(1, dtype=i32),
        logits_indices=torch.arange(length, dtype=i32),
    )


def run_in_pieces(run: Callable[[slice, Batch], Tensor], token_ids: Tensor, sizes: Sequence[int]) -> Tensor:
    """The rows of ``run`` over a sequence that is cut into pieces of ``sizes`` tokens."""
    ends = list(accumulate(sizes))
    assert ends[-1] == len(token_ids)
    pairs = zip([0, *ends], ends, strict=False)
    return torch.cat([run(slice(start, end), batch_of(token_ids, start, end)) for start, end in pairs])


@pytest.mark.parametrize("hc_count", [2, 4])
@torch.no_grad()
def test_hyper_connection_equals_transformers(hc_count: int) -> None:
    config_dict = LINEAR_LAYER | {"hc_count": hc_count}
    config = ModelConfig.from_dict(config_dict, "config")
    reference = reference_layer(config_dict).attn_hyper_connection
    module = load(HyperConnection(config), reference)
    stack, y = 3 * random_rows(50, config.stack_width), random_rows(50, config.hidden_size, seed=1)
    expected_mixed, untouched, expected_inject = reference(stack[None])
    mixed, inject = module(stack)
    assert relative_error(expected_mixed[0], mixed) <= SELF_BOUND
    assert relative_error(expected_inject[0], inject) <= SELF_BOUND
    expected = untouched[0] + (y.unsqueeze(-2) * expected_inject[0].unsqueeze(-1)).flatten(-2)
    assert relative_error(expected, module.combine(stack, y, inject)) <= SELF_BOUND


PIECES = {
    "one_shot": [150],
    "token_by_token": [1] * 150,
    "chunks_of_64": [64, 64, 22],
    "carried_over_unequal_chunks": [1, 2, 60, 3, 70, 14],
}


@pytest.mark.parametrize("sizes", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("heads", [(2, 4), (1, 3), (3, 3)], ids=str)
@torch.no_grad()
def test_gated_delta_net_equals_transformers(heads: tuple[int, int], sizes: list[int]) -> None:
    """The reference runs chunks of 64 in closed form, ours steps through the recurrence."""
    config_dict = LINEAR_LAYER | {"linear_num_key_heads": heads[0], "linear_num_value_heads": heads[1]}
    config = ModelConfig.from_dict(config_dict, "config")
    reference = reference_layer(config_dict).linear_attn
    module, states = load(GatedDeltaNet(config, 0), reference), fresh_states(config, 150)
    x = random_rows(150, config.hidden_size)
    got = run_in_pieces(lambda rows, batch: module(x[rows], batch, states), torch.zeros(150), sizes)
    assert relative_error(reference(x[None])[0], got) <= REFERENCE_BOUND


@pytest.mark.parametrize("sizes", [[30], [1] * 30, [9, 21], [8, 22], [10, 20], [1, 29], [2, 3, 4, 5, 16]], ids=str)
@torch.no_grad()
def test_ple_equals_transformers_across_chunks(sizes: list[int]) -> None:
    """The convolution looks back 9 tokens, the hash 2: cuts before, at and after both, eos around them."""
    config = ModelConfig.from_dict(LINEAR_LAYER, "config")
    reference = reference_layer(LINEAR_LAYER).ple
    module, states = load(Ple(config, 0), reference), fresh_states(config, 30)
    ids = torch.tensor(random_prompt(30, eos=(0, 1, 8, 22)))
    stack = random_rows(30, config.stack_width)
    expected = stack + reference(stack[None], ids[None], None)[0]
    got = run_in_pieces(lambda rows, batch: module(stack[rows], batch, states), ids, sizes)
    assert relative_error(expected, got) <= SELF_BOUND


class ReferenceAttention:
    """transformers' full attention, run chunk by chunk on its cache, and what its indexer selected."""

    def __init__(self, config_dict: dict[str, Any]) -> None:
        self.model = build_hf_model(config_dict, seed=3).model
        self.attention = self.model.layers[0].self_attn
        self.selected: list[Tensor] = []
        self.attention.indexer.register_forward_hook(lambda *args: self.selected.append(args[-1][0, 0]))

    def run(self, x: Tensor, chunk: int) -> tuple[Tensor, list[Tensor]]:
        """Outputs ``[T, H]``, and per token a bool mask over the tokens up to it."""
        from transformers import DynamicCache

        cache, outputs, masks = DynamicCache(config=self.model.config), [], []
        for start in range(0, len(x), chunk):
            end = min(start + chunk, len(x))
            positions = torch.arange(end)[None, None].expand(3, 1, -1)
            future = torch.arange(end) > torch.arange(start, end)[:, None]
            causal = torch.zeros(end - start, end).masked_fill(future, torch.finfo(torch.float32).min)
            with StableTopk():
                rope = self.model.rotary_emb(x, positions)
                outputs.append(self.attention(x[None, start:end], rope, causal[None, None], cache)[0][0])
            masks += [mask[: start + i + 1] for i, mask in enumerate(self.selected.pop())]
        return torch.cat(outputs), masks


class OurAttention:
    """The frontend's module over one sequence, and the groups that its indexer selected."""

    def __init__(self, config_dict: dict[str, Any], reference: ReferenceAttention) -> None:
        self.config = ModelConfig.from_dict(config_dict, "config")
        self.module = load(QsaAttention(self.config, 0), reference.attention)
        self.inv_freq, self.no_selection = rotary_frequencies(self.config), torch.full((1, 1), -1, dtype=torch.int32)
        self.selected: list[Tensor] = []
        assert self.module.indexer is not None
        self.module.indexer.register_forward_hook(lambda *args: self.selected.append(args[-1]))

    def run(self, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        states = fresh_states(self.config, len(x))
        out = run_in_pieces(
            lambda rows, batch: self.module(x[rows], self.inv_freq, self.no_selection, batch, states),
            torch.zeros(len(x)),
            sizes,
        )
        groups = torch.cat(self.selected)
        self.selected.clear()
        return out, [self._mask(groups[t], t) for t in range(len(x))]

    def _mask(self, groups: Tensor, position: int) -> Tensor:
        """The tokens that the query at ``position`` reads: its groups, then the open tail."""
        ratio = self.config.indexer_compress_ratio
        assert ratio is not None
        tokens = torch.arange(position + 1)
        return torch.isin(tokens // ratio, groups[groups >= 0]) | (tokens >= (position + 1) // ratio * ratio)


def check_attention(lengths: Sequence[int], sizes: Sequence[int], chunk: int) -> None:
    """Compare the queries that see ``lengths`` tokens: their outputs, and their selections exactly."""
    reference = ReferenceAttention(FULL_LAYER)
    x = random_rows(sum(sizes), 32)
    expected, expected_masks = reference.run(x, chunk)
    got, masks = OurAttention(FULL_LAYER, reference).run(x, sizes)
    rows = [n - 1 for n in lengths]
    for t in rows:
        assert torch.equal(masks[t], expected_masks[t]), f"selections of the query that sees {t + 1} tokens differ"
        assert int(masks[t].sum()) == min(t + 1, 2048 + (t + 1) % 4)
    assert relative_error(expected[rows], got[rows]) <= REFERENCE_BOUND


@torch.no_grad()
def test_qsa_equals_transformers_around_the_released_budget() -> None:
    """All 2051 tokens are still read at 2051; at 2052 there are 513 groups for 512 places."""
    check_attention([1, 3, 4, 5, 2047, 2048, 2051, 2052, 2053, 2055, 2056], [2000, 50, 1, 1, 1, 1, 1, 1], chunk=2056)


@pytest.mark.slow
@torch.no_grad()
def test_qsa_equals_transformers_far_above_the_released_budget() -> None:
    check_attention([2047, 2051, 2052, 4096, 6001, 8191, 8192], [4096, 4095, 1], chunk=512)


@torch.no_grad()
def test_qsa_is_dense_attention_up_to_its_inert_length() -> None:
    reference = ReferenceAttention(FULL_LAYER)
    sparse, dense = FULL_LAYER | {"indexer_budget": 16}, FULL_LAYER | {f"indexer_{name}": None for name in INDEXER_KEYS}
    x = random_rows(32, 32)
    got = OurAttention(sparse, reference).run(x, [32])[0]
    config = ModelConfig.from_dict(dense, "config")
    module = QsaAttention(config, 0)
    module.load_state_dict(reference.attention.state_dict(), strict=False)
    states, inv_freq = fresh_states(config, 32), rotary_frequencies(config)
    no_selection = torch.full((1, 1), -1, dtype=torch.int32)
    expected = module(x, inv_freq, no_selection, batch_of(torch.zeros(32), 0, 32), states)
    assert relative_error(expected[:19], got[:19]) <= SELF_BOUND
    assert relative_error(expected[19:20], got[19:20]) > VISIBLE


INDEXER_KEYS = ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio")

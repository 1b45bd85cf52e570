from __future__ import annotations

from pathlib import Path

import bundles
import pytest
import torch

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime import LLM, SamplingParams
from qwen4exp_trt.runtime.bench.checks import Agreement, check_bundle
from qwen4exp_trt.runtime.bench.loaded import LoadedBundle
from qwen4exp_trt.runtime.bench.random_weights import RandomWeights
from qwen4exp_trt.runtime.manifest import PROGRAM_DIR
from qwen4exp_trt.runtime.program_text import load_program
from qwen4exp_trt.runtime.specs import NgramRowsSpec, PleResidency, TensorSpec, Transform, WeightSpec

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized bundle of a config alone, whose n-gram table is to stay on disk."""
    folder = tmp_path_factory.mktemp("config-only")
    checkpoint = bundles.tiny_checkpoint(tmp_path_factory.getbasetemp() / "tiny-checkpoint")
    options = {"config_only": True, "precision": "nvfp4", "ple": "nvfp4", "ple_residency": "disk"}
    return bundles.build(checkpoint / "config.json", folder / "bundle", **options)


def generated(bundle: Path, seed: int) -> list[int]:
    llm = LLM(bundle, weight_maker=RandomWeights(seed))
    output = llm.generate({"prompt_token_ids": list(range(3, 30))}, SamplingParams(temperature=0, max_tokens=12))
    return list(output[0].outputs[0].token_ids)


def test_a_bundle_of_a_config_alone_generates(config_only: Path) -> None:
    """The same with the same seed, something else with another, and no token again and again."""
    with pytest.raises(BundleError, match="built with --config-only, so it has no weights"):
        LLM(config_only)
    tokens = generated(config_only, 0)
    assert generated(config_only, 0) == tokens
    assert generated(config_only, 1) != tokens
    assert len(set(tokens)) > 5


def test_logits_are_spread(config_only: Path, tiny_bundle: Path) -> None:
    for bundle in (config_only, tiny_bundle):
        llm = LLM(bundle, weight_maker=RandomWeights())
        logits = llm.score(list(range(60)))
        assert logits.isfinite().all()
        assert 0.01 < logits.std() < 20
        assert logits.std(0).median() > 0.01, "the same logits for every token"


def test_rows_of_a_table_on_disk_are_random_and_nothing_is_read(config_only: Path) -> None:
    llm = LLM(config_only, weight_maker=RandomWeights())
    assert llm.info["ngram_table"] == {"residency": "disk", "rows": "random, nothing is read from a disk"}
    agreement = check_bundle(LoadedBundle(llm), with_agreement=True).agreement
    assert agreement == Agreement(16, 16, 0, 0, None), "another execution of a step gets the same rows"


def test_a_token_has_the_same_rows_in_every_step(config_only: Path) -> None:
    """Others at another position, of another id, or with another seed; all of them spread as those of a table."""
    inputs = load_program(config_only / PROGRAM_DIR).inputs
    (name,) = (spec.name for spec in inputs if isinstance(spec, NgramRowsSpec))

    def rows(ids: list[int], start: int, seed: int = 0) -> torch.Tensor:
        positions = torch.arange(start, start + len(ids), dtype=torch.int32).expand(3, -1)
        step = {"input_ids": torch.tensor(ids, dtype=torch.int32), "positions": positions}
        return RandomWeights(seed).make_ngram_table(inputs, PleResidency.DISK).complete(step)[name]

    ids = list(range(200, 300))
    whole = rows(ids, 7)
    assert torch.equal(whole, torch.cat([rows(ids[:30], 7), rows(ids[30:31], 37), rows(ids[31:], 38)]))
    for other in (rows(ids, 8), rows(ids[::-1], 7), rows(ids, 7, seed=1)):
        assert not (whole == other).all(1).any()
    assert whole.float().std() == pytest.approx(0.02, rel=0.1)
    assert len(whole.unique(dim=0)) == len(ids)


@pytest.mark.parametrize("name", ["codes", "experts.block_scales", "experts.scales", "A_log", "dt_bias", "proj"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "float4_e2m1fn_x2"])
def test_values_of_every_format_are_finite_and_differ(name: str, dtype: str) -> None:
    spec = WeightSpec(TensorSpec(name, (64, 32), dtype), Transform("none", ()))
    (weight,) = RandomWeights().make_weights([spec], CPU).values()
    assert list(weight.shape) == [64, 32]
    if dtype == "float4_e2m1fn_x2":
        assert len(weight.view(torch.uint8).unique()) > 200
        return
    values = weight.float()
    assert values.isfinite().all() and values.abs().max() < 10
    is_one_scale = name.endswith("scales") and dtype != "float8_e4m3fn"
    assert (len(values.unique()) == 1) == is_one_scale


def test_another_seed_gives_other_weights() -> None:
    spec = WeightSpec(TensorSpec("proj", (64, 32), "bfloat16"), Transform("none", ()))
    first, again, other = (RandomWeights(seed).make_weights([spec], CPU)["proj"] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_progress_counts_all_bytes() -> None:
    specs = [WeightSpec(TensorSpec(f"w{size}", (size,), "float32"), Transform("none", ())) for size in (3, 5)]
    seen: list[tuple[int, int]] = []
    RandomWeights().make_weights(specs, CPU, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(12, 32), (32, 32)]


def test_states_of_random_weights_are_kept_on_no_disk(config_only: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cache_dir keeps states of the checkpoint's weights; leave it out"):
        LLM(config_only, weight_maker=RandomWeights(), cache_dir=tmp_path)

"""``--draft-head`` and ``--draft-vocab``: what is built in, what is refused, what is printed and recorded."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import bundles
import pytest
from build_command import FLOAT32, Capture, refused
from model_zoo import write_hf_checkpoint
from plan_requests import plan_request
from released_model import released_config
from safetensors.torch import load_file, save_file

from qwen4exp_trt.builder.__main__ import main
from qwen4exp_trt.builder.activations import estimate_activations
from qwen4exp_trt.builder.compile import ExportOptions, compile_program, transform_config
from qwen4exp_trt.builder.draft_head import DraftChoice, choose_draft_head
from qwen4exp_trt.builder.engine import build_engine
from qwen4exp_trt.builder.kernels import kernels_of
from qwen4exp_trt.builder.options import PlanOptions
from qwen4exp_trt.builder.plan import make_plan
from qwen4exp_trt.builder.plan_moves import fitting_moves
from qwen4exp_trt.builder.policy import PRECISIONS, Choice, choose_weight_formats
from qwen4exp_trt.builder.profiles import optimization_profiles
from qwen4exp_trt.builder.weight_plan import plan_weights
from qwen4exp_trt.errors import BuildError, BundleError, ConfigError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.weights import expected_weights
from qwen4exp_trt.passes.pipeline import Quantization
from qwen4exp_trt.plugins.registry import spec_of
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.manifest import Manifest
from qwen4exp_trt.runtime.target_devices import DEVICES
from qwen4exp_trt.runtime.tensorrt.module import load_trt
from qwen4exp_trt.runtime.tokenizer import Tokenizer
from qwen4exp_trt.runtime.weight_formats import WeightFormat as F

pytestmark = pytest.mark.usefixtures("quick_builds")
HEAD: dict[str, Any] = {"mtp_num_hidden_layers": 1}


@pytest.fixture(scope="session")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a draft head and a tokenizer that no test changes."""
    folder = tmp_path_factory.mktemp("drafting") / "checkpoint"
    write_hf_checkpoint(folder, bundles.config_dict(**HEAD))
    bundles.write_text_files(folder)
    return folder


def choose(folder: Path, **options: Any) -> DraftChoice:
    config = ModelConfig.from_dir(folder)
    return choose_draft_head(PlanOptions(checkpoint=folder, **options), config, Checkpoint.open(folder))


# --- whether ----------------------------------------------------------------------------------------------------------


def test_a_draft_head_is_built_in_if_there_is_one(drafting: Path, checkpoint: Path, tmp_path: Path) -> None:
    chosen = choose(drafting)
    assert (chosen.config, chosen.token_ids, chosen.why_none) == (ModelConfig.from_dir(drafting), None, "")
    assert choose(drafting, draft_head="none").why_none == "--draft-head none"
    assert choose(checkpoint).why_none == "mtp_num_hidden_layers of the config is 0 or absent"
    for each in (choose(drafting, draft_head="none"), choose(checkpoint)):
        assert not each.config.has_draft_head
    shutil.copytree(checkpoint, tmp_path / "promises")
    shutil.copyfile(drafting / "config.json", tmp_path / "promises" / "config.json")
    lacking = choose(tmp_path / "promises")
    assert lacking.why_none == "the checkpoint has no tensors mtp.*" and not lacking.config.has_draft_head
    without_files = choose_draft_head(PlanOptions(checkpoint=drafting), ModelConfig.from_dir(drafting), None)
    assert without_files.config.has_draft_head


def test_what_is_not_implemented_is_refused_unless_it_is_left_out(drafting: Path) -> None:
    config = replace(ModelConfig.from_dir(drafting), mtp_num_hidden_layers=2)
    with pytest.raises(ConfigError, match=r"mtp_num_hidden_layers is 2; it must be 1.*build with --draft-head none"):
        choose_draft_head(PlanOptions(checkpoint=drafting), config, None)
    options = PlanOptions(checkpoint=drafting, draft_head="none")
    assert not choose_draft_head(options, config, None).config.has_draft_head


# --- with which vocabulary --------------------------------------------------------------------------------------------


def needed_ids(folder: Path) -> set[int]:
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer is not None
    return {bundles.ENDOFTEXT, bundles.IM_END, *tokenizer.added_token_ids}


def test_ids_that_the_tokenizer_learned_first(drafting: Path) -> None:
    chosen = choose(drafting, draft_vocab_size=100)
    needed = needed_ids(drafting)
    lowest = [token for token in range(384) if token not in needed][: 100 - len(needed)]
    assert chosen.token_ids == tuple(sorted({*needed, *lowest}))
    assert chosen.config.draft_vocab_size == 100


def test_ids_that_a_text_has_most(drafting: Path, tmp_path: Path) -> None:
    text = bundles.HELDOUT_TEXT.read_text(encoding="utf-8")[:5000]
    (tmp_path / "text").write_text(text, encoding="utf-8")
    tokenizer, needed = Tokenizer.from_dir(drafting), needed_ids(drafting)
    assert tokenizer is not None
    counts = Counter(token for token in tokenizer.encode(text) if token not in needed)
    size = len(needed) + 12
    chosen = choose(drafting, draft_vocab=tmp_path / "text", draft_vocab_size=size)
    assert chosen.token_ids is not None and len(chosen.token_ids) == size and needed <= set(chosen.token_ids)
    others = set(chosen.token_ids) - needed
    assert min(counts[token] for token in others) >= max(counts[token] for token in counts if token not in others)
    # A text with fewer ids leaves the rest to the lowest.
    (tmp_path / "text").write_text("the", encoding="utf-8")
    few = choose(drafting, draft_vocab=tmp_path / "text", draft_vocab_size=size)
    assert few.token_ids is not None and set(tokenizer.encode("the")) <= set(few.token_ids)


def test_all_ids_are_no_vocabulary_of_its_own(drafting: Path) -> None:
    chosen = choose(drafting, draft_vocab_size=bundles.VOCAB_SIZE)
    assert (chosen.token_ids, chosen.config.draft_vocab_size) == (None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_vocab_size": 2}, "--draft-vocab-size is 2; it must be from "),
        ({"draft_vocab_size": 385}, "to the model's vocab_size 384"),
        ({"draft_vocab_size": 50, "draft_head": "none"}, "the bundle gets no draft head: --draft-head none"),
        ({"draft_vocab_size": 50, "draft_vocab": Path("absent")}, "absent"),
    ],
)
def test_impossible_vocabularies_are_refused(drafting: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        choose(drafting, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--draft-head mtp", "argument --draft-head: invalid choice: 'mtp'"),
        ("--draft-vocab text", "--draft-vocab is given without --draft-vocab-size, which says how many ids to take"),
        ("--draft-vocab-size 50 --draft-head none", "the bundle gets no draft head: --draft-head none"),
    ],
)
def test_bad_options(drafting: Path, tmp_path: Path, capsys: Capture, options: str, message: str) -> None:
    assert message in refused(capsys, tmp_path, drafting, "-o", tmp_path / "bundle", *FLOAT32, *options.split())


def test_an_incomplete_draft_head(drafting: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = Path(shutil.copytree(drafting, tmp_path / "checkpoint"))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if name != "mtp.fc_hidden.weight"}, folder / "model.safetensors")
    message = refused(capsys, tmp_path, folder, "-o", tmp_path / "bundle", *FLOAT32)
    assert "does not match its config. missing (1): mtp.fc_hidden.weight; --draft-head none builds without" in message
    assert main([str(folder), "-o", str(tmp_path / "bundle"), *FLOAT32, "--draft-head", "none"]) == 0
    assert "(set aside: 30 mtp)" in capsys.readouterr().out


# --- what becomes of its weights --------------------------------------------------------------------------------------


def choices_of(config: ModelConfig, precision: str, **stored: F) -> dict[str, Choice]:
    formats = {name: (stored.get(name.rpartition(".experts.")[1], F.FLOAT),) for name in expected_weights(config)}
    return {choice.name: choice for choice in choose_weight_formats(config, formats, precision, "checkpoint")}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_follow_the_rules_of_the_layers(precision: str) -> None:
    """Each is held as that of a layer of the model; but its activations keep 16 bits."""
    config = replace(released_config(has_draft_head=True), draft_vocab_size=32768)
    choices = choices_of(config, precision)
    of_head = {name: choice for name, choice in choices.items() if name.startswith("mtp.layers.0.")}
    assert len(of_head) == 9 + 8 + 7
    for name, choice in of_head.items():
        like = choices[name.replace("mtp.layers.0.", "layers.3.")]
        assert (choice.format, choice.reason, choice.has_nvfp4_activations) == (like.format, like.reason, False)
    others = ("fc_embedding.weight", "fc_hidden.weight", "pre_fc_norm_hidden.weight")
    assert {choices[f"mtp.{name}"].format for name in others} == {F.FLOAT}
    assert choices["mtp.lm_head.weight"].format is choices["lm_head.weight"].format


def test_a_head_with_blocks_of_rows_is_dequantized_for_some_rows() -> None:
    config = replace(released_config(has_draft_head=True), draft_vocab_size=32768)
    formats = {
        name: (F.FP8_BLOCKS if name.endswith("lm_head.weight") else F.FLOAT,) for name in expected_weights(config)
    }
    choices = {c.name: c for c in choose_weight_formats(config, formats, "checkpoint", "checkpoint")}
    assert choices["lm_head.weight"].format is F.FP8_BLOCKS
    assert choices["mtp.lm_head.weight"].format is F.FLOAT
    assert choices["mtp.lm_head.weight"].reason == "its rows are some of those that share a scale"


def test_a_plan_that_does_not_fit_may_do_without() -> None:
    request = replace(plan_request({}), config=released_config(has_draft_head=True))
    plan, without = make_plan(request), make_plan(plan_request({}))
    device = replace(DEVICES["sm121"], usable_bytes=(plan.total_bytes + without.total_bytes) // 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DEVICES, "sm121", device)
        assert ("--draft-head none",) in fitting_moves(request)


# --- bundles ----------------------------------------------------------------------------------------------------------


def test_it_is_printed_and_recorded(drafting: Path, tmp_path: Path, capsys: Capture) -> None:
    argv = [str(drafting), "-o", str(tmp_path / "bundle"), *FLOAT32]
    assert main([*argv, "--draft-vocab-size", "100", "--verify"]) == 0
    out = capsys.readouterr().out
    assert "draft head            proposes 100 of 384 ids; verified: passes " in out
    for row in ("draft head experts", "draft head lm_head", "draft head, others"):
        assert out.count(f"  {row}  ") == 2, row
    assert "MiB for a sequence of 64 tokens" in out
    bundle = tmp_path / "bundle"
    manifest = Manifest.load(bundle)
    manifest.check_files(bundle)
    assert manifest.draft is not None and (manifest.draft.vocab_size, manifest.draft.has_token_ids) == (100, True)
    assert list(manifest.draft.profiles) == ["decode", "prefill"] and manifest.draft.profiles["decode"]["stack"]
    names = {"program/graph.py", "program/tables.json", "decoder.onnx", "token_ids.json"}
    assert {name for name in manifest.files if name.startswith("mtp/")} == {f"mtp/{name}" for name in names}
    assert len(json.loads((bundle / "mtp" / "token_ids.json").read_text())) == 100
    assert ModelConfig.from_dict(manifest.config, "manifest").draft_vocab_size == 100
    (bundle / "mtp" / "token_ids.json").unlink()
    with pytest.raises(BundleError, match=r"mtp/token_ids.json is missing"):
        manifest.check_files(bundle)
    assert main([*argv, "--draft-head", "none"]) == 0
    out = capsys.readouterr().out
    assert "draft head            none: --draft-head none\n" in out
    assert Manifest.load(bundle).draft is None and not (bundle / "mtp").exists()


def test_the_plan_counts_it(drafting: Path, capsys: Capture) -> None:
    for options, expected in ((["--draft-vocab-size", "100"], 1), (["--draft-head", "none"], 0)):
        assert main([str(drafting), "--plan", *FLOAT32, *options]) == 0
        out = capsys.readouterr().out
        for row in ("\n  draft head lm_head  ", "\n  stacks  ", "\ndraft  "):
            assert out.count(row) == (2 * expected if "lm_head" in row else expected), row


@pytest.mark.slow
@pytest.mark.trt
def test_engines_and_kernels_of_both(drafting: Path, tmp_path: Path, capsys: Capture) -> None:
    """In NVFP4, by TensorRT: an engine each, and the kernels that either needs."""
    bundle = tmp_path / "bundle"
    assert main([str(drafting), "-o", str(bundle), *FLOAT32[2:], "--precision", "nvfp4"]) == 0
    assert "proposes all ids, engine of " in capsys.readouterr().out
    manifest = Manifest.load(bundle)
    manifest.check_files(bundle)
    assert manifest.files["mtp/decoder.engine"].size > 4096 and "mtp/layers.json" in manifest.files
    layers = json.loads((bundle / "mtp" / "layers.json").read_text())
    modules = {module for layer in layers["layers"] for module in layer["modules"]}
    assert any(module.startswith("mtp.layers.0.self_attn") for module in modules)
    assert {tensor["name"] for tensor in layers["io_tensors"]} >= {"stack", "next_stack", "logits"}
    rows = [row for row in manifest.weights if row["component"] == "draft head experts"]
    assert [(row["held"], row["remark"]) for row in rows] == [("nvfp4", "converted")]


def test_kernels_are_found_for_its_own_shapes() -> None:
    """One norm over all streams, and a product of four rows a token, are in no program of the model."""
    config = released_config(has_draft_head=True)
    options = ExportOptions("bfloat16", "auto", 64, is_draft=True)
    program, _ = transform_config(config, options, Quantization())
    limits = EngineLimits(max_batch_size=2, max_seq_len=4096, prefill_chunk=64, block_size=64)
    norms = [dict(k.defines) for k in kernels_of(program, limits, num_sms=48) if k.entry == "hc_norm"]
    sizes = {(defines["HIDDEN"], defines["STREAMS"]) for defines in norms}
    assert sizes == {(2560, 4), (2560, 1), (10240, 1)}
    names = {spec.name for node in program.calls() if (spec := spec_of(node.target)) is not None}
    assert {"qsa_attention", "qsa_indexer", "qsa_select", "moe", "hc_combine_norm"} <= names


@pytest.mark.slow
@pytest.mark.trt
@pytest.mark.parametrize("precision", ["bf16", "nvfp4"])
def test_the_released_draft_head_has_an_engine(precision: str) -> None:
    """At full size, with a vocabulary of its own, for the GB10."""
    config = replace(released_config(has_draft_head=True), draft_vocab_size=32768)
    plan = plan_weights(config, None, precision, "checkpoint", ())
    options = PlanOptions(checkpoint=Path("unused"))
    compiled = compile_program(
        config, replace(options.export, is_draft=True), Quantization(plan.formats, plan.table_scales)
    )
    profiles = optimization_profiles(options.limits_for(config), (*compiled.program.inputs, *compiled.program.states))
    engine = build_engine(load_trt("tensorrt-rtx"), compiled.onnx_model, profiles, "sm121")
    assert 2**20 < len(engine.engine) < 32 * 2**20
    estimate = estimate_activations(config, "bfloat16", options.limits_for(config))
    assert engine.activation_bytes is not None and engine.activation_bytes < 1.35 * estimate

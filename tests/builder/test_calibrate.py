"""Calibration of a tiny model with NVFP4 projections, and the program that it leads to."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import tiny_config_dict
from nvfp4_programs import with_nvfp4_linears
from tiny_tokenizer import tiny_backend
from torch import Tensor

from qwen4exp_trt.builder.calibrate import CalibrationText, calibrate, linears_of_layers
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.export import export_program
from qwen4exp_trt.passes.base import PassManager
from qwen4exp_trt.passes.pipeline import Quantization, make_pipeline
from qwen4exp_trt.passes.quantize_activations import quantize_activations
from qwen4exp_trt.passes.verification import Verifier, batch_samples, random_source
from qwen4exp_trt.runtime.calibration import Calibration
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.materialize import materialize_weight
from qwen4exp_trt.runtime.ngram_rows import NgramRows
from qwen4exp_trt.runtime.program import Program, identifier_from_path
from qwen4exp_trt.runtime.tensor_reader import TensorReader
from qwen4exp_trt.runtime.tensor_source import TensorFunction
from qwen4exp_trt.runtime.tokenizer import Tokenizer

BLOCK_SIZE = 8
LIMITS = EngineLimits(max_batch_size=3, max_seq_len=32, prefill_chunk=16, block_size=BLOCK_SIZE)
WORDS = "the quick brown fox jumps over the lazy dog; naïve café, 你好世界, "


@cache
def nvfp4_model() -> tuple[ModelConfig, Program, TensorFunction]:
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "ple_layer_ids": [1]}
    config = ModelConfig.from_dict(tiny_config_dict(vocab_size=384, **layers), "tiny")
    program = export_program(config, "float32", BLOCK_SIZE)
    source = random_source(program.weights)
    return config, *with_nvfp4_linears(PassManager(make_pipeline(Quantization())).run(program)[0], source)


@cache
def tensors() -> dict[str, Tensor]:
    _, program, source = nvfp4_model()
    return {spec.name: materialize_weight(spec, source) for spec in program.weights}


def text_of(path: Path, content: str | bytes, max_tokens: int = 4096) -> CalibrationText:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return CalibrationText.read(path, Tokenizer(tiny_backend()), max_tokens)


def run(text: CalibrationText, **changed: Tensor) -> Calibration:
    return calibrate(nvfp4_model()[1], tensors() | changed, rows(), LIMITS, text)


def rows() -> NgramRows:
    return NgramRows(nvfp4_model()[1].inputs, TensorReader(), num_slots=1)


def input_of(path: str, token_ids: tuple[int, ...]) -> Tensor:
    """What the projection at ``path`` reads when the tokens run in one step of the program, as an output of it."""
    program = nvfp4_model()[1].copy()
    output: Any = program.graph.output_node()
    (linear,) = (node for node in program.calls() if node.name == identifier_from_path(path))
    output.args = ((linear.args[0],),)
    program.module.recompile()
    count = len(token_ids)
    positions = torch.arange(count)
    inputs = {
        "input_ids": torch.tensor(token_ids),
        "positions": positions.repeat(3, 1),
        "query_start_loc": torch.tensor([0, count]),
        "seq_lens": torch.tensor([count]),
        "slot_ids": torch.tensor([0]),
        "block_table": torch.arange(-(-count // BLOCK_SIZE))[None],
        "num_seqs": torch.tensor([1]),
        "logits_indices": torch.tensor([count - 1]),
    }
    sizes = {"num_slots": 1, "num_blocks": -(-count // BLOCK_SIZE)}
    states = {
        spec.name: torch.zeros([sizes[str(spec.shape[0])], *spec.shape[1:]], dtype=getattr(torch, spec.dtype))
        for spec in program.states
    }
    (name,) = (spec.name for spec in program.outputs)
    return program.run({key: value.int() for key, value in inputs.items()}, states, tensors())[name]


def test_scales_are_those_of_the_inputs(tmp_path: Path) -> None:
    """Of every projection of the token mixers, and of nothing else."""
    text = text_of(tmp_path / "text.txt", WORDS, LIMITS.max_seq_len)
    found = run(text)
    program = nvfp4_model()[1]
    assert list(found.scales) == linears_of_layers(program)
    nvfp4 = program.graph.find_nodes(op="call_function", target=torch.ops.q4e.nvfp4_linear.default)
    paths = {node.name.replace("__", ".") for node in nvfp4}
    assert "lm_head.linear" in paths and "layers.0.ple.key_proj.linear" in paths
    assert {path for path in paths if ".linear_attn." in path or ".self_attn." in path} == set(found.scales)
    for path in ("layers.0.linear_attn.in_proj_qkv_in_proj_z", "layers.1.self_attn.o_proj.linear"):
        amax = input_of(path, text.token_ids).abs().max()
        assert found.scales[path] == (amax / (6 * 448)).item()


def test_the_largest_input_of_all_windows_counts(tmp_path: Path) -> None:
    """Two windows of the longest sequence and a rest; each is computed on its own."""
    whole = text_of(tmp_path / "text.txt", WORDS * 5, 75)
    windows = [replace(whole, token_ids=whole.token_ids[start : start + 32]) for start in (0, 32, 64)]
    assert len(whole.token_ids) == 75
    progress: list[tuple[int, int]] = []
    found = calibrate(nvfp4_model()[1], tensors(), rows(), LIMITS, whole, lambda *done: progress.append(done))
    assert progress == [(1, 3), (2, 3), (3, 3)]
    parts = [run(window).scales for window in windows]
    assert found.scales == {path: max(part[path] for part in parts) for path in found.scales}
    assert any(found.scales[path] != parts[0][path] for path in found.scales)


def test_the_result_says_what_it_was_made_of(tmp_path: Path) -> None:
    content = WORDS.replace(";", "\r\n")
    found = run(text_of(tmp_path / "text.txt", content, 20))
    assert (found.text, found.num_tokens) == ("text.txt", 20)
    assert found.sha256 == hashlib.sha256(content.encode()).hexdigest()


def test_the_calibrated_program_rounds_its_inputs(tmp_path: Path) -> None:
    """With every scale in use the whole model is bitwise what the pass says."""
    config, program, source = nvfp4_model()
    scales = run(text_of(tmp_path / "text.txt", WORDS)).scales
    samples = batch_samples(config.vocab_size, BLOCK_SIZE, config.indexer_budget or 1)
    manager = PassManager([quantize_activations(scales)], Verifier(samples, source))
    after, (result,) = manager.run(program)
    assert (result.rewrites, result.max_error) == (len(scales), 0.0)
    assert linears_of_layers(after) == []


def test_a_text_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    with pytest.raises(BuildError, match=r"text\.txt: cannot read the text: No such file"):
        CalibrationText.read(path, Tokenizer(tiny_backend()))
    with pytest.raises(BuildError, match=r"text\.txt: the text is not UTF-8"):
        text_of(path, b"\xff\xfe")
    for content, count in (("", 0), ("a", 1)):
        with pytest.raises(BuildError, match=rf"text\.txt: the text has {count} tokens; calibration needs at least"):
            text_of(path, content)
    with pytest.raises(BuildError, match="a calibration on 1 tokens is none"):
        text_of(path, WORDS, 1)
    with pytest.raises(BuildError, match=r"text\.txt: to read it the checkpoint needs a tokenizer\.json"):
        CalibrationText.read(path, None)


@pytest.mark.parametrize("value,found", [(0.0, "zero"), (math.nan, "not finite"), (math.inf, "not finite")])
def test_a_useless_input_is_named(tmp_path: Path, value: float, found: str) -> None:
    """The projection behind a damaged weight."""
    text = text_of(tmp_path / "text.txt", WORDS, 16)
    name = "layers.0.linear_attn.norm.weight"
    damaged = torch.full_like(tensors()[name], value)
    message = rf"16 tokens of .*text\.txt: the largest input of layers\.0\.linear_attn\.out_proj\.linear is {found}"
    with pytest.raises(BuildError, match=message):
        run(text, **{name: damaged})


def test_unusable_logits_are_an_error(tmp_path: Path) -> None:
    text = text_of(tmp_path / "text.txt", WORDS, 16)
    name = "lm_head.linear.row_scales"
    with pytest.raises(BuildError, match="request 0 was dropped: its logits have NaN"):
        run(text, **{name: torch.full_like(tensors()[name], math.nan)})

"""Times a decode step of transformers on layers of the released sizes: the peer of ``decode_full_size.py``.

    python benchmarks/peers_transformers.py CONFIG [--layers 4] [--context 2048]

Random BF16 weights on the GPU; the first layers of the config, without the n-gram table. Prints
milliseconds a layer, which 48 layers multiply, and appends a line to ``benchmarks/results/decode_full_size.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from results_file import append_result
from transformers.initialization import no_init_weights

STEPS, WARM_UP = 12, 3


def make_model(config_file: Path, num_layers: int) -> Any:
    """The text model with random weights, made on the GPU."""
    data = json.loads(config_file.read_text())
    text = dict(data.get("text_config", data))
    text |= {"num_hidden_layers": num_layers, "layer_types": text["layer_types"][:num_layers], "ple_layer_ids": []}
    config = transformers.Qwen4ExpTextConfig(**text)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"), no_init_weights():
        model = transformers.Qwen4ExpForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    return model.eval()


@torch.inference_mode()
def decode_milliseconds(model: Any, context: int) -> float:
    """Median wall time of a step with one new token behind ``context`` tokens."""
    ids = torch.randint(model.config.vocab_size, (1, context), device="cuda")
    cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    times = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        cache = model(ids[:, :1], past_key_values=cache, use_cache=True).past_key_values
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[WARM_UP:])


def main() -> int:
    parser = argparse.ArgumentParser(description="Time a decode step of transformers.")
    parser.add_argument("config", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=2048)
    args = parser.parse_args()
    milliseconds = decode_milliseconds(make_model(args.config, args.layers), args.context)
    per_layer = milliseconds / args.layers
    print(
        f"transformers {transformers.__version__}, {args.layers} layers, batch 1, context {args.context}: "
        f"{milliseconds:.1f} ms a step, {per_layer:.2f} ms a layer"
    )
    measured = {"peer": f"transformers {transformers.__version__}", "layers": args.layers, "context": args.context}
    append_result("decode_full_size", measured | {"milliseconds": milliseconds, "milliseconds_a_layer": per_layer})
    return 0


if __name__ == "__main__":
    sys.exit(main())

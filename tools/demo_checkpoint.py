"""Where the draft head is in the files of the demo checkpoint: a shard of its own, as published checkpoints have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from demo_draft_head import PREFIX, DraftHead
from safetensors import safe_open
from safetensors.torch import load_file, save_file

MODEL_SHARD, DRAFT_SHARD = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def add_draft_head(checkpoint: Path, head: DraftHead) -> None:
    """Write the head's shard, the index of both shards, and the config's keys of the head.

    A `model.safetensors` is renamed to be the first shard.
    """
    if (checkpoint / "model.safetensors").exists():
        (checkpoint / "model.safetensors").rename(checkpoint / MODEL_SHARD)
    tensors = head.tensors()
    save_file(tensors, checkpoint / DRAFT_SHARD, metadata={"format": "pt"})
    weight_map: dict[str, str] = {}
    for shard in (MODEL_SHARD, DRAFT_SHARD):
        with safe_open(checkpoint / shard, framework="pt") as file:
            weight_map |= dict.fromkeys(sorted(file.keys()), shard)
    size = sum(_data_bytes(checkpoint / shard) for shard in (MODEL_SHARD, DRAFT_SHARD))
    _write_json(checkpoint / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    config["text_config"] = dict(sorted((config["text_config"] | _config_keys(config["text_config"])).items()))
    _write_json(checkpoint / "config.json", config)
    for path in checkpoint.iterdir():
        path.chmod(0o644)


def read_draft_head(checkpoint: Path, text_model: Any) -> DraftHead:
    """The head in a checkpoint, float32."""
    head = DraftHead(text_model.config).float()
    tensors = load_file(checkpoint / DRAFT_SHARD)
    head.load_state_dict({name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()})
    return head


def _config_keys(text_config: dict[str, Any]) -> dict[str, Any]:
    """The keys of the released text config that say there is a draft head."""
    return {
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "mtp": {
            "hybrid": True,
            "layer_types": ["full_attention"],
            "mtp_use_hidden_state_from_layer": None,
            "num_hidden_layers": 1,
            "rope_theta": text_config["rope_parameters"]["rope_theta"],
        },
    }


def _data_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from hf_parity import Edit, Pair, PairFactory, make_pair
from model_zoo import tiny_config_dict

from qwen4exp_trt.builder import planning


@pytest.fixture(scope="session", autouse=True)
def _no_estimate_of_activations() -> Iterator[None]:
    """It takes as long as the rest of a tiny build, and parity has no use for the plan."""
    with patch.multiple(planning, estimate_activations=lambda *step: 0, estimate_workspace=lambda *step: 0):
        yield


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> PairFactory:
    """`make_pair` of a config, made once a session for each combination of arguments."""
    made: dict[str, Pair] = {}

    def get(config_dict: dict[str, Any] | None = None, edit: Edit | None = None, **options: Any) -> Pair:
        config_dict = tiny_config_dict() if config_dict is None else config_dict
        key = json.dumps([config_dict, edit and edit.__qualname__, options], sort_keys=True)
        if key not in made:
            made[key] = make_pair(tmp_path_factory.mktemp("pair"), config_dict, edit, **options)
        return made[key]

    return get


@pytest.fixture(scope="session")
def tiny(make: PairFactory) -> Pair:
    """The tiny model with every mechanism on."""
    return make()

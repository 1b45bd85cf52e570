"""Checks before an engine is deserialized: each refusal has its own words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import bundles
import pytest
import torch
from engine_bundles import CPU, engine_backend
from trt_simulator import SimulatedTensorRT

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime import LLM
from qwen4exp_trt.runtime.backend import EagerBackend
from qwen4exp_trt.runtime.manifest import ENGINE_FILE, LAYERS_FILE, MANIFEST_FILE, Manifest
from qwen4exp_trt.runtime.tensorrt import engine_checks
from qwen4exp_trt.runtime.tensorrt.engine_checks import check_engine_fits

pytestmark = [pytest.mark.trt, pytest.mark.eager("about engines")]


@pytest.fixture
def copy(engine_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(engine_bundle, tmp_path / "copy"))


@pytest.fixture(scope="module")
def other(engine_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the same checkpoint that differs in how long sequences are."""
    output = tmp_path_factory.mktemp("other") / "bundle"
    return bundles.build(engine_bundle.parent / "checkpoint", output, activation_dtype="bfloat16", kv_cache_dtype="fp8")


def check(trt: Any, folder: Path, device: torch.device = CPU) -> None:
    check_engine_fits(trt, folder, Manifest.load(folder), device)


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / MANIFEST_FILE
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_a_bundle_as_it_was_built_fits(trt: SimulatedTensorRT, engine_bundle: Path) -> None:
    check(trt, engine_bundle)


def test_a_bundle_without_engine(trt: SimulatedTensorRT, engine_bundle: Path) -> None:
    without = replace(Manifest.load(engine_bundle), target=None, activation_dtype="float32")
    with pytest.raises(BundleError, match="has no engine, as it was built with float32 activations; use the backend"):
        check_engine_fits(trt, engine_bundle, without, CPU)


def test_another_version_of_tensorrt(trt: SimulatedTensorRT, engine_bundle: Path) -> None:
    trt.__version__ = "9.9.9"
    with pytest.raises(BundleError, match=r"built by tensorrt_rtx 1\.\S+, this is tensorrt_rtx 9\.9\.9; build the"):
        check(trt, engine_bundle)


def test_another_tensorrt_package(trt: SimulatedTensorRT, engine_bundle: Path) -> None:
    trt.__name__ = "tensorrt"
    with pytest.raises(BundleError, match=r"built by the TensorRT package tensorrt-rtx, this is tensorrt 1\."):
        check(trt, engine_bundle)


def test_another_gpu(trt: SimulatedTensorRT, engine_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    with pytest.raises(BundleError, match=r"is for sm121, this GPU \(Some GPU\) is sm90; build the bundle with"):
        check(trt, engine_bundle, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 1))
    check(trt, engine_bundle, torch.device("cuda"))


def test_a_plugin_of_another_version_is_registered(
    trt: SimulatedTensorRT, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the versions of the manifest, which `Manifest.load` compares with the ops that are installed."""
    manifest = Manifest.load(copy)
    manifest.plugins["moe"] = 99
    with pytest.raises(BundleError, match=r"does not have: Q4eMoe version 99 \(registered is 1\); build the"):
        check_engine_fits(trt, copy, manifest, CPU)


def test_a_damaged_engine(trt: SimulatedTensorRT, copy: Path) -> None:
    data = bytearray((copy / ENGINE_FILE).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / ENGINE_FILE).write_bytes(data)
    with pytest.raises(BundleError, match=r"is the report of the engine \w{16}: it is damaged, or another engine"):
        check(trt, copy)
    (copy / ENGINE_FILE).unlink()
    with pytest.raises(BundleError, match=f"{ENGINE_FILE}: is missing; build the bundle again"):
        check(trt, copy)


def test_an_engine_of_another_bundle(trt: SimulatedTensorRT, copy: Path, other: Path) -> None:
    """With the report that is its own, and even a manifest that lists both."""
    for name in (ENGINE_FILE, LAYERS_FILE):
        shutil.copyfile(other / name, copy / name)
    found = json.loads((other / MANIFEST_FILE).read_text())["files"]
    change_manifest(copy, lambda data: data["files"].update({name: found[name] for name in (ENGINE_FILE, LAYERS_FILE)}))
    Manifest.load(copy).check_files(copy)
    with pytest.raises(BundleError, match=r"was built from another program .* files of two bundles are mixed; build"):
        check(trt, copy)


def test_an_engine_of_another_build(trt: SimulatedTensorRT, copy: Path) -> None:
    change_manifest(copy, lambda data: data["files"][ENGINE_FILE].update(sha256="0" * 64))
    with pytest.raises(
        BundleError, match=r"of another build of this program: its sha256 is \w{16}, the manifest has 0"
    ):
        check(trt, copy)
    change_manifest(copy, lambda data: data["files"].pop(ENGINE_FILE))
    with pytest.raises(BundleError, match="the manifest lists none; build the bundle again"):
        check(trt, copy)


def test_a_report_that_does_not_say_what_the_engine_is_of(trt: SimulatedTensorRT, copy: Path) -> None:
    (copy / LAYERS_FILE).write_text("{}")
    with pytest.raises(BundleError, match="damaged, it does not say what the engine was built from"):
        check(trt, copy)
    (copy / LAYERS_FILE).unlink()
    with pytest.raises(BundleError, match=f"{LAYERS_FILE}: is missing, so nothing says what the engine was built from"):
        check(trt, copy)


def test_the_engine_is_checked_before_anything_is_read(
    trt: SimulatedTensorRT, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`LLM` names what is wrong with the engine, where a list of changed files would say less."""
    (copy / ENGINE_FILE).write_bytes(b"another")
    (copy / "tokenizer.json").unlink()
    monkeypatch.setattr("qwen4exp_trt.runtime.backend.device_from_name", lambda *args, **how: torch.device("cuda"))
    monkeypatch.setattr("qwen4exp_trt.runtime.backend.load_trt", lambda name: trt)
    monkeypatch.setattr(engine_checks, "_check_gpu", lambda *args: None)
    with pytest.raises(BundleError, match="it is damaged, or another engine was put in its place"):
        LLM(copy, backend="tensorrt-rtx", checkpoint=copy / "absent")


def test_profiles_of_another_build(trt: SimulatedTensorRT, copy: Path, loaded: EagerBackend) -> None:
    """A step's profile is chosen by the manifest's."""

    def widen(data: dict[str, Any]) -> None:
        data["profiles"]["prefill"]["input_ids"][2] = [4096]

    change_manifest(copy, widen)
    with pytest.raises(BundleError, match=r"input_ids is \[1\] to \[32\] in prefill, not \[1\] to \[4096\]; build it"):
        engine_backend(trt, copy, loaded)
    change_manifest(copy, lambda data: data["profiles"].pop("prefill"))
    with pytest.raises(BundleError, match="the engine has 2 profiles, the manifest decode; build it again"):
        engine_backend(trt, copy, loaded)

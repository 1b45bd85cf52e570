from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from manifests import make_manifest

from qwen4exp_trt import __version__
from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.manifest import FORMAT_VERSION, MANIFEST_FILE, FileRef, Manifest

FIELDS = sorted(Manifest.__dataclass_fields__)


def change(folder: Path, **values: Any) -> None:
    path = folder / MANIFEST_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(folder: Path) -> str:
    with pytest.raises(BundleError) as caught:
        Manifest.load(folder).check_files(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_saved_manifest_is_read_back(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path)
    assert Manifest.load(tmp_path) == manifest
    manifest.check_files(tmp_path)
    config_only = replace(manifest, checkpoint=None, converted=None, calibration=None, target=None, backend=None)
    config_only.save(tmp_path)
    assert Manifest.load(tmp_path) == config_only


def test_no_folder_and_no_bundle(tmp_path: Path) -> None:
    assert "absent: no such folder; give a bundle that qwen4exp-build made" in refused(tmp_path / "absent")
    assert f"not a bundle, it has no {MANIFEST_FILE}" in refused(tmp_path)


@pytest.mark.parametrize("text", ["{}", '{"format_version": 1}'])
def test_damaged_json(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST_FILE).write_text(text)
    message = refused(tmp_path)
    assert f"{MANIFEST_FILE}: damaged (" in message
    assert message.endswith("build the bundle again")


WRONG_VALUES = {
    None: {"target", "backend", "checkpoint", "converted", "calibration", "draft"},
    "text": {"precision", "ple_precision", "ple_residency", "activation_dtype", "kv_cache_dtype", "target", "backend"},
    1.5: set(),
    ("x",): {"weights", "passes", "kernel_targets", "host_weights"},
}
"""A value -> the fields that may have it."""


@pytest.mark.parametrize(
    ("value", "name"),
    [(value, name) for value, allowed in WRONG_VALUES.items() for name in FIELDS if name not in allowed],
)
def test_field_of_another_type(tmp_path: Path, name: str, value: Any) -> None:
    make_manifest(tmp_path)
    change(tmp_path, **{name: value})
    refused(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [{"shape": ["B", 4]}, {"shape": [-1]}, {"dtype": "float16"}, {"name": None, "shape": None}],
    ids=str,
)
@pytest.mark.parametrize("is_draft", [False, True])
def test_damaged_debug_outputs(tmp_path: Path, damage: dict[str, Any], is_draft: bool) -> None:
    """Memory is allocated for them: a dim must have an extent."""
    data = asdict(make_manifest(tmp_path))
    part = data["draft"] if is_draft else data
    part["debug_outputs"] = [{**part["debug_outputs"][0], **damage}]
    change(tmp_path, draft=data["draft"], debug_outputs=data["debug_outputs"])
    assert "damaged (" in refused(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [{"scales": {"a": scale}} for scale in (0.0, -1.0, math.inf, math.nan, None, "1", 1)]
    + [{"scales": 0.5}, {"scales": ["a"]}, {"text": None}, {"sha256": 7}, {"num_tokens": "all"}, {"of_old": 1}],
    ids=str,
)
def test_damaged_calibration(tmp_path: Path, damage: dict[str, Any]) -> None:
    calibration = make_manifest(tmp_path).calibration
    assert calibration is not None
    change(tmp_path, calibration=asdict(calibration) | damage)
    assert f"{MANIFEST_FILE}: damaged (" in refused(tmp_path)


@pytest.mark.parametrize("field", ["checkpoint", "converted"])
@pytest.mark.parametrize(
    "ref",
    [{"path": 5, "files": {}}, {"path": "a", "files": []}, {"path": "a"}]
    + [
        {"path": "a", "files": {"b": identity}}
        for identity in (None, {}, {"size": 1}, {"size": "1", "sample_sha256": ""}, {"size": 1, "sample_sha256": 2})
    ],
    ids=str,
)
def test_damaged_file_identities(tmp_path: Path, field: str, ref: dict[str, Any]) -> None:
    make_manifest(tmp_path)
    change(tmp_path, **{field: ref})
    assert f"{MANIFEST_FILE}: damaged (" in refused(tmp_path)


@pytest.mark.parametrize("name", FIELDS)
def test_field_that_is_missing_or_unknown(tmp_path: Path, name: str) -> None:
    make_manifest(tmp_path)
    path = tmp_path / MANIFEST_FILE
    data = json.loads(path.read_text())
    data[f"{name}_of_old"] = data.pop(name)
    path.write_text(json.dumps(data))
    assert name in refused(tmp_path)


def test_limits_out_of_range_are_damage(tmp_path: Path) -> None:
    make_manifest(tmp_path)
    change(tmp_path, limits={"max_batch_size": 0, "max_seq_len": 64, "prefill_chunk": 32, "block_size": 16})
    assert "damaged (BuildError('max_batch_size is 0" in refused(tmp_path)


def test_other_versions(tmp_path: Path) -> None:
    make_manifest(tmp_path)
    change(tmp_path, package_version="0.0.9")
    assert f"made by qwen4exp-trt 0.0.9 (bundle format {FORMAT_VERSION}), this is {__version__}" in refused(tmp_path)
    change(tmp_path, package_version=__version__, format_version=FORMAT_VERSION + 1)
    assert f"(bundle format {FORMAT_VERSION + 1})" in refused(tmp_path)


def test_version_is_what_a_later_format_is_refused_for_whatever_else_it_has(tmp_path: Path) -> None:
    text = json.dumps({"format_version": 99, "package_version": "9.0", "engines": []})
    (tmp_path / MANIFEST_FILE).write_text(text)
    assert "made by qwen4exp-trt 9.0 (bundle format 99)" in refused(tmp_path)


def test_other_op_versions_are_named(tmp_path: Path) -> None:
    plugins = make_manifest(tmp_path).plugins
    first, second, *_ = sorted(plugins)
    changed = {name: version for name, version in plugins.items() if name != second}
    change(tmp_path, plugins=changed | {first: 99, "unknown_op": 1})
    described = f"{first} (version 99, here 1), {second} (version none, here 1), unknown_op (version 1, here none)"
    assert f"its ops {described} have other versions here" in refused(tmp_path)


def test_missing_and_changed_files_are_all_named(tmp_path: Path) -> None:
    make_manifest(tmp_path)
    (tmp_path / "program" / "graph.py").unlink()
    (tmp_path / "decoder.onnx").write_text("decoder.0nnx")
    message = refused(tmp_path)
    assert "damaged bundle: decoder.onnx was changed after the build, program/graph.py is missing;" in message


def test_truncated_file(tmp_path: Path) -> None:
    make_manifest(tmp_path)
    (tmp_path / "decoder.onnx").write_bytes(b"on")
    assert "decoder.onnx was changed after the build" in refused(tmp_path)


@pytest.mark.parametrize("name", ["program/graph.py", "program/tables.json", "decoder.engine", "layers.json"])
def test_files_that_a_bundle_needs_are_listed(tmp_path: Path, name: str) -> None:
    files = dict(make_manifest(tmp_path).files)
    ref = files.pop(name)
    change(tmp_path, files={listed: vars(one) for listed, one in files.items()})
    assert f"damaged bundle: {name} is not in its list of files;" in refused(tmp_path)
    (tmp_path / name).unlink()
    assert f"damaged bundle: {name} is missing;" in refused(tmp_path)
    if not name.startswith("program"):
        change(tmp_path, target=None)
        Manifest.load(tmp_path).check_files(tmp_path)
    assert ref.size == len(name)


@pytest.mark.parametrize("name", ["extra", "program/extra.py", "program/manifest.json", ".hidden"])
def test_files_that_are_not_listed_are_refused(tmp_path: Path, name: str) -> None:
    make_manifest(tmp_path)
    (tmp_path / name).write_text("")
    assert f"damaged bundle: {name} is not in its list of files;" in refused(tmp_path)


@pytest.mark.parametrize("name", ["../outside", "/outside", "program/../../outside", "", ".", "x" * 300, "a\0b"])
def test_names_that_lead_out_of_the_bundle_are_refused(tmp_path: Path, name: str) -> None:
    bundle = tmp_path / "bundle"
    manifest = make_manifest(bundle)
    outside = tmp_path / "outside"
    outside.write_text("")
    listed = str(outside) if name == "/outside" else name
    files = manifest.files | {listed: FileRef.of(outside)}
    change(bundle, files={name: vars(ref) for name, ref in files.items()})
    assert f"damaged bundle: {listed} is missing;" in refused(bundle)

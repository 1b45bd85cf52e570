from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qwen4exp_trt.errors import CheckpointError
from qwen4exp_trt.runtime.checkpoint import INDEX_NAME, Checkpoint, listing
from qwen4exp_trt.runtime.file_identity import FileIdentity

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.arange(4, dtype=torch.bfloat16),
    "c": torch.tensor([2**62 + 1, -5]),
    "d": torch.ones(2, 2, dtype=torch.float16),
}


def write_shards(folder: Path, shards: dict[str, str], indexed: str | None = None) -> None:
    """``shards``: file name -> letters of its tensors; ``indexed``: letters that an index.json maps to their file."""
    for file, letters in shards.items():
        save_file({name: TENSORS[name] for name in letters}, folder / file)
    if indexed is not None:
        weight_map = {name: file for file, letters in shards.items() for name in letters if name in indexed}
        (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


LAYOUTS = {
    "single file": ({"model.safetensors": "abcd"}, None),
    "shards with index": ({"model-00001-of-00002.safetensors": "ab", "model-00002-of-00002.safetensors": "cd"}, "abcd"),
    "shards without index": ({"x.safetensors": "ad", "y.safetensors": "bc"}, None),
    "index that forgets a tensor": ({"x.safetensors": "ab", "y.safetensors": "cd"}, "abc"),
    "index that forgets a file": ({"x.safetensors": "ab", "y.safetensors": "cd"}, "ab"),
}


@pytest.mark.parametrize(("shards", "indexed"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts(tmp_path: Path, shards: dict[str, str], indexed: str | None) -> None:
    write_shards(tmp_path, shards, indexed)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.names == ["a", "b", "c", "d"]
    assert [checkpoint.dtype(name) for name in "abcd"] == ["F32", "BF16", "I64", "F16"]
    assert [checkpoint.shape(name) for name in "abcd"] == [(2, 3), (4,), (2,), (2, 2)]
    for name, tensor in TENSORS.items():
        found = checkpoint.tensor(name)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    assert checkpoint.files == tuple(shards)
    assert {file: identity.size for file, identity in checkpoint.identity().items()} == {
        file: (tmp_path / file).stat().st_size for file in shards
    }


def test_tensor_is_a_view_of_the_mapped_file(tmp_path: Path) -> None:
    write_shards(tmp_path, {"model.safetensors": "ab"})
    checkpoint = Checkpoint.open(tmp_path)
    first, second = checkpoint.tensor("a"), checkpoint.tensor("a")
    assert first.data_ptr() == second.data_ptr(), "two live copies cannot share an address"


def test_opening_and_reading_one_tensor_leaves_the_others_unread(tmp_path: Path) -> None:
    large = torch.zeros(64 << 20, dtype=torch.uint8)
    save_file({"large": large, "small": torch.ones(4)}, tmp_path / "model.safetensors")
    script = (
        "import sys, resource\n"
        "from qwen4exp_trt.runtime.checkpoint import Checkpoint\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "checkpoint = Checkpoint.open(sys.argv[1])\n"
        "assert checkpoint.tensor('small').sum() == 4 and checkpoint.tensor('large').shape == (64 << 20,)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    grown_kib = subprocess.run([sys.executable, "-c", script, tmp_path], check=True, capture_output=True, text=True)
    assert int(grown_kib.stdout) < 16 << 10, "a quarter of the tensor that was only looked at"


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_such_folder_and_empty_folder(tmp_path: Path) -> None:
    assert "absent: no such folder" in refused(tmp_path / "absent")
    assert "no *.safetensors file" in refused(tmp_path)


def test_missing_shards_are_all_listed(tmp_path: Path) -> None:
    write_shards(tmp_path, {f"model-{i}.safetensors": name for i, name in enumerate("abcd")}, "abcd")
    for i in (1, 3):
        (tmp_path / f"model-{i}.safetensors").unlink()
    message = refused(tmp_path)
    assert "2 of the 4 shards" in message
    assert "model-1.safetensors, model-3.safetensors;" in message


@pytest.mark.parametrize("content", ["{}", '{"weight_map": 3}', '{"weight_map": {"a": 3, "b": []}}'])
def test_damaged_index(tmp_path: Path, content: str) -> None:
    write_shards(tmp_path, {"model.safetensors": "a"})
    (tmp_path / INDEX_NAME).write_text(content)
    assert f"{INDEX_NAME}: not a JSON object with a weight_map" in refused(tmp_path)


def test_one_tensor_in_two_files(tmp_path: Path) -> None:
    write_shards(tmp_path, {"x.safetensors": "ab", "y.safetensors": "bc"})
    assert "tensor b is in both x.safetensors and y.safetensors" in refused(tmp_path)


def test_truncated_data_names_the_file_and_both_sizes(tmp_path: Path) -> None:
    write_shards(tmp_path, {"x.safetensors": "a", "y.safetensors": "b"})
    damaged = tmp_path / "y.safetensors"
    size = damaged.stat().st_size
    damaged.write_bytes(damaged.read_bytes()[:-3])
    assert f"y.safetensors: truncated or damaged: {size - 3:,} bytes, but its header describes {size:,}" in (
        refused(tmp_path)
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated or damaged: 0 bytes, but its header alone should take 8"),
        (b"\x10\x00", "truncated or damaged: 2 bytes"),
        ((100).to_bytes(8, "little") + b"{}", "10 bytes, but its header alone should take 108"),
        (b"\xff" * 64, "truncated or damaged: 64 bytes"),
        ((8).to_bytes(8, "little") + b"not json", "damaged: 16 bytes, with a header that is not safetensors"),
        ((8).to_bytes(8, "little") + b'{"a": 3}', "damaged: 16 bytes, with a header that is not safetensors"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "a Git LFS pointer of 63 bytes"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    found = refused(tmp_path)
    assert "model.safetensors" in found
    assert message in found


@pytest.mark.parametrize(
    "header",
    [
        '{"a": {"data_offsets": ["x", "y"]}}',
        '{"a": {"data_offsets": [0, 4]}, "b": {"data_offsets": [0, "y"]}}',
        '{"a": {"data_offsets": [0, null]}}',
        '{"a": {"data_offsets": [0]}}',
        '{"a": {"data_offsets": [0, ' + "9" * 5000 + "]}}",
        '{"a": ' + "[" * 100_000,
    ],
    ids=lambda header: header[:40],
)
def test_hostile_headers(tmp_path: Path, header: str) -> None:
    content = len(header).to_bytes(8, "little") + header.encode()
    (tmp_path / "model.safetensors").write_bytes(content)
    message = f"model.safetensors: damaged: {len(content):,} bytes, with a header that is not safetensors"
    assert message in refused(tmp_path)


def test_a_header_beyond_all_bounds_is_not_read(tmp_path: Path) -> None:
    size = 50 << 30
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((size - 8).to_bytes(8, "little"))
        file.truncate(size)
    assert f"damaged: its header should take {size - 8:,} bytes, more than the 100,000,000" in refused(tmp_path)


def test_unknown_tensor(tmp_path: Path) -> None:
    write_shards(tmp_path, {"model.safetensors": "a"})
    with pytest.raises(CheckpointError, match="no tensor zzz in the 1 safetensors files"):
        Checkpoint.open(tmp_path).tensor("zzz")


def test_identity_accepts_more_files_but_no_other_sizes(tmp_path: Path) -> None:
    write_shards(tmp_path, {"x.safetensors": "a", "y.safetensors": "b"})
    old = Checkpoint.open(tmp_path).identity()
    write_shards(tmp_path, {"y.safetensors": "bc", "extra.safetensors": "d"})
    (tmp_path / "x.safetensors").unlink()
    checkpoint = Checkpoint.open(tmp_path)
    new = checkpoint.identity()
    checkpoint.verify_identity({"extra.safetensors": new["extra.safetensors"]})
    sizes = f"{new['y.safetensors'].size} bytes instead of {old['y.safetensors'].size}"
    assert f"x.safetensors is missing, y.safetensors has {sizes};" in refused_identity(checkpoint, old)


def test_named_files_alone_are_opened(tmp_path: Path) -> None:
    """Beside them may lie others: half-written ones, and those of other conversions with the same tensors."""
    write_shards(tmp_path, {"x.safetensors": "a", "y.safetensors": "b", "again.safetensors": "ab"})
    (tmp_path / "half.safetensors").write_bytes(b"half")
    opened = Checkpoint.open_files(tmp_path, ["y.safetensors", "x.safetensors"])
    assert (opened.files, opened.names) == (("x.safetensors", "y.safetensors"), ["a", "b"])
    identity = opened.identity()
    assert identity.keys() == {"x.safetensors", "y.safetensors"}
    flip_byte(tmp_path / "y.safetensors", -1)
    assert "y.safetensors has the same size but other content" in refused_identity(opened, identity)


def test_named_files_that_cannot_be_opened(tmp_path: Path) -> None:
    write_shards(tmp_path, {"x.safetensors": "a", "y.safetensors": "ab"})
    (tmp_path / "half.safetensors").write_bytes(b"half")
    for files, message in (
        (["x.safetensors", "gone.safetensors", "z.safetensors"], "gone.safetensors, z.safetensors missing of 3 files"),
        (["x.safetensors", "half.safetensors"], "half.safetensors: truncated or damaged: 4 bytes"),
        (["x.safetensors", "y.safetensors"], "tensor a is in both x.safetensors and y.safetensors"),
    ):
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open_files(tmp_path, files)
    with pytest.raises(CheckpointError, match="absent: no such folder"):
        Checkpoint.open_files(tmp_path / "absent", ["x.safetensors"])


def refused_identity(checkpoint: Checkpoint, expected: dict[str, FileIdentity]) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.verify_identity(expected)
    return str(caught.value)


def flip_byte(path: Path, offset: int) -> None:
    """Change one byte, counted from the end of the file where ``offset`` is negative."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("offset", [-1, -20, -24])
def test_identity_of_a_small_file_is_all_of_its_content(tmp_path: Path, offset: int) -> None:
    write_shards(tmp_path, {"x.safetensors": "a", "y.safetensors": "b"})
    expected = Checkpoint.open(tmp_path).identity()
    flip_byte(tmp_path / "x.safetensors", offset)
    message = refused_identity(Checkpoint.open(tmp_path), expected)
    assert "not the checkpoint that was expected: x.safetensors has the same size but other content;" in message


def test_identity_covers_the_names_in_the_header(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "x.safetensors")
    expected = Checkpoint.open(tmp_path).identity()
    save_file({"b": torch.ones(4)}, tmp_path / "x.safetensors")
    assert "x.safetensors has the same size but other content" in refused_identity(Checkpoint.open(tmp_path), expected)


def test_identity_of_a_large_file_samples_it(tmp_path: Path) -> None:
    """A fine-tune changes weights everywhere; any 64th of the data, and its ends, are enough to see it."""
    size = 64 << 20
    data = torch.zeros(size, dtype=torch.uint8)
    path = tmp_path / "x.safetensors"

    def identity() -> FileIdentity:
        save_file({"a": data}, path)
        return FileIdentity.of(path)

    original = identity()
    for start in (0, size // 3, size - size // 63):
        data[start : start + size // 63] = 1
        assert identity() != original
        data.zero_()
    assert identity() == original
    for end in (0, -1):
        data[end] = 1
        assert identity() != original
        data.zero_()


def test_identity_of_a_file_of_many_gigabytes_is_cheap(tmp_path: Path) -> None:
    size = 5 << 30
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "x.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    checkpoint = Checkpoint.open(tmp_path)
    begin = time.perf_counter()
    checkpoint.verify_identity(checkpoint.identity())
    assert time.perf_counter() - begin < 1, "131 files of this size must not take minutes"


def test_listing_is_bounded() -> None:
    assert listing(["a", "b"]) == "a, b"
    assert listing((str(i) for i in range(5)), limit=3) == "0, 1, 2 and 2 more"


def test_the_identity_of_a_file_that_is_no_safetensors_is_taken_without_trust_in_it(tmp_path: Path) -> None:
    """The first bytes of a damaged file would be a header of exabytes."""
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(b"\xff" * 7 + b"\x0f" + b"x" * 100)
    assert FileIdentity.of(path).size == 108

"""The Python blocks of the README do what they show, in their order; that of a client runs in tests/serve."""

from __future__ import annotations

import re
from pathlib import Path

import bundles
import pytest

FILE = bundles.ROOT / "README.md"
README = FILE.read_text() if FILE.exists() else ""
BLOCKS = [
    block for block in re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE) if "OpenAI(" not in block
]

pytestmark = pytest.mark.skipif(not README, reason="a copy of the code alone has no README.md")


@pytest.mark.trt
@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_python_block(
    index: int,
    demo_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "demo").symlink_to(demo_bundle)
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[index], f"block {index} of README.md", "exec", dont_inherit=True), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 2

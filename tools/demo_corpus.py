"""Training text of the demo checkpoint, read from two Debian packages of public-domain books.

- `r-cran-janeaustenr`: the six novels of Jane Austen (texts in the public domain, package MIT).
- `sword-text-web`: the World English Bible (public domain).

Neither package needs to be installed: `apt-get download` both and unpack them with `dpkg -x` into one folder.
"""

from __future__ import annotations

import re
import struct
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

AUSTEN_DATA = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
BIBLE_FOLDER = "usr/share/sword/modules/texts/ztext/engWEB2015eb"
MIN_CHAPTER_CHARS = 400


@dataclass(frozen=True)
class Corpus:
    """Documents of plain ASCII text (one chapter each), paragraphs separated by a blank line."""

    novels: tuple[str, ...]
    bible: tuple[str, ...]
    heldout: tuple[str, ...]


def read_corpus(root: Path) -> Corpus:
    """The corpus from packages unpacked under `root` ("/" if they are installed).

    Held out are one chapter from the middle of each novel and every 160th chapter of the Bible.
    """
    for relative in (AUSTEN_DATA, BIBLE_FOLDER):
        if not (root / relative).exists():
            sys.exit(
                f"{root / relative} is missing; run `apt-get download r-cran-janeaustenr sword-text-web`, "
                f"unpack both with `dpkg -x PACKAGE.deb {root}` and pass that folder as --packages"
            )
    novels: list[str] = []
    bible: list[str] = []
    heldout: list[str] = []
    for novel in _read_novels(root / AUSTEN_DATA):
        middle = len(novel) // 2
        heldout.append(novel[middle])
        novels.extend(novel[:middle] + novel[middle + 1 :])
    for index, chapter in enumerate(_read_bible(root / BIBLE_FOLDER)):
        (heldout if index % 160 == 80 else bible).append(chapter)
    return Corpus(tuple(novels), tuple(bible), tuple(heldout))


def _read_novels(path: Path) -> Iterator[list[str]]:
    for lines in _read_r_character_vectors(path.read_bytes()):
        paragraphs = [" ".join(part.split()) for part in "\n".join(lines).split("\n\n")]
        chapters: list[list[str]] = [[]]
        for paragraph in paragraphs:
            if re.match(r"(?i)(chapter|volume) [\divxl]+\b", paragraph):
                chapters.append([])
            elif paragraph:
                chapters[-1].append(_to_ascii(paragraph.replace("_", "")))
        texts = ["\n\n".join(chapter) for chapter in chapters[1:]]
        yield [text for text in texts if len(text) >= MIN_CHAPTER_CHARS]


def _read_r_character_vectors(data: bytes) -> Iterator[list[str]]:
    """Character vectors of an R lazy-load database: per object a 4-byte size and zlib-compressed XDR version 3."""
    while data:
        stream = zlib.decompressobj()
        item = stream.decompress(data[4:])
        data = stream.unused_data
        encoding_length = struct.unpack_from(">i", item, 14)[0]
        offset = 18 + encoding_length + 4  # after the header come the vector's flags, its length, then its strings
        count = struct.unpack_from(">i", item, offset)[0]
        offset += 4
        strings = []
        for _ in range(count):
            length = struct.unpack_from(">i", item, offset + 4)[0]
            strings.append(item[offset + 8 : offset + 8 + length].decode("utf-8"))
            offset += 8 + length
        yield strings


def _read_bible(folder: Path) -> Iterator[str]:
    """Chapters of a SWORD zText module (OSIS markup): index of blocks, index of verses, compressed blocks."""
    for testament in ("ot", "nt"):
        data = (folder / f"{testament}.bzz").read_bytes()
        blocks = [
            zlib.decompress(data[start : start + size]) if size else b""
            for start, size, _ in struct.iter_unpack("<III", (folder / f"{testament}.bzs").read_bytes())
        ]
        verses = [
            blocks[block][start : start + size].decode("utf-8")
            for block, start, size in struct.iter_unpack("<IIH", (folder / f"{testament}.bzv").read_bytes())
            if size
        ]
        for chapter in re.split(r"<chapter [^>]*sID=[^>]*>", " ".join(verses))[1:]:
            text = _plain_text_from_osis(re.split(r'<div [^>]*type="introduction"|<div [^>]*type="book"', chapter)[0])
            if len(text) >= MIN_CHAPTER_CHARS:
                yield text


def _plain_text_from_osis(markup: str) -> str:
    markup = re.sub(r"<(note|title)\b.*?</\1>", " ", markup, flags=re.DOTALL)
    markup = re.sub(r'<div [^>]*type="x-p"[^>]*>|<lg\b[^>]*>', "\n\n", markup)
    markup = re.sub(r"</?(lb|l|milestone|div|chapter|lg)\b[^>]*>", " ", markup)
    text = _to_ascii(re.sub(r"<[^>]*>?", "", markup))
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    text = "\n\n".join(part for part in paragraphs if part)
    return re.sub(r" +([,.;:!?])", r"\1", text)


def _to_ascii(text: str) -> str:
    for plain, fancy in {'"': "\u201c\u201d", "'": "\u2018\u2019", "--": "\u2014", "-": "\u2013", " ": "\xa0"}.items():
        text = re.sub(f"[{fancy}]", plain, text)
    return text.encode("ascii", errors="ignore").decode("ascii")

"""Files with markup, random files made of their lines, and documents with their answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from random import Random

from mlx_t5.text.documents import Document

FILES = Path(__file__).with_name("files")
# The files end no line with a space: · stands for it.
WHOLE = {
    f".{kind}": (FILES / f"written.{kind}").read_text("utf-8").replace("·", " ")
    for kind in ("md", "srt", "vtt")
}
WHOLE |= {".txt": "One.  Two\n\n  three \n- four\n", ".srt": WHOLE[".srt"].rstrip("\n")}
SRT = WHOLE[".srt"]
NEWLINES = ("\n", "\r\n", "\r")
# White space in Python that ends no word or line of a file, and characters without a width.
ODD_SPACES = "\x1c\x1d\x1e\x1f\x85\xa0\u2007\u2028\u202f\u3000\u200b\ufeff\u200e"
# Times of a cue, as programs and people write them.
ODD_TIMES = (FILES / "odd_times.txt").read_bytes().decode("unicode_escape").splitlines()
WORDS = (
    "the café naïve house I've Straße größer 12 3.5 — “quoted” привет 今日は良い 天気。 ไทย 😀 é "
    "a _b_ **bold** *it* x_y don't U.S. (see end). Yes! no? ~ $5 100% a/b"
).split()
MARKDOWN_BITS = (
    "`code`|``a ` b``|`|[link](http://a.b/c_d 'title')|[ref]|[two][ref]|![image](i.png)|<b>|</b>|"
    "<https://a.b>|http://a.b/c?d=e_f.|me@a.org|\\*|snake\\_case|&amp;|R&amp;D|&#169;|[^1]|[|](|![|"
    "<!-- x -->|a  |b\\|\\|| | \\| |***|~~gone~~|$x^2$|{{ it }}|:smile:"
).split("|")
CUE_BITS = (
    "<i>|</i>|<b>|</b>|<font color='red'>|{\\an8}|<v Anna>|<c.red>|</c>|<00:00:01.500>|&amp;|"
    "&gt;&gt;|- |-|♪|<|>|3|  |<00|{x}|-->x".split("|")
)


def generated(suffix: str, seed: int) -> str:
    """Returns a random file: lines of the hand-written file in any order, some with other words.

    It has any kind of line end, and sometimes a byte order mark.
    """
    rng = Random(f"{suffix} {seed}")
    bits = MARKDOWN_BITS if suffix in (".md", ".txt") else CUE_BITS
    known = [line for line in WHOLE[suffix].split("\n") if not line.startswith("WEBVTT")]
    lines = rng.choices(known, k=rng.randint(1, 25))
    lines = [_varied(rng, line, bits) if rng.random() < 0.4 else line for line in lines]
    head = {".srt": "1\n00:00:01,000 --> 00:00:02,000\n", ".vtt": "WEBVTT\n\n"}.get(suffix, "")
    text, newline = head + "\n".join(lines), rng.choice(NEWLINES) if seed % 4 else ""
    text = "".join(newline or rng.choice(NEWLINES) if char == "\n" else char for char in text)
    return "\ufeff" * (rng.random() < 0.2) + text


def _varied(rng: Random, line: str, bits: list[str]) -> str:
    """Returns random words after the first marks of a line, or odd times."""
    if "-->" in line:
        return rng.choice(ODD_TIMES).format(number := rng.randint(1, 8), number + 1)
    words = rng.choices([*WORDS, *bits], k=rng.randint(1, 9))
    gaps = ("", " ", " ", " ", "  ", rng.choice(ODD_SPACES))
    return re.match(r"[^\w<{]*", line)[0] + "".join(word + rng.choice(gaps) for word in words)


def joined(document: Document, answers: Sequence[str | None]) -> str:
    """Returns the document with answers in place of its pieces; None: the piece failed."""
    texts = [document.answered(*pair) for pair in zip(document.pieces, answers, strict=True)]
    parts = [document.part(i, texts) for i in range(len(texts))]
    return "".join([*parts, document.before(len(texts))])

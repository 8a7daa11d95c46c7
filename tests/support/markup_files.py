"""Hand-written and generated files with markup for tests, and their answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from mlx_t5.text.markup import rewrapped, spans, unwrapped

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
NEWLINES = ("\n", "\r\n", "\r")
# White space in Python that ends no word or line of a file, and characters without a width.
ODD_SPACES = "\x1c\x1d\x1e\x1f\x85\xa0\u2007\u2028\u202f\u3000\u200b\ufeff\u200e"
# Times of a cue, as programs and people write them.
ODD_TIMES = (
    "\ufeff00:00:0{},000 --> 00:00:0{},000",
    "\u200e00:00:0{},000 --> \u200f00:00:0{},000",
    "\u202a00:00:0{},000\u202c --> \u202a00:00:0{},000\u202c",
    "-00:00:0{},000 --> - 00:00:0{},000",
    "0:00:0{},0 --> 0:00:0{},0",
    "0:00:0{}.000-->0:00:0{}.000",
    "00:00:0{},000 -> 00:00:0{},000",
    "0:00:0{} -> 0:00:0{}",
    "00:00:0{},000 - -> 00:00:0{},000",
    "00:00:0{},000 -- > 00:00:0{},000",
    "00:00:0{}.000\xa0-->\xa000:00:0{}.000",
    "00:0{}.000 --&gt; 00:0{}.000",
    "00：00：0{}，000 —> 00：00：0{}，000",
    "00 : 00:\u200e0{},  000 --> 00 : 00:0{},000",
    "00:0{} --> 00:0{}",
)

MARKDOWN = """---
title: A page
---

A setext
heading
===

# Heading with `code`

One paragraph with `code`, a [link](http://a.b "t") and **bold**
that goes on over ``more`` here and
ends now.\x20\x20
After a hard break\\
and another one, snake\\_case and R&amp;D.

> quoted text which
> goes on and
lazily too
>
> > deeper
> > still

- [ ] item one
  goes on
- `list`s of things[^1]
  1. nested, see https://example.com/a_b. And (`x`), or me@x.org

      code in the item

+	tab after the mark
	goes on

| a head | b `x` |
|---|:--|
| cell one | two \\| words |
| |short

<div class="a">
text in HTML
</div>

Text <b>bold</b> and <https://x.y> ![img](a.png) done. 使用`foo`来做。

    indented code

~~~py
x = "text"
~~~

[ref]: http://a.b
  "title"
[^1]: A footnote text.

Tail [ref] with [nothing] and an open ` mark.
"""

SRT = """1
00:00:01,000 --> 00:00:02,000
<i>Hello there,
my friend.</i>

2
00:00:03,000 --> 00:00:04,000  X1:3 X2:4
{\\an8}- Who is it?
- It is <b>me</b>, Bob.


00:00:05,000-->00:00:06,000
♪ la la ♪\x20
4
00:00:07,000 --> 00:00:08,000
1986
R&amp;D is not

for me.

5
00:00:09,000 --> 00:00:10,000

6
00:00:11,000 --> 00:00:12,000
The end"""

VTT = """WEBVTT - Some title
Kind: captions

NOTE some note
of two lines

STYLE
::cue(b) { color: red }

REGION
id:left

intro
00:01.000 --> 00:02.000 align:start
<v Bob>Hello <c.red>you</c> over
there

01:00:01.000 --> 01:00:02.000
&gt;&gt; Hi <01:00:01.500>you

stray line

00:03.000 --> 00:04.000

NOTE nothing was said
"""
WHOLE = {".md": MARKDOWN, ".srt": SRT, ".vtt": VTT, ".txt": "One.  Two\n\n  three \n- four\n"}


def answered(text: str, suffix: str, answer: Callable[[str], str]) -> str:
    """Returns a file in which every span is replaced by its answer."""
    parts, at = [], 0
    for start, end, wrapped in spans(text, suffix):
        source = text[start:end]
        answered = rewrapped(source, answer(unwrapped(source))) if wrapped else answer(source)
        parts += [text[at:start], answered]
        at = end
    return "".join([*parts, text[at:]])


def decoded(text: str, suffix: str) -> list[str]:
    """Returns the texts of a file that a model decodes."""
    found = spans(text, suffix)
    return [unwrapped(text[a:b]) if wrapped else text[a:b] for a, b, wrapped in found]


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

"""Draws docs/who-wrote.svg, which shows, pass by pass, which model wrote each token of a text.

The text is the answer of the bundled target and draft to the default prompt.

Run it as `python -m demo.picture`.
"""

from __future__ import annotations

from html import escape

from mlx_t5.cli.generate_options import DEFAULT_PROMPT
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.disk import BUNDLED
from mlx_t5.model import load

PICTURE = BUNDLED.parent / "docs" / "who-wrote.svg"
NUM_DRAFT = 5
COLORS = {"draft": ("#116329", "#dafbe1"), "target": ("#6639ba", "#eddeff")}  # text, background
LEGEND = {"draft": "proposed by the draft, accepted by the target", "target": "the target's own"}
CHARACTER, LINE, LEFT = 9, 34, 86  # pixels

Step = list[tuple[str, str]]  # the text that each token adds, and the token's origin


def run() -> list[Step]:
    target, tokenizer = load(BUNDLED / "target", "float32")
    draft, _ = load(BUNDLED / "draft", "float32")
    chunks = SpeculativeDecoder(target, draft, tokenizer, NUM_DRAFT).stream(DEFAULT_PROMPT)
    return [list(zip(chunk.segments, chunk.origins, strict=True)) for chunk in chunks]


def label(text: str, x: int, y: int, color: str = "#59636e") -> str:
    length = CHARACTER * len(text)
    return f'<text x="{x}" y="{y + 17}" textLength="{length}" fill="{color}">{escape(text)}</text>'


def draw(steps: list[Step]) -> str:
    tokens = sum(map(len, steps))
    summary = f"{tokens} tokens in {len(steps)} passes of the target instead of {tokens + 1}"
    lines: list[tuple[str, Step, str]] = [("", [], summary)]
    lines += [(f"pass {number}", step, "") for number, step in enumerate(steps, 1)]
    lines += [("", [("token", origin)], meaning) for origin, meaning in LEGEND.items()]
    shapes, right = [], 0
    for i, (name, step, text) in enumerate(lines):
        x, y = LEFT, 10 + i * LINE
        for piece, origin in step:
            word, (color, background) = piece.strip() or "␣", COLORS[origin]
            width = CHARACTER * len(word) + 10
            x += 7 * (piece.startswith(" ") and x > LEFT)
            box = f'x="{x}" y="{y}" width="{width}" height="24" rx="5" fill="{background}"'
            shapes += [f"<rect {box}/>", label(word, x + 5, y, color)]
            x += width + 2
        x += 7 * bool(step)
        shapes += [label(name, 16, y)] * bool(name) + [label(text, x, y)] * bool(text)
        right = max(right, x + CHARACTER * len(text))
    size = f'width="{right + 16}" height="{10 + len(lines) * LINE}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="15">'
    return "\n".join([head, f'<rect {size} rx="8" fill="#ffffff"/>', *shapes, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(draw(run()), encoding="utf-8")

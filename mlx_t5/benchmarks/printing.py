"""Prints and writes a run's results: header lines, tables in Markdown, figures as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlx_t5.cli.output import check_output_file
from mlx_t5.timing import Columns as Columns
from mlx_t5.timing import markdown as markdown
from mlx_t5.timing import percent as percent


def texts(different: int | None) -> str:
    if different is None:
        return "sampled"
    return f"{different} DIFFER" if different else "equal"


# The title of each figure in tables, and a function that returns its text.
WAY: Columns = {"way": lambda row: row["way"]}
SPEED: Columns = {
    "tokens/s": lambda row: f"{row['tokens_per_second']:.0f}",
    "speed-up (range)": lambda row: str(row["speed_up"]),
}
TOKENS_PER_CALL: Columns = {"tokens/call": lambda row: f"{row['tokens_per_call']:.2f}"}
ACCEPTANCE: Columns = {"acceptance": lambda row: percent(row["acceptance_rate"])}
TEXTS: Columns = {"texts": lambda row: texts(row["different"])}


def header(facts: Mapping[str, Any], line: str, **more: Any) -> str:
    return f"{line}\n{facts_line({**facts, **more})}"


def facts_line(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)


def check_writable(*files: Path | None) -> None:
    for file in files:
        if file is not None:
            check_output_file(str(file), None)


def write_record(file: Path | None, record: dict) -> None:
    if file is not None:
        text = json.dumps(record, indent=1, default=asdict, ensure_ascii=False)
        file.write_text(text + "\n", encoding="utf-8")

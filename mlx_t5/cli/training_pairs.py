"""Reads what finetune.py and distill.py train on: pairs of a prompt and a completion, or prompts.

The first record decides by which names the texts of a pair are read.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlx_t5.errors import UserError, brief, log, reason

ALPACA = ("instruction", "output", "input")  # the third is joined to the first, if it has a text
NAMES = (("prompt", "completion"), ALPACA, ("input", "output"), ("source", "target"))
SUFFIXES = (".tsv", ".csv", ".jsonl")  # of several files of one name, the last is read
# A field of a .tsv as table programs write it: without quotes, or in quotes with its own doubled.
_FIELD = re.compile(r'(?<![^\t\r\n])(?:"[^"]*(?:""[^"]*)*"|[^"\t\r\n]*)(?:\t|\r\n?|\n|\Z)')
Names = Sequence[Sequence[str]]
Record = tuple[str, Any]  # where it stands, and an object, or the UserError that says why not


def read_lines(
    name: str, allowed: Names = NAMES, prompts_only: bool = False
) -> Iterator[tuple[str, str | None] | UserError]:
    """Yields pairs, or for a line that cannot be used the error that says why.

    Args:
        name: a .jsonl file, or a .csv or .tsv file with a header; in a .tsv file without one, each
            line has a prompt and a completion.
        allowed: possible names of the two texts, which may be in an object "translation", and of
            one that may follow the first.
        prompts_only: whether a record needs only the first text. The second is then None, except a
            "completion" in a .jsonl file.

    Raises:
        UserError: the file cannot be read, or its first record has other names.
    """
    if not name.endswith(SUFFIXES):
        raise UserError(f"{name} is no .jsonl, .csv or .tsv file; give one, or a folder of them")
    as_json, names, unread = name.endswith(".jsonl"), None, dict[str, None]()
    for where, record in _objects(name) if as_json else _rows(name, allowed):
        if isinstance(record, UserError):
            yield record
            continue
        names = names or _names(record, where, allowed, prompts_only)
        unread |= {n: None for n in record if isinstance(record[n], str) and n not in names}
        texts = [record.get(field) for field in names[:2]]
        if prompts_only and not (as_json and names[1] == "completion" and texts[1] is not None):
            texts[1:] = []
        good = [isinstance(text, str) and bool(text.strip()) for text in texts]
        if not all(good):
            yield UserError(f"{where} has no {names[good.index(False)]} that is a text")
            continue
        more = (record.get(names[2]) if names[2:] else None) or ""
        if not isinstance(more, str):
            yield UserError(f"{where} has an {names[2]} that is no text")
            continue
        if more.strip():
            texts[0] = f"{texts[0].rstrip()} {more}"
        yield texts[0], texts[1] if len(texts) > 1 else None
    if unread:
        log(f"note: {name} has columns that are not read: {brief(', '.join(unread), 300)}")


def _names(
    record: Mapping[str, Any], where: str, allowed: Names, prompts_only: bool
) -> Sequence[str]:
    for names in allowed:
        if record.keys() >= set(names[:1] if prompts_only else names[:2]):
            return names
    known = ", or ".join(names[0] if prompts_only else " and ".join(names[:2]) for names in allowed)
    cure = f"the prompt must be named {known}"
    if not prompts_only:
        cure = f"name the texts {known}, or give --source-language and --target-language"
    raise UserError(f"{where} has the fields {brief(', '.join(map(str, record)), 300)}; {cure}")


def _objects(name: str) -> Iterator[Record]:
    with open(name, "rb") as file:
        for n, line in enumerate(file, 1):
            where = f"{name} line {n}"
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                record = UserError(f"{where} is not JSON in UTF-8 ({reason(error)})")
            if isinstance(record, dict) and isinstance(record.get("translation"), dict):
                record |= record.pop("translation")
            if not isinstance(record, (dict, UserError)):
                record = UserError(f"{where} is no object")
            yield where, record


def _is_header(row: Sequence[str], allowed: Names) -> bool:
    return any(set(names[:2]) <= set(row) for names in allowed)


def _is_quoted(text: str, allowed: Names) -> bool:
    """Whether a .tsv file has a header, and is consistent if its fields are read as quoted."""
    if '"' not in text or _FIELD.sub("", text):
        return False
    header, *rows = csv.reader(io.StringIO(text, newline=""), delimiter="\t")
    return _is_header(header, allowed) and all(len(row) in (0, len(header)) for row in rows)


def _rows(name: str, allowed: Names) -> Iterator[Record]:
    how: dict[str, Any] = {"delimiter": "\t"} if name.endswith(".tsv") else {}
    header: list[str] = []
    csv.field_size_limit(1 << 30)  # by default, a text of 128 KiB makes the file unreadable
    try:
        with open(name, encoding="utf-8-sig", newline="") as file:
            if how and _is_quoted(file.read(), allowed):
                log(f"note: {name} has texts in quotes, which are read without the quotes")
            elif how:  # texts may have quotes, but no tabs and no line breaks
                how["quoting"] = csv.QUOTE_NONE
            file.seek(0)
            for row in (rows := csv.reader(file, **how)):
                where = f"{name} line {rows.line_num}"
                if not header:
                    known = _is_header(row, allowed)
                    header = row if known or not how or len(row) != 2 else list(NAMES[0])
                    if header is row:
                        continue
                if row and len(row) != len(header):
                    yield where, UserError(f"{where} has {len(row)} texts instead of {len(header)}")
                elif row:
                    yield where, dict(zip(header, row, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{name} cannot be read ({reason(error)}); save it as UTF-8") from None

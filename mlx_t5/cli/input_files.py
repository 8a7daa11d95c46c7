"""Several input files, or a folder of them: which file each one's results are written to."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from mlx_t5.errors import UserError
from mlx_t5.settings import SUBTITLES

KINDS = (".txt", *SUBTITLES, ".jsonl", ".tsv")  # files of a folder that are read


def paired_files(inputs: Sequence[str], folder: str, as_json: bool) -> list[tuple[str, str]]:
    """Each input file and its output file, which has the same name in the folder for the results.

    A folder in `inputs` means its files of the kinds `KINDS`, also in its subfolders, which the
    results keep. Hidden files and the folder for the results are left out.

    Args:
        inputs: files and folders.
        folder: the folder for the results; it need not exist.
        as_json: whether every output has JSON lines, so that its name ends in .jsonl.

    Raises:
        UserError: a file is missing, or two inputs would have the same output.
    """
    if not folder:
        raise UserError("several files require --output-file FOLDER for their results")
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError(f"{folder} is a file; name a folder for the results of several files")
    if folder.endswith(KINDS) and not os.path.isdir(folder):
        raise UserError(f"several files require a folder for their results; {folder} names a file")
    pairs: dict[str, tuple[str, str]] = {}  # by output, in the way a Mac's disk compares names
    for name in inputs:
        if os.path.isdir(name):
            files = list(_files_in(name, Path(folder).resolve()))
        else:
            files = [(name, os.path.basename(name))]
        if not files:
            raise UserError(f"{name} has no files to read; they end in {' '.join(KINDS)}")
        for path, inside in files:
            output = os.path.join(folder, inside)
            if as_json and not output.endswith(".jsonl"):
                output += ".jsonl"
            if not os.path.exists(path):
                raise UserError(f"there is no file {path}; check the path")
            if output.casefold() in pairs:
                other, _ = pairs[output.casefold()]
                both = f"{other} and {path} would both be written to {output}"
                raise UserError(f"{both}; name each file once, and rename one of two")
            pairs[output.casefold()] = path, output
    return list(pairs.values())


def _files_in(folder: str, results: Path) -> Iterator[tuple[str, str]]:
    """Each file of a folder, and its path inside the folder."""
    for top, folders, names in os.walk(folder):
        folders.sort()
        for name in list(folders):
            if name.startswith(".") or Path(top, name).resolve() == results:
                folders.remove(name)
        for name in sorted(names):
            path = os.path.join(top, name)
            if not name.startswith(".") and Path(name).suffix.lower() in KINDS:
                yield path, os.path.relpath(path, folder)

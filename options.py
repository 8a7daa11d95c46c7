"""Options that several command lines share, and the decoder that they name.

Nothing here imports MLX before a decoder is loaded, so `--help` and mistakes need not wait for it.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from ranges import shown

if TYPE_CHECKING:
    from decoder import SpeculativeDecoder
    from pair import Pair


def number(kind: Callable, fits: Callable[[float], bool], wanted: str) -> Callable[[str], float]:
    """An argparse type: a number that fits; `wanted` tells the user what does."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not fits(value):
            raise argparse.ArgumentTypeError(f"give {wanted}, not {shown(text)}")
        return value

    return parse


def add_models(group: argparse._ArgumentGroup) -> None:
    """Adds the options that name the models."""
    group.add_argument(
        "--model",
        "--model-name",
        metavar="NAME",
        help="the target: a folder, the name of a folder in models/, or a Hub id, which is "
        "converted into models/ once (default: t5-11b with t5-small where models/ has both, "
        "otherwise the bundled pair)",
    )
    group.add_argument(
        "--draft-model",
        "--draft-model-name",
        metavar="NAME",
        help="the draft, named likewise; lookup: copy from the source, without a second model; "
        "NAME+lookup: both; none: regular decoding (default: the one that belongs to the target, "
        "if there is one)",
    )
    group.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="compute in this type (default: the folder's; float32 where there is no GPU)",
    )


def add_speculation(group: argparse._ArgumentGroup, without: str) -> None:
    """Adds --num-draft and --delta.

    Args:
        group: what to add them to.
        without: how this command line is told to decode without a draft.
    """
    gamma = number(
        lambda text: text if text == "auto" else int(text),
        lambda n: n == "auto" or n >= 1,
        f"a whole number of at least 1 or auto (or {without} for no draft)",
    )
    group.add_argument(
        "--num-draft",
        type=gamma,
        default=5,
        metavar="N",
        help="tokens the draft proposes at a time; auto: as many as pay at the moment "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--delta",
        type=number(float, lambda x: 0 <= x <= 1, "a number from 0 to 1"),
        default=0.0,
        metavar="D",
        help="leniency: 0 gives the target's own output, 1 keeps whatever the draft proposes "
        "(default: %(default)s)",
    )


def load_decoder(
    chosen: Pair, dtype: str | None, num_draft: int | str, delta: float = 0.0
) -> SpeculativeDecoder:
    """Loads the models of a pair; warns before, on standard error, if they will not fit.

    Args:
        chosen: which models, from `pair.choose`.
        dtype: compute in this type; None keeps the folder's.
        num_draft: tokens proposed a step, or "auto".
        delta: leniency, 0 to 1.

    Raises:
        UserError: a model cannot be read, or the two do not fit each other.
    """
    from backend import UserError
    from decoder import SpeculativeDecoder
    from drafters import DraftModel
    from memory import warning
    from model import load
    from source_copy import CopyOrDraft, SourceCopy

    with contextlib.suppress(UserError):  # whatever is wrong with a folder, `load` says it best
        large = warning([folder for folder in (chosen.target, chosen.draft) if folder], dtype)
        if large:
            print(f"warning: {large}", file=sys.stderr, flush=True)
    model, tokenizer = load(chosen.target, dtype)
    draft, draft_tokenizer = load(chosen.draft, dtype) if chosen.draft else (None, None)
    if chosen.lookup:
        copy = SourceCopy(tokenizer)
        draft = CopyOrDraft(copy, DraftModel(draft, model)) if draft else copy
    return SpeculativeDecoder(
        model, draft, tokenizer, num_draft, delta, draft_tokenizer=draft_tokenizer
    )

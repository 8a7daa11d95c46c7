"""`peers`: transformers and CTranslate2 on the same weights and prompts, in the same run.

Libraries' threads go on spinning for a while after their work is done, each library's for about
0.1 s, and would slow down whoever comes next on the same cores. So turns have several prompts each,
and a pause goes before each of them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import options, report, workload
from benchmarks.extras import needed
from benchmarks.figures import Tokens, differing
from benchmarks.peer_systems import CTranslate2, Decode, Transformers, hugging_face_folder
from benchmarks.subject import DRAFT, REGULAR, Subject, begin, decoding
from benchmarks.timing import Timed, speed_up, take_turns
from convert import convert
from mlx_t5.backend import mx
from mlx_t5.cli.arguments import add_number, at_least, between
from mlx_t5.cli.models import locate
from mlx_t5.errors import UserError
from mlx_t5.requests import AUTO

GREEDY = "transformers greedy"
ASSISTED = "transformers assisted"
CT2 = "CTranslate2 greedy"
PACKAGES = ("torch", "transformers", "ctranslate2")

COLUMNS: report.Columns = {
    **report.WAY,
    **report.SPEED,
    f"over {GREEDY}": lambda row: str(row["over_transformers"]),
    **report.TEXTS,
    "device": lambda row: row["device"],
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    options.add_models(parser)
    options.add_prompts(parser, 16, "mixed")
    options.add_num_draft(parser, [5, AUTO], "ours and, if a number, assisted generation's")
    what = "prompts that each system does before the next one's turn"
    add_number(parser, "--turn", type=at_least(1), default=4, help=what)
    what = "seconds before each turn, until other threads rest"
    add_number(parser, "--pause", type=between(0, 60), default=0.15, help=what)
    options.add_measuring(parser, 3)


def run(args: argparse.Namespace, command: str) -> int:
    """Measures and prints; exit status 1 if our own texts differ in float32."""
    needed("torch")
    prompts = workload.chosen(args.task, args.prompts, args.count)
    subject, facts = begin(args, command, PACKAGES)
    dtype = facts["dtype"]
    ids = [subject.tokenizer.encode(prompt) for prompt in prompts.prompts]
    with tempfile.TemporaryDirectory() as scratch:
        systems, missing = every_system(subject, dtype, args, Path(scratch))
        timed = measure(systems, ids, args)
    rows = summarise(timed, {name: device for name, (_, device) in systems.items()})
    print(f"\n{report.markdown(COLUMNS, rows)}\n\n{remarks(rows, dtype, missing)}")
    record = {"command": command, "environment": facts, "rows": rows, "left_out": missing}
    report.write_json(args.json, record)
    ours = [row for row in rows if row["ours"]]
    return int(any(row["different"] for row in ours) and dtype == "float32")


def every_system(
    subject: Subject, dtype: str, args: argparse.Namespace, scratch: Path
) -> tuple[dict[str, tuple[Decode, str]], dict[str, str]]:
    """Sets up every system that can be had.

    Returns:
        By name what decodes one prompt and on which device, and by name why another is missing.
    """
    here = report.environment(dtype)["device"]
    systems = {
        name: (own(decoder, args.max_tokens), here) for name, decoder in ours(subject, args).items()
    }
    missing: dict[str, str] = {}
    torch = torch_device()
    folder = hugging_face_folder(locate(args.model, convert), scratch / "target")
    small = hugging_face_folder(locate(args.draft_model, convert), scratch / "draft")
    threads = report.threads()
    target, draft = (Transformers(each, dtype, torch, threads) for each in (folder, small))
    draft.widen(subject.target.config.vocab_size)
    systems[GREEDY] = (target.greedy(args.max_tokens), torch)
    systems[ASSISTED] = (target.assisted(draft, args.max_tokens, None), torch)
    for n in args.num_draft:
        if n != AUTO:
            systems[f"{ASSISTED} {n}"] = (target.assisted(draft, args.max_tokens, n), torch)
    device = "cuda" if torch == "cuda" else "cpu"
    try:
        other = CTranslate2(folder, dtype, device, threads, scratch / "ctranslate2")
        systems[CT2] = (other.greedy(args.max_tokens), device)
    except Exception as error:  # whatever another library raises must not end our run
        missing[CT2] = _reason(error)
    return without_failures(systems, subject, missing), missing


def without_failures(
    systems: dict[str, tuple[Decode, str]], subject: Subject, missing: dict[str, str]
) -> dict[str, tuple[Decode, str]]:
    """The systems that can decode a short prompt; why the others cannot is added to `missing`.

    Some releases of transformers fail at certain models, such as those with more layers in the
    decoder than in the encoder. Our own failures are not caught.
    """
    probe, working = subject.tokenizer.encode("a"), {}
    for name, (decode, device) in systems.items():
        if name != REGULAR and not name.startswith(f"{DRAFT} "):
            try:
                decode(probe)
            except Exception as error:
                missing[name] = _reason(error)
                continue
        working[name] = (decode, device)
    return working


def ours(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    """Our own decoders, by name."""
    decoders = {REGULAR: subject.regular()}
    for n in args.num_draft:
        decoders[f"{DRAFT} {n}"] = subject.speculative(DRAFT, n)
    for decoder in decoders.values():
        decoder.tokenizer = None  # ids to ids, as the others do
    return decoders


def own(decoder: Any, max_tokens: int) -> Decode:
    """One of our decoders in the form of the others."""

    def decode(ids: Sequence[int]) -> list[int]:
        return decoding(decoder, [[list(ids)]], 1, max_tokens=max_tokens)(0)[0].tokens

    return decode


def torch_device() -> str:
    """The device that MLX computes on, by torch's name, as far as torch can."""
    torch = needed("torch")
    if mx.default_device().type == mx.cpu:
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if sys.platform == "darwin" and torch.backends.mps.is_available() else "cpu"


def measure(
    systems: dict[str, tuple[Decode, str]], ids: Sequence[list[int]], args: argparse.Namespace
) -> dict[str, Timed]:
    """Lets all systems take turns; outcomes are the tokens of each prompt of a turn."""
    turns = workload.cut(ids, args.turn)

    def taking(decode: Decode) -> Callable[[int], Tokens]:
        return lambda turn: [decode(prompt) for prompt in turns[turn]]

    ways = {name: taking(decode) for name, (decode, _) in systems.items()}
    return take_turns(
        ways,
        len(turns),
        args.repeats,
        lambda outcome: sum(len(tokens) + 1 for tokens in outcome),  # and the end token
        before=lambda: time.sleep(args.pause),
    )


def summarise(timed: dict[str, Timed], devices: dict[str, str]) -> list[dict]:
    """The figures of every system; the fastest first."""
    regular, transformers = timed[REGULAR], timed.get(GREEDY)
    rows = [
        {
            "way": way,
            "speed_up": speed_up(regular, each),
            "over_transformers": speed_up(transformers, each) if transformers else "",
            "tokens_per_second": 1 / each.seconds_a_token(),
            "different": differing(each.outcomes, regular.outcomes),
            "device": devices[way],
            "ours": way == REGULAR or way.startswith(f"{DRAFT} "),
            "seconds": each.seconds,
            "tokens": each.outcomes[-1],
        }
        for way, each in timed.items()
    ]
    return sorted(rows, key=lambda row: -row["tokens_per_second"])


def remarks(rows: Sequence[dict], dtype: str, missing: dict[str, str]) -> str:
    """What has to be known to read the table."""
    lines = [
        "regular and draft are this project's. Speed-ups are of tokens a second, encoding "
        "included, over regular. Texts: whether the tokens of all prompts are those of regular.",
    ]
    different = [row["way"] for row in rows if row["different"]]
    if different and dtype == "float32":
        lines.append(f"Equal texts are to be expected in float32; not so: {', '.join(different)}.")
    elif different:
        lines.append(f"In {dtype} the two best tokens may be equal to within rounding.")
    lines += [f"left out: {name} ({reason})" for name, reason in missing.items()]
    return "\n".join(lines)


def _reason(error: Exception) -> str:
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return kind + (str(error).strip().split("\n")[0] or "no message")

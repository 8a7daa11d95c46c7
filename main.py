"""Command line: prompts in, text and statistics out.

    python main.py                                         # the default prompt, the bundled pair
    python main.py --prompt "fix grammar: She have two cat."
    python main.py --model t5-11b --draft-model t5-small --input-file prompts.txt

Generated text goes to standard output and everything else to standard error. Exit status: 0 done,
2 bad input (one line `error: …`), 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from mlx_t5.cli.arguments import (
    Parser,
    add_models,
    add_speculation,
    not_installed,
    number,
    open_streams,
)
from mlx_t5.cli.input import Lines, read_prompts
from mlx_t5.cli.output import Painter, Results, Totals, check_output
from mlx_t5.errors import UserError
from mlx_t5.ranges import RANGES

if TYPE_CHECKING:
    from decoder import SpeculativeDecoder
    from mlx_t5.requests import Result

T = TypeVar("T")
DEFAULT_PROMPT = (
    "translate English to French: Let's go to the store and buy some groceries including eggs, "
    "avocadoes, and bread."
)
# Options that the decoder takes by the same name.
DECODING = (
    *("max_tokens", "temp", "top_k", "top_p", "seed", "stop"),
    *("repetition_penalty", "no_repeat_ngram_size", "min_tokens"),
)
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
PIPE_CLOSED = 141  # 128 + SIGPIPE


def build_parser() -> Parser:
    """All options of the command line."""
    parser = Parser(
        prog="main.py",
        description="Run a T5 model several tokens at a time: a small draft model proposes, the "
        "target model checks. Without options: the bundled pair translates a sentence.",
        allow_abbrev=False,  # so that a script's options mean tomorrow what they mean today
    )
    add_models(parser.add_argument_group("models"))
    _prompt_options(parser.add_argument_group("prompts and results"))
    _decoding_options(parser.add_argument_group("decoding"))
    return parser


def _prompt_options(group: argparse._ArgumentGroup) -> None:
    prompts = group.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="what to work on; may be given several times; - reads standard input as one prompt",
    )
    prompts.add_argument(
        "--input-file",
        metavar="FILE",
        help='one prompt a line, or {"prompt": …} a line if the name ends in .jsonl; - reads '
        "standard input, one prompt a line; lines are UTF-8 and end with LF, CRLF or CR",
    )
    group.add_argument(
        "--output-file",
        metavar="FILE",
        help="write results here, in input order: one text a line, or the objects of --json if "
        "the name ends in .jsonl",
    )
    group.add_argument(
        "--json", action="store_true", help="one JSON object a prompt, with tokens and statistics"
    )
    group.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="colour each token by who wrote it (brackets instead of colours if NO_COLOR is set)",
    )


def _decoding_options(group: argparse._ArgumentGroup) -> None:
    count = number(int, lambda n: n >= 1, "a whole number of at least 1")
    natural = number(int, lambda n: n >= 0, "a whole number of at least 0")
    temp = number(float, RANGES["temp"].holds, RANGES["temp"].expected)
    seed = number(int, RANGES["seed"].holds, RANGES["seed"].expected)
    top_p = number(float, lambda p: 0 < p <= 1, "a number above 0 and up to 1")

    def add(*names: str, type: Callable, default: float, help: str) -> None:
        metavar = names[-1].lstrip("-").replace("-", "_").upper()[0]
        group.add_argument(
            *names, type=type, default=default, metavar=metavar, help=f"{help} (default: {default})"
        )

    add_speculation(group, without="--regular-decode")
    add("--temp", type=temp, default=0.0, help="temperature of sampling; 0 decodes greedily")
    add("--top-k", type=natural, default=0, help="sample from the k likeliest tokens; 0: all")
    add("--top-p", type=top_p, default=1.0, help="sample from the likeliest tokens of this mass")
    add("--seed", type=seed, default=0, help="of sampling; the same seed, the same text")
    add("-m", "--max-tokens", type=count, default=256, help="end a text after so many tokens")
    add("--batch-size", type=count, default=8, help="prompts decoded at the same time")
    add("--num-samples", type=count, default=1, help="texts a prompt; needs --temp above 0")
    _rule_options(group, add)
    group.add_argument(
        "--regular-decode",
        action="store_true",
        help="the target alone, one token at a time, to compare with",
    )


def _rule_options(group: argparse._ArgumentGroup, add: Callable) -> None:
    natural = number(int, lambda n: n >= 0, "a whole number of at least 0")
    penalty = number(
        float, RANGES["repetition_penalty"].holds, RANGES["repetition_penalty"].expected
    )
    add(
        "--repetition-penalty",
        type=penalty,
        default=1.0,
        help="above 1 makes tokens that the text already has less likely; 1: off",
    )
    add(
        "--no-repeat-ngram-size",
        type=natural,
        default=0,
        help="write no run of so many tokens twice; 0: off",
    )
    add("--min-tokens", type=natural, default=0, help="no end before so many tokens; 0: off")
    group.add_argument(
        "--stop",
        action="append",
        type=_stop_string,
        default=[],
        metavar="STRING",
        help="end a text before this string; may be given several times",
    )


def _stop_string(text: str) -> str:
    """An argparse type: text that can be searched for."""
    if not text:
        raise argparse.ArgumentTypeError("give at least one character")
    return text


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the program's name; None takes the process's own.

    Returns:
        The exit status.
    """
    closed = sys.stdout is None
    open_streams()
    parser = build_parser()
    args = parser.parse_args(argv)
    if closed and not args.output_file:
        parser.error("standard output is closed; name an --output-file")
    if args.num_samples > 1 and args.temp == 0:
        parser.error("--num-samples: greedy samples would be equal; set --temp above 0")
    try:
        if args.input_file:
            prompts = Lines(args.input_file)
            count = prompts.count
        else:
            prompts = read_prompts(args.prompt or [DEFAULT_PROMPT])
            count = len(prompts)
        if args.output_file:
            check_output(args.output_file, args.input_file)
        return _run(args, prompts, count)
    except KeyboardInterrupt:
        _tell("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # whoever reads our output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except ImportError as error:
        parser.error(not_installed(error))
    except (UserError, OSError) as error:
        parser.error(str(error))


def _run(args: argparse.Namespace, prompts: list[str] | Lines, count: int | None) -> int:
    decoder = _load(args)
    if args.prompt is None and args.input_file is None:
        _tell(f"prompt: {DEFAULT_PROMPT}")
    painter = Painter(bool(os.environ.get("NO_COLOR"))) if args.verbose else None
    if painter:
        _tell(painter.legend)
    settings = {name: getattr(args, name) for name in DECODING}
    if count == args.num_samples == 1 and not (
        args.input_file or args.output_file or args.json
    ):
        return _stream(decoder, prompts[0], settings, painter)
    return _write_all(decoder, prompts, count, settings, painter, args)


def _load(args: argparse.Namespace) -> SpeculativeDecoder:
    # Not before: `--help` and a mistake in an option need not wait for MLX.
    from convert import convert
    from decoder import SpeculativeDecoder
    from mlx_t5.backend import device_name
    from mlx_t5.cli import models
    from model import load

    chosen = models.choose(args.model, args.draft_model, convert, args.regular_decode)
    target, drafter, tokenizer, other = models.load_pair(chosen, args.dtype, load)
    decoder = SpeculativeDecoder(
        target, drafter, tokenizer, args.num_draft, args.delta, draft_tokenizer=other
    )
    _tell(chosen.note)  # only now: an error is to be the only line on standard error
    if args.verbose:
        _tell(f"on {device_name()}")
    return decoder


def _stream(
    decoder: SpeculativeDecoder, prompt: str, settings: dict, painter: Painter | None
) -> int:
    """Show one text while it is generated."""
    status, stats = 0, None
    with contextlib.closing(decoder.stream(prompt, **settings)) as chunks:
        try:
            for chunk in chunks:
                stats, text = chunk.stats, chunk.text
                if painter:
                    rest = text[sum(map(len, chunk.pieces)) :]
                    text = painter.paint(chunk.pieces, chunk.writers, rest)
                print(text, end="", flush=True)
        except KeyboardInterrupt:
            status = INTERRUPTED
    print(flush=True)
    if stats:
        done = "interrupted: " if status else ""
        totals = Totals()
        totals.add(stats)
        _tell(done + totals.summary(stats.decode_seconds))
    return status


def _write_all(
    decoder: SpeculativeDecoder,
    prompts: list[str] | Lines,
    count: int | None,
    settings: dict,
    painter: Painter | None,
    args: argparse.Namespace,
) -> int:
    """Write every text, in order, as soon as it and all before it are finished."""
    from tqdm import tqdm

    from mlx_t5.text.detokenizer import StreamingDetokenizer

    def paint(result: Result) -> str:
        return painter.line(result, StreamingDetokenizer(decoder.tokenizer))

    as_json = args.json or (args.output_file or "").endswith(".jsonl")
    # In a terminal a bar would run through the texts; tqdm knows where there is none to show it in.
    hidden = True if painter or (not args.output_file and sys.stdout.isatty()) else None
    total = count and count * args.num_samples
    unit = "prompts" if args.num_samples == 1 else "texts"
    began, totals, status = time.perf_counter(), Totals(), 0
    with (
        Results(args.output_file, as_json, paint if painter else None) as output,
        tqdm(total=total, unit=" " + unit, disable=hidden) as bar,
    ):
        try:
            in_hand: deque[tuple[int, str | UserError]] = deque()
            results = decoder.results(
                _noted(prompts, in_hand),
                batch_size=args.batch_size,
                num_samples=args.num_samples,
                ready=prompts.ready if isinstance(prompts, Lines) else lambda: True,
                **settings,
            )
            began = time.perf_counter()  # what --num-draft auto measures first is no decoding
            for result in results:
                status = max(status, _write(output, *in_hand[0], result))
                totals.add(result.stats)
                if totals.results % args.num_samples == 0:
                    in_hand.popleft()
                bar.update()
        except KeyboardInterrupt:
            status = INTERRUPTED
    of_all = f" of {total}" if total else ""
    done = f"interrupted: {totals.results}{of_all} {unit} done · " if status == INTERRUPTED else ""
    _tell(done + totals.summary(time.perf_counter() - began, unit))
    return status


def _noted(prompts: Iterable[T], in_hand: deque[tuple[int, T]]) -> Iterator[T]:
    """Prompts, which are put into `in_hand` with their numbers as they are drawn."""
    for n, prompt in enumerate(prompts, 1):
        in_hand.append((n, prompt))
        yield prompt


def _write(
    output: Results, n: int, prompt: str | UserError, result: Result
) -> int:
    """Write one result, and its error if it has one; returns the exit status that it asks for."""
    unread = isinstance(prompt, UserError)
    output.write("" if unread else prompt, result)
    if not result.error:
        return 0
    _tell("error: " + ("" if unread else f"prompt {n}: ") + result.error)
    return 2


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

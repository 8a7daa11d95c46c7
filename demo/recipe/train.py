"""Trains the demonstration pair on text that the grammar generates.

    python -m demo.recipe.train --stage tokenizer
    python -m demo.recipe.train --stage target
    python -m demo.recipe.train --stage draft

Every stage resumes from its last checkpoint under --work-dir. Fresh examples are drawn chunk by
chunk, chunk i from seed and i alone, so nothing is seen twice and a resumed run continues the
same stream. The finished folders are --work-dir/target and --work-dir/draft.
"""

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import distributed, multiprocessing
from transformers import AutoTokenizer

from demo.recipe import distill, learning
from demo.recipe.learning import Trainer, TrainingConfig
from demo.recipe.tokenizer import train as train_tokenizer

FOLDER = Path(__file__).resolve().parent
CONFIGS = {
    "target": TrainingConfig(256, 1024, 4, 3, 3, examples=450_000, batch=64, relative_rate=1.5e-2),
    "draft": TrainingConfig(
        96, 256, 2, 2, 1, examples=160_000, batch=96, relative_rate=3e-2, warmup_steps=100
    ),
}
CHECK_EVERY = 3  # chunks


def train_target(args: argparse.Namespace, config: TrainingConfig) -> None:
    """Trains the large model and writes work/target."""
    tokenizer = AutoTokenizer.from_pretrained(args.work_dir / "tokenizer")
    torch.manual_seed(args.seed)
    trainer = Trainer("target", config, learning.make_model(config, len(tokenizer)), args.work_dir)
    describe(trainer)
    while not trainer.done:
        rows = learning.chunk_rows(tokenizer, args.seed, trainer.chunk)
        batches = learning.shared_batches(rows, config.batch, f"order {args.seed} {trainer.chunk}")
        trainer.run_chunk(learning.token_loss(trainer.model, batch) for batch in batches)
        if learning.rank() == 0 and (trainer.chunk % CHECK_EVERY == 0 or trainer.done):
            matches = learning.exact_match(trainer.model, tokenizer, args.check)
            print(f"target: {trainer.seconds:.0f} s, held-out exact match {matches}", flush=True)
            learning.export(trainer.model, args.work_dir / "tokenizer", args.work_dir / "target")


def train_draft(args: argparse.Namespace, config: TrainingConfig) -> None:
    """Distils work/target into work/draft."""
    tokenizer = AutoTokenizer.from_pretrained(args.work_dir / "tokenizer")
    target = distill.load_target(args.work_dir / "target")
    torch.manual_seed(args.seed)
    trainer = Trainer("draft", config, learning.make_model(config, len(tokenizer)), args.work_dir)
    describe(trainer)
    pool = distill.answers(target, tokenizer, args.seed, args.work_dir / "answers.pt")
    check = distill.held_out_answers(target, tokenizer, args.check)
    while not trainer.done:
        rows = distill.portion(pool, trainer.chunk)
        batches = learning.shared_batches(rows, config.batch, f"draft {args.seed} {trainer.chunk}")
        trainer.run_chunk(
            distill.distillation_loss(trainer.model, target, batch) for batch in batches
        )
        if learning.rank() == 0:
            rate = distill.acceptance(trainer.model, check)
            print(f"draft: {trainer.seconds:.0f} s, held-out acceptance {rate:.3f}", flush=True)
            learning.export(trainer.model, args.work_dir / "tokenizer", args.work_dir / "draft")


def describe(trainer: Trainer) -> None:
    """Prints what is being trained."""
    if learning.rank() == 0:
        print(
            f"{trainer.name}: {trainer.model.num_parameters():,} parameters, "
            f"{asdict(trainer.config)}",
            flush=True,
        )


def worker(index: int, args: argparse.Namespace, config: TrainingConfig) -> None:
    """Runs one of the processes that share the batches."""
    torch.set_num_threads(args.threads)
    if args.processes > 1:
        store = f"file://{args.work_dir.resolve()}/rendezvous {args.stage}"
        distributed.init_process_group(
            "gloo", init_method=store, rank=index, world_size=args.processes
        )
    {"target": train_target, "draft": train_draft}[args.stage](args, config)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--stage", choices=("tokenizer", "target", "draft"), required=True)
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=FOLDER / "work",
        help="checkpoints and results (default: demo/recipe/work)",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--examples", type=int, help="length of the run (default: the one it was trained with)"
    )
    parser.add_argument(
        "--check", type=int, default=300, help="held-out prompts per check and task"
    )
    parser.add_argument("--processes", type=int, default=2, help="each takes a part of a batch")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    args = arguments(argv)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    if args.stage == "tokenizer":
        train_tokenizer(args.work_dir / "tokenizer", args.seed)
        return 0
    config = CONFIGS[args.stage]
    if args.examples:
        config = replace(config, examples=args.examples)
    if args.processes > 1:
        (args.work_dir / f"rendezvous {args.stage}").unlink(missing_ok=True)
        multiprocessing.spawn(worker, (args, config), nprocs=args.processes)
    else:
        worker(0, args, config)
    return 0


if __name__ == "__main__":
    sys.exit(main())

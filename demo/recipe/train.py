"""Trains the demonstration pair on text that the grammar generates.

    python -m demo.recipe.train --stage tokenizer
    python -m demo.recipe.train --stage target
    python -m demo.recipe.train --stage draft

Every stage resumes from its last checkpoint under --work-dir. The target's examples are drawn chunk
by chunk, chunk i from seed and i alone, so nothing is seen twice and a resumed run continues the
same stream. The draft is the work of the project's own `distill.py`; this makes its prompts and the
random model that it starts from. The finished folders are --work-dir/target and --work-dir/draft.
"""

import argparse
import sys
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import distributed, multiprocessing
from transformers import AutoTokenizer, T5ForConditionalGeneration

import distill
from demo.recipe import corpus, learning
from demo.recipe.learning import Shape, Trainer, TrainingConfig
from demo.recipe.tokenizer import train as train_tokenizer
from mlx_t5.network.config import T5Config
from mlx_t5.network.weights import read_config, tensor_names

FOLDER = Path(__file__).resolve().parent
TARGET = TrainingConfig(
    Shape(d_model=256, d_ff=1024, num_heads=4, num_layers=3, num_decoder_layers=3),
    examples=450_000,
    batch=64,
    relative_rate=1.5e-2,
)
DRAFT = Shape(d_model=96, d_ff=256, num_heads=2, num_layers=2, num_decoder_layers=1)
DRAFT_CHUNKS = (10_000, 10_001)  # of prompts, which the target has not learned from
DRAFT_OPTIONS = ("--iters", "2000", "--batch-size", "96", "--steps-per-eval", "200")
CHECK_EVERY = 3  # chunks


def train_target(args: argparse.Namespace, config: TrainingConfig) -> None:
    """Trains the large model and writes work/target."""
    tokenizer = AutoTokenizer.from_pretrained(args.work_dir / "tokenizer")
    torch.manual_seed(args.seed)
    trainer = Trainer(
        "target", config, learning.make_model(config.shape, len(tokenizer)), args.work_dir
    )
    describe(trainer)
    while not trainer.done:
        rows = learning.chunk_rows(tokenizer, args.seed, trainer.chunk)
        batches = learning.shared_batches(rows, config.batch, f"order {args.seed} {trainer.chunk}")
        trainer.run_chunk(learning.token_loss(trainer.model, batch) for batch in batches)
        if learning.rank() == 0 and (trainer.chunk % CHECK_EVERY == 0 or trainer.done):
            matches = learning.exact_match(trainer.model, tokenizer, args.check)
            print(f"target: {trainer.seconds:.0f} s, held-out exact match {matches}", flush=True)
            learning.export(trainer.model, args.work_dir / "tokenizer", args.work_dir / "target")


def train_draft(args: argparse.Namespace) -> int:
    """Distils work/target into work/draft; returns the exit status of `distill.py`."""
    work = args.work_dir
    prompts, start, found = work / "prompts.txt", work / "draft-start", work / "draft-found"
    if not start.exists():
        streams = (corpus.examples(f"train {args.seed} {chunk}") for chunk in DRAFT_CHUNKS)
        drawn = (example for stream in streams for example in islice(stream, learning.CHUNK))
        prompts.write_text("".join(f"{example.source}\n" for example in drawn), encoding="utf-8")
        tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
        torch.manual_seed(args.seed)
        learning.export(learning.make_model(DRAFT, len(tokenizer)), work / "tokenizer", start)
    if not found.exists():
        names = {"--model": work / "target", "--draft-model": start, "--data": prompts}
        options = [str(part) for pair in names.items() for part in pair]
        options += ["--output", str(found), "--seed", str(args.seed), *DRAFT_OPTIONS, "--resume"]
        if status := distill.main(options):
            return status
    learning.export(hugging_face_model(found, start), work / "tokenizer", work / "draft")
    return 0


def hugging_face_model(found: Path, like: Path) -> T5ForConditionalGeneration:
    """The model of an MLX folder that `distill.py` wrote, which began as that of `like`."""
    model = T5ForConditionalGeneration.from_pretrained(like)
    weights = load_file(found / "model.safetensors")
    with torch.no_grad():
        for theirs, ours in tensor_names(T5Config.from_dict(read_config(found))).items():
            if ours in weights:
                model.get_parameter(theirs).copy_(weights.pop(ours))
    assert not weights, "all tensors have a place"
    return model


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
    train_target(args, config)


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
    if args.stage == "draft":
        return train_draft(args)
    config = replace(TARGET, examples=args.examples) if args.examples else TARGET
    if args.processes > 1:
        (args.work_dir / f"rendezvous {args.stage}").unlink(missing_ok=True)
        multiprocessing.spawn(worker, (args, config), nprocs=args.processes)
    else:
        worker(0, args, config)
    return 0


if __name__ == "__main__":
    sys.exit(main())

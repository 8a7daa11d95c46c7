"""Distils the target into the draft, and measures how much of it the target accepts.

The draft learns the target's greedy outputs (Kim and Rush, arXiv 1606.07947) and its distribution
at every token of them (Hinton et al., arXiv 1503.02531), half and half.
"""

import itertools
import time
from pathlib import Path

import torch
from torch import distributed
from torch.nn import functional
from transformers import PreTrainedTokenizerBase, T5ForConditionalGeneration

from demo.recipe import corpus, learning
from demo.recipe.learning import CHUNK, IGNORED, Batch, Rows

POOL_CHUNKS = 2
GENERATION_BATCH = 192


def load_target(folder: Path) -> T5ForConditionalGeneration:
    """The finished target, in float32, as the draft's users will run it."""
    target = T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    target.set_attn_implementation("eager")
    return target.eval().requires_grad_(False)


def answers(
    target: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, seed: int, path: Path
) -> Rows:
    """Prompts with the target's greedy answers, kept in `path`; each process makes a part."""
    own = path.with_suffix(f".{learning.rank()}.pt")
    if not own.exists():
        rows: Rows = []
        for chunk in range(POOL_CHUNKS):
            rows += learning.chunk_rows(tokenizer, seed, 10_000 + chunk)
        torch.save(_answer(target, rows[learning.rank() :: learning.world()]), own)
    if distributed.is_initialized():
        distributed.barrier()
    pool: Rows = []
    for rank in range(learning.world()):
        pool += torch.load(path.with_suffix(f".{rank}.pt"))
    return pool


def _answer(target: T5ForConditionalGeneration, rows: Rows) -> Rows:
    rows = sorted(rows, key=lambda row: len(row[1]))
    start, done = time.monotonic(), []
    for i in range(0, len(rows), GENERATION_BATCH):
        part = rows[i : i + GENERATION_BATCH]
        limit = max(len(t) for _, t in part) + 8
        outputs = learning.greedy(target, learning.pad([s for s, _ in part], 0), limit)
        target.eval()
        done += [(s, out) for (s, _), out in zip(part, outputs, strict=True) if out[-1] == 1]
        if i // GENERATION_BATCH % 20 == 0 and learning.rank() == 0:
            print(
                f"answers: {len(done)}/{len(rows)}, "
                f"{len(done) / (time.monotonic() - start):.0f} examples/s",
                flush=True,
            )
    return done


def held_out_answers(
    target: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, count: int
) -> Rows:
    """The target's greedy answers to held-out prompts of both tasks."""
    stream = corpus.examples("acceptance", held_out=True, translated=0.5)
    return _answer(target, learning.encode(tokenizer, list(itertools.islice(stream, count))))


def portion(pool: Rows, chunk: int) -> Rows:
    """The rows of one chunk, starting over where the pool ends."""
    start = chunk * CHUNK % len(pool)
    return (pool[start:] + pool[:start])[:CHUNK]


def distillation_loss(
    draft: T5ForConditionalGeneration, target: T5ForConditionalGeneration, batch: Batch
) -> torch.Tensor:
    """Half cross entropy with the greedy tokens, half with the target's distribution."""
    real = batch.target != IGNORED
    arguments = {"input_ids": batch.source, "attention_mask": batch.mask, "labels": batch.target}
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            teacher = target(**arguments).logits
        logits = draft(**arguments).logits
    log_q = functional.log_softmax(logits[real].float(), dim=-1)
    p = functional.softmax(teacher[real].float(), dim=-1)
    hard = functional.nll_loss(log_q, batch.target[real])
    soft = -(p * log_q).sum(-1).mean()
    return (hard + soft) / 2


@torch.no_grad()
def acceptance(draft: T5ForConditionalGeneration, rows: Rows, gamma: int = 5) -> float:
    """Accepted / drafted tokens of greedy speculative decoding.

    One pass is enough: a proposal counts only while all before it were accepted, so it always
    follows the target's own tokens.
    """
    draft.eval()
    accepted = drafted = 0
    for i in range(0, len(rows), GENERATION_BATCH):
        batch = learning.to_batch(rows[i : i + GENERATION_BATCH])
        best = draft(
            input_ids=batch.source, attention_mask=batch.mask, labels=batch.target
        ).logits.argmax(-1)
        for hits, (_, answer) in zip(
            (best == batch.target).tolist(), rows[i : i + GENERATION_BATCH], strict=True
        ):
            kept, tried = count_accepted(hits[: len(answer)], gamma)
            accepted, drafted = accepted + kept, drafted + tried
    draft.train()
    return accepted / drafted


def count_accepted(hits: list[bool], gamma: int) -> tuple[int, int]:
    """(accepted, drafted) tokens of one answer; hits[i]: would the draft have proposed token i?"""
    accepted = drafted = position = 0
    while position < len(hits):
        tried = min(gamma, len(hits) - position)
        kept = next((k for k in range(tried) if not hits[position + k]), tried)
        accepted, drafted, position = accepted + kept, drafted + tried, position + kept + 1
    return accepted, drafted

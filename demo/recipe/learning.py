"""How the target is trained: batches, the trainer and its checkpoints, export."""

import itertools
import math
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import distributed
from torch.nn import functional
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    T5Config,
    T5ForConditionalGeneration,
)

from demo.recipe import corpus
from demo.recipe.tokenizer import FILES

CHUNK = 16_384
IGNORED = -100
LARGEST_RATE, NORM_RATE = 1e-2, 1e-3
Rows = list[tuple[list[int], list[int]]]  # token ids of sources and targets


@dataclass(frozen=True)
class Shape:
    """The size of a model."""

    d_model: int
    d_ff: int
    num_heads: int
    num_layers: int
    num_decoder_layers: int


@dataclass(frozen=True)
class TrainingConfig:
    """The size of a model and how it is trained, on `examples` in the whole run."""

    shape: Shape
    examples: int
    batch: int
    relative_rate: float
    warmup_steps: int = 500
    decay_share: float = 0.45  # the last part of the run, linear to zero


def make_model(shape: Shape, vocab_size: int) -> T5ForConditionalGeneration:
    """A T5 (v1.0 style: ReLU, tied and scaled embeddings) with random weights."""
    config = T5Config(
        **asdict(shape),
        vocab_size=vocab_size,
        d_kv=64,
        feed_forward_proj="relu",
        tie_word_embeddings=True,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
    )
    model = T5ForConditionalGeneration(config)
    model.set_attn_implementation("eager")  # on a CPU faster than the fused kernel's backward pass
    point_heads(model)
    return model


@torch.no_grad()
def point_heads(model: T5ForConditionalGeneration) -> None:
    """Lets some heads of each stack start out looking at the neighbouring tokens.

    To copy or translate, a decoder has to find the token after the one it has just dealt with. T5
    knows places by its relative biases only; starting near zero, they take thousands of steps to
    tell neighbours apart. Training may move these heads elsewhere.
    """
    encoder, decoder = (
        stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        for stack in (model.encoder, model.decoder)
    )
    after = encoder.shape[0] // 2 + 1  # the bucket of the next token
    for head, bucket in zip(range(encoder.shape[1]), (1, after), strict=False):
        encoder[bucket, head] = 5.0
    for head, bucket in zip(range(decoder.shape[1]), (1, 2), strict=False):
        decoder[bucket, head] = 5.0


def rate_factor(step: int, steps: int, config: TrainingConfig) -> float:
    """Warm-up, constant, then linear decay to zero."""
    warm = min(1.0, (step + 1) / config.warmup_steps)
    left = (steps - step) / max(1.0, steps * config.decay_share)
    return warm * max(0.0, min(1.0, left))


@dataclass(frozen=True)
class Batch:
    """Padded ids: source (B, S), target (B, T) with -100 as padding."""

    source: torch.Tensor
    target: torch.Tensor

    @property
    def mask(self) -> torch.Tensor:
        """True where the source is real."""
        return self.source != 0


def pad(rows: list[list[int]], value: int) -> torch.Tensor:
    """Rows of ids as one (B, longest) tensor."""
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def to_batch(rows: Rows) -> Batch:
    """Pairs of ids as a batch."""
    return Batch(pad([s for s, _ in rows], 0), pad([t for _, t in rows], IGNORED))


def encode(tokenizer: PreTrainedTokenizerBase, examples: list[corpus.Example]) -> Rows:
    """Token ids with EOS of each side."""
    sources = tokenizer([e.source for e in examples]).input_ids
    targets = tokenizer([e.target for e in examples]).input_ids
    return list(zip(sources, targets, strict=True))


def bucketed(rows: Rows, size: int, seed: str) -> list[Rows]:
    """Batches of rows of like length, in random order."""
    rng = random.Random(seed)
    rows = sorted(rows, key=lambda row: (len(row[1]) // 3, len(row[0]), rng.random()))
    batches = [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]
    rng.shuffle(batches)
    return batches


def chunk_rows(tokenizer: PreTrainedTokenizerBase, seed: int, chunk: int) -> Rows:
    """Chunk i of the stream of training examples, as ids."""
    stream = corpus.examples(f"train {seed} {chunk}")
    return encode(tokenizer, list(itertools.islice(stream, CHUNK)))


def shared_batches(rows: Rows, size: int, seed: str) -> list[Batch]:
    """This process's part of every batch."""
    return [to_batch(batch[rank() :: world()]) for batch in bucketed(rows, size, seed)]


def rank() -> int:
    """The number of this process, from 0."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def world() -> int:
    """The number of processes."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def share_gradients(model: T5ForConditionalGeneration) -> None:
    """The mean of all processes' gradients, in one message."""
    if not distributed.is_initialized():
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    distributed.all_reduce(flat)
    flat /= world()
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def parameter_groups(model: T5ForConditionalGeneration, config: TrainingConfig) -> list[dict]:
    """Every tensor with a peak rate relative to its initial scale.

    T5 does not divide attention scores by sqrt(d_kv): its queries start eight times smaller
    instead. One rate for all would drive the attention into saturation within a few hundred steps
    and hardly move the embeddings, which start at deviation 1. Adafactor, with which T5 was
    trained, has relative rates as well (arXiv 1804.04235, section 8).
    """
    groups = []
    for name, parameter in model.named_parameters():
        scale = parameter.detach().pow(2).mean().sqrt().item()
        rate = min(config.relative_rate * scale, LARGEST_RATE)
        groups.append({"params": [parameter], "peak_rate": NORM_RATE if "norm" in name else rate})
    return groups


class Trainer:
    """One model's run: optimizer, schedule, checkpoints."""

    def __init__(
        self, name: str, config: TrainingConfig, model: T5ForConditionalGeneration, work: Path
    ) -> None:
        self.name, self.config, self.model = name, config, model.train()
        self.path = work / f"{name}.pt"
        self.optimizer = torch.optim.AdamW(
            parameter_groups(model, config),
            betas=(0.9, 0.98),
            eps=1e-9,
            weight_decay=0.01,
            fused=True,
        )
        self.chunk = self.step = 0
        self.seconds = 0.0
        if self.path.exists():
            state = torch.load(self.path, weights_only=True)
            model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.chunk, self.step, self.seconds = (state[k] for k in ("chunk", "step", "seconds"))
            print(f"{name}: resumed after {self.step} steps", flush=True)

    @property
    def steps(self) -> int:
        """The number of steps of the whole run."""
        per_chunk = CHUNK // self.config.batch
        return math.ceil(self.config.examples / CHUNK) * per_chunk

    @property
    def done(self) -> bool:
        """True when the schedule has reached its end."""
        return self.step >= self.steps

    def save(self) -> None:
        """Writes the checkpoint atomically."""
        if rank() != 0:
            return
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "chunk": self.chunk,
            "step": self.step,
            "seconds": self.seconds,
        }
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.path)

    def update(self, loss: torch.Tensor) -> None:
        """Takes one optimizer step."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        share_gradients(self.model)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        factor = rate_factor(self.step, self.steps, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_rate"] * factor
        self.optimizer.step()
        self.step += 1

    def run_chunk(self, losses: Iterator[torch.Tensor]) -> None:
        """Trains on the losses of one chunk of batches and reports."""
        start, total, count = time.monotonic(), 0.0, 0
        for loss in losses:
            self.update(loss)
            total, count = total + loss.item(), count + 1
            if count % 40 == 0 and rank() == 0:
                speed = count * self.config.batch / (time.monotonic() - start)
                print(
                    f"{self.name} step {self.step}/{self.steps} loss {total / count:.4f} "
                    f"{speed:.0f} examples/s",
                    flush=True,
                )
        self.chunk += 1
        self.seconds += time.monotonic() - start
        self.save()


def token_loss(model: T5ForConditionalGeneration, batch: Batch) -> torch.Tensor:
    """Cross entropy per token."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(
            input_ids=batch.source, attention_mask=batch.mask, labels=batch.target
        ).logits
    return functional.cross_entropy(
        logits.float().flatten(0, 1), batch.target.flatten(), ignore_index=IGNORED
    )


@torch.no_grad()
def greedy(model: T5ForConditionalGeneration, source: torch.Tensor, limit: int) -> list[list[int]]:
    """The model's own answers, without start token and padding, with EOS if it came."""
    model.eval()
    out = model.generate(
        input_ids=source,
        attention_mask=source != 0,
        max_new_tokens=limit,
        do_sample=False,
        num_beams=1,
    )
    model.train()
    return [_until_eos(row[1:]) for row in out.tolist()]


def _until_eos(row: list[int]) -> list[int]:
    return row[: row.index(1) + 1] if 1 in row else row


def exact_match(
    model: T5ForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    seed: str = "check",
) -> dict[str, float]:
    """The share of held-out prompts that are answered exactly, by task."""
    result = {}
    for task in corpus.SHARES:
        rows = encode(tokenizer, list(itertools.islice(corpus.held_out(task, seed), count)))
        rows.sort(key=lambda row: len(row[1]))
        right = 0
        for i in range(0, count, 100):
            part = rows[i : i + 100]
            longest = max(len(t) for _, t in part)
            answers = greedy(model, pad([s for s, _ in part], 0), longest + 4)
            right += sum(a == t for a, (_, t) in zip(answers, part, strict=True))
        result[task] = right / count
    return result


def export(model: T5ForConditionalGeneration, tokenizer_folder: Path, folder: Path) -> None:
    """Writes a Hugging Face folder with bfloat16 weights and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    copy = T5ForConditionalGeneration(model.config).to(torch.bfloat16)
    copy.load_state_dict(state)
    copy.generation_config = GenerationConfig(
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1
    )
    copy.save_pretrained(folder)
    for name in FILES:
        shutil.copy(tokenizer_folder / name, folder / name)

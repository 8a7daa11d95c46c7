"""Runs T5 in different programs, with the same weights, prompts and number of threads.

The programs are given token ids and return token ids, so that differences between tokenizers play
no part. A program's libraries are loaded only when an object of its class is made.
"""

from __future__ import annotations

import copy
import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_t5.benchmarks import machine
from mlx_t5.benchmarks.workload import DRAFT, REGULAR, cut
from mlx_t5.errors import UserError
from mlx_t5.settings import AUTO

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Ids = Sequence[Sequence[int]]  # source tokens of each prompt
# How a program warms up before each timed turn: for longer than the other programs' threads spin.
WARM_UP_SECONDS, WARM_UP_TOKENS = 0.1, 8


@dataclass
class Timing:
    """The result of decoding some prompts: tokens without start and end, and times.

    Attributes:
        decided: the number of tokens decided in all answers, end tokens included.
        first_seconds: the time for decoding one token per prompt (encoding and one pass), or None.
    """

    tokens: list[list[int]]
    decided: int
    seconds: float
    first_seconds: float | None = None

    def whole(self) -> tuple[float, int]:
        return self.seconds, self.decided

    def first(self) -> tuple[float, int]:
        return self.first_seconds or 0.0, len(self.tokens)

    def rest(self) -> tuple[float, int]:
        seconds, tokens = self.first()
        return self.seconds - seconds, self.decided - tokens


class Program(ABC):
    """A program that decodes and times itself, so that times exclude messages between processes."""

    @abstractmethod
    def describe(self) -> dict[str, Any]: ...

    @abstractmethod
    def decode(
        self, prompts: Ids, num_draft: int | str, max_tokens: int, batch_size: int, **how: float
    ) -> list[list[int]]:
        """Returns each answer's tokens; a `UserError` refuses what the program does not support."""

    def timed(self, max_tokens: int, first: bool, **keywords: Any) -> Timing:
        def clocked(max_tokens: int) -> tuple[list[list[int]], float]:
            began = time.perf_counter()
            tokens = self.decode(max_tokens=max_tokens, **keywords)
            return tokens, time.perf_counter() - began

        batch = keywords["prompts"][: keywords["batch_size"]]
        until = time.perf_counter() + WARM_UP_SECONDS
        while time.perf_counter() < until:  # at rest, its threads sleep and its caches are cold
            self.decode(max_tokens=WARM_UP_TOKENS, **keywords | {"prompts": batch})
        tokens, seconds = clocked(max_tokens)
        decided = sum(min(len(text) + 1, max_tokens) for text in tokens)
        return Timing(tokens, decided, seconds, clocked(1)[1] if first else None)


class MlxT5(Program):
    """Decodes with this project, and converts the models for the other programs."""

    def __init__(self, model: str, draft_model: str | None, dtype: str | None):
        from mlx_t5.benchmarks.subject import Subject

        self.subject = Subject.load(model, draft_model, dtype)
        self.draft = self.subject.require_draft()
        self.decoders: dict[int | str, Any] = {}

    def describe(self) -> dict[str, Any]:
        return machine.environment(machine.dtype_of(self.subject.target))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(self.subject.tokenizer.encode(text)) for text in texts]

    def folders(self, scratch: str) -> list[str]:
        """Target and draft for other programs, converted in `scratch` if needed."""
        from mlx_t5.checkpoints.hub import locate
        from mlx_t5.training.draft_folder import save_draft

        target, draft = (locate(name) for name in self.subject.names)
        if self.draft.config.draft_vocab_size:
            cause = f"{draft} has a vocabulary of its own, which other programs do not know"
            raise UserError(f"{cause}; give a draft with all tokens")
        if self.draft.shares_with is not None:  # others cannot read a decoder alone
            full = Path(scratch, "standalone")
            draft = save_draft(self.draft, target, full, standalone=True)
        folders = {"target": target, "draft": draft}
        return [str(hugging_face_folder(f, Path(scratch, name))) for name, f in folders.items()]

    def decode(
        self, prompts: Any, num_draft: int | str, max_tokens: int, batch_size: int, **how: Any
    ) -> list[list[int]]:
        from mlx_t5.benchmarks.subject import decode_document, decoding

        way = DRAFT if num_draft else REGULAR
        if isinstance(prompts[0], str):
            decoder = self.subject.decoder(way, num_draft)
            common = {"max_tokens": max_tokens, "batch_size": batch_size}
            return decode_document(decoder, [str(text) for text in prompts], **common)
        if num_draft not in self.decoders:
            bare = replace(self.subject, tokenizer=None)  # ids to ids, as in the other programs
            self.decoders[num_draft] = bare.decoder(way, num_draft)
        how |= {"max_tokens": max_tokens}
        decode = decoding(self.decoders[num_draft], [prompts], batch_size, **how)
        return [result.tokens for result in decode(0)]


def hugging_face_folder(folder: Path, scratch: Path) -> Path:
    from mlx_t5.checkpoints.checkpoint import Checkpoint
    from mlx_t5.model import load
    from mlx_t5.training.fine_tuning import write_model

    checkpoint = Checkpoint.open(folder)
    if not checkpoint.is_mlx:
        return folder
    if checkpoint.raw.get("quantization"):
        cause = "is quantized for MLX, which other programs cannot read"
        raise UserError(f"{folder} {cause}; give an unquantized model")
    return write_model(scratch, load(folder)[0], folder)


class Transformers(Program):
    """transformers' own torch models: greedy, sampled, or with assisted generation (a draft)."""

    def __init__(self, target: str, draft: str, dtype: str, device: str, threads: int):
        import torch
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.torch = torch
        torch.set_num_threads(threads)
        gpus = {"cuda": torch.cuda, "mps": torch.backends.mps} if device != "cpu" else {}
        self.device = next((name for name, gpu in gpus.items() if gpu.is_available()), "cpu")
        self.target, self.draft = (self._load(folder, dtype) for folder in (target, draft))
        self.widen(self.draft, self.target.config.vocab_size)
        self.default_config = self.draft.generation_config

    def describe(self) -> dict[str, Any]:
        blas = re.search(r"BLAS_INFO=(\w+)", self.torch.__config__.show())
        return {
            "transformers": version("transformers"),
            "torch": self.torch.__version__,
            "device": self.device,
            "blas": blas.group(1) if blas and self.device == "cpu" else None,
            "threads": self.torch.get_num_threads(),
        }

    def decode(
        self, prompts: Ids, num_draft: int | str, max_tokens: int, batch_size: int, **how: float
    ) -> list[list[int]]:
        more: dict[str, Any] = {}
        if how:
            more = {"do_sample": True, "top_k": 0, "temperature": how.pop("temp"), **how}
        if num_draft:
            if len(prompts) > 1:
                raise UserError("assisted generation takes one prompt at a time")
            self._propose(num_draft)
            more["assistant_model"] = self.draft
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        tokens: list[list[int]] = [[] for _ in prompts]
        for batch in cut(order, batch_size):
            rows = self._generate([prompts[i] for i in batch], max_tokens, **more)
            for i, row in zip(batch, rows, strict=True):
                tokens[i] = row
        return tokens

    def _generate(self, prompts: Ids, max_tokens: int, **more: Any) -> list[list[int]]:
        from transformers import GenerationConfig

        special = ("eos_token_id", "pad_token_id", "decoder_start_token_id")
        ids = {name: getattr(self.target.config, name, None) for name in special}
        saved = self.target.generation_config
        ids = {name: getattr(saved, name) if n is None else n for name, n in ids.items()}
        config = GenerationConfig(
            do_sample=False, num_beams=1, max_new_tokens=max_tokens, use_cache=True, **ids
        )
        end, pad = ids["eos_token_id"], ids["pad_token_id"]
        sources = [self.torch.tensor(prompt, device=self.device) for prompt in prompts]
        padded = partial(self.torch.nn.utils.rnn.pad_sequence, batch_first=True)
        source = padded(sources, padding_value=pad)
        mask = padded([self.torch.ones_like(prompt) for prompt in sources])
        with self.torch.inference_mode():
            out = self.target.generate(
                source, attention_mask=mask, generation_config=config, **more
            )
        tokens = [row[1:] for row in out.tolist()]
        return [row[: row.index(end)] if end in row else row for row in tokens]

    def _propose(self, num_draft: int | str) -> None:
        config = copy.copy(self.default_config)
        if num_draft != AUTO:
            config.num_assistant_tokens = num_draft
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0
        self.draft.generation_config = config

    def widen(self, model: PreTrainedModel, vocab_size: int) -> None:
        # Assisted generation needs vocabularies of one size. A new token gets the embedding, and so
        # the logit, of padding, which a trained model never chooses.
        size = model.config.vocab_size
        if size >= vocab_size:
            return
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
        pad = model.config.pad_token_id
        with self.torch.no_grad():
            for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
                layer.weight[size:] = layer.weight[pad].clone()

    def _load(self, folder: str, dtype: str) -> Any:
        from transformers import AutoModelForSeq2SeqLM

        model = AutoModelForSeq2SeqLM.from_pretrained(
            folder, dtype=getattr(self.torch, dtype), local_files_only=True
        )
        return model.to(self.device).eval()


class CTranslate2(Program):
    """CTranslate2, with the model converted to CTranslate2's format in a temporary folder."""

    def __init__(self, target: str, dtype: str, device: str, threads: int, scratch: str):
        import ctranslate2

        if not Path(scratch).exists():
            from ctranslate2.converters import TransformersConverter  # imports torch

            TransformersConverter(target).convert(scratch)
        cuda = device != "cpu" and ctranslate2.get_cuda_device_count() > 0
        self.device, self.threads = "cuda" if cuda else "cpu", threads
        self.translator = ctranslate2.Translator(
            scratch, device=self.device, compute_type=dtype, inter_threads=1, intra_threads=threads
        )
        vocabulary = Path(scratch, "shared_vocabulary.json").read_text("utf-8")
        self.tokens: list[str] = json.loads(vocabulary)
        self.ids = {token: i for i, token in enumerate(self.tokens)}

    def describe(self) -> dict[str, Any]:
        facts = {"device": self.device, "threads": self.threads}
        return {"ctranslate2": version("ctranslate2"), **facts}

    def decode(
        self, prompts: Ids, num_draft: int | str, max_tokens: int, batch_size: int, **how: float
    ) -> list[list[int]]:
        if num_draft or how:
            raise UserError("CTranslate2 has no speculative decoding, and is only greedy here")
        results = self.translator.translate_batch(
            [[self.tokens[i] for i in ids] for ids in prompts],
            beam_size=1,
            max_decoding_length=max_tokens,
            max_batch_size=batch_size,
        )
        return [[self.ids[token] for token in result.hypotheses[0]] for result in results]

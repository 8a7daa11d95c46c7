"""Other programs that run T5, each with the same weights, the same prompts and as many threads.

Token ids go in and come out, so that differences between tokenizers play no part. A program and its
libraries are loaded where one of these classes is made, and nowhere else.
"""

from __future__ import annotations

import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.extras import needed
from mlx_t5.errors import UserError
from mlx_t5.settings import AUTO

Ids = Sequence[Sequence[int]]  # source tokens of each prompt


@dataclass
class Answer:
    """What decoding some prompts took and made.

    Attributes:
        tokens: of each prompt, without start and end.
        seconds: for all of it.
        first_seconds: for the same with one token a prompt: encoding and a pass. None if that was
            not asked for.
    """

    tokens: list[list[int]]
    seconds: float
    first_seconds: float | None = None


class Program(ABC):
    """What decodes greedily, and times itself, so that no message between processes counts."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What decides about its speed: versions, threads, device."""

    @abstractmethod
    def decode(
        self, prompts: Ids, num_draft: int | str, max_tokens: int, batch_size: int
    ) -> list[list[int]]:
        """The tokens of each prompt, without start and end.

        Args:
            prompts: source tokens.
            num_draft: proposals a step; 0 without a draft, "auto" as many as the program likes.
            max_tokens: generated at most, the end token included.
            batch_size: prompts decoded together at most.

        Raises:
            UserError: the program cannot do that.
        """

    def timed(
        self, prompts: Ids, num_draft: int | str, max_tokens: int, batch_size: int, first: bool
    ) -> dict[str, Any]:
        """An `Answer`; `first` is whether the first tokens are timed too."""
        clock = time.perf_counter
        began = clock()
        answer = Answer(self.decode(prompts, num_draft, max_tokens, batch_size), clock() - began)
        if first:
            began = clock()
            self.decode(prompts, num_draft, 1, batch_size)
            answer.first_seconds = clock() - began
        return asdict(answer)


class Transformers(Program):
    """transformers' own torch models, greedy or with assisted generation."""

    def __init__(self, target: str, draft: str, dtype: str, device: str, threads: int):
        """Loads a pair.

        Args:
            target: folder of Hugging Face.
            draft: another.
            dtype: to compute in.
            device: "cpu", or "gpu" for the one that torch has.
            threads: on the CPU.

        Raises:
            UserError: torch is not installed.
        """
        self.torch = needed("torch")
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.torch.set_num_threads(threads)
        self.device = "cpu" if device == "cpu" else self._gpu()
        self.target, self.draft = (self._load(folder, dtype) for folder in (target, draft))
        self.widen(self.draft, self.target.config.vocab_size)
        saved = self.draft.generation_config
        names = (
            *("num_assistant_tokens", "num_assistant_tokens_schedule"),
            "assistant_confidence_threshold",
        )
        self.usual = {name: getattr(saved, name) for name in names}

    def describe(self) -> dict[str, Any]:
        """As `Program.describe`."""
        blas = re.search(r"BLAS_INFO=(\w+)", self.torch.__config__.show())
        return {
            "transformers": version("transformers"),
            "torch": self.torch.__version__,
            "device": self.device,
            "blas": blas.group(1) if blas and self.device == "cpu" else None,
            "threads": self.torch.get_num_threads(),
        }

    def decode(
        self, prompts: Ids, num_draft: int | str, max_tokens: int, batch_size: int
    ) -> list[list[int]]:
        """As `Program.decode`; prompts of alike length are decoded together."""
        more = {}
        if num_draft:
            if len(prompts) > 1:
                raise UserError("assisted generation takes one prompt at a time")
            self._propose(num_draft)
            more["assistant_model"] = self.draft
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        tokens: list[list[int]] = [[] for _ in prompts]
        for first in range(0, len(order), batch_size):
            places = order[first : first + batch_size]
            batch = self._generate([prompts[i] for i in places], max_tokens, **more)
            for place, row in zip(places, batch, strict=True):
                tokens[place] = row
        return tokens

    def _generate(self, prompts: Ids, max_tokens: int, **more: Any) -> list[list[int]]:
        """One batch; `more` goes to `generate`."""
        from transformers import GenerationConfig

        special = ("eos_token_id", "pad_token_id", "decoder_start_token_id")
        known = {name: getattr(self.target.config, name, None) for name in special}
        saved = self.target.generation_config
        known = {name: getattr(saved, name) if n is None else n for name, n in known.items()}
        config = GenerationConfig(
            do_sample=False, num_beams=1, max_new_tokens=max_tokens, use_cache=True, **known
        )
        end, pad = known["eos_token_id"], known["pad_token_id"]
        width = max(map(len, prompts))
        missing = [width - len(ids) for ids in prompts]
        rows = [[*ids, *[pad] * n] for ids, n in zip(prompts, missing, strict=True)]
        seen = [[1] * (width - n) + [0] * n for n in missing]
        source, mask = (self.torch.tensor(each, device=self.device) for each in (rows, seen))
        with self.torch.inference_mode():
            out = self.target.generate(
                source, attention_mask=mask, generation_config=config, **more
            )
        tokens = [row[1:] for row in out.tolist()]
        return [row[: row.index(end)] if end in row else row for row in tokens]

    def _propose(self, num_draft: int | str) -> None:
        """Sets how many tokens the draft proposes: always so many, or as transformers likes."""
        wanted = dict(self.usual)
        if num_draft != AUTO:
            wanted = dict(zip(wanted, (num_draft, "constant", 0.0), strict=True))
        for name, value in wanted.items():
            setattr(self.draft.generation_config, name, value)

    def widen(self, model: Any, vocab_size: int) -> None:
        """Adds tokens that are never chosen, up to this size; a larger vocabulary stays.

        Assisted generation demands vocabularies of one size. A new token is embedded as the
        padding, which no trained model writes, so its logit never wins either.
        """
        own = model.config.vocab_size
        if own >= vocab_size:
            return
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
        pad = model.config.pad_token_id
        with self.torch.no_grad():
            for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
                layer.weight[own:] = layer.weight[pad].clone()

    def _load(self, folder: str, dtype: str) -> Any:
        from transformers import AutoModelForSeq2SeqLM

        model = AutoModelForSeq2SeqLM.from_pretrained(
            folder, dtype=getattr(self.torch, dtype), local_files_only=True
        )
        return model.to(self.device).eval()

    def _gpu(self) -> str:
        """The best device by torch's name."""
        if self.torch.cuda.is_available():
            return "cuda"
        return "mps" if self.torch.backends.mps.is_available() else "cpu"


class CTranslate2(Program):
    """CTranslate2, whose own format is made in a temporary folder."""

    def __init__(self, target: str, dtype: str, device: str, threads: int, scratch: str):
        """Converts and loads a model.

        Args:
            target: folder of Hugging Face.
            dtype: to compute in.
            device: "cpu", or "gpu" for CUDA where there is one.
            threads: on the CPU.
            scratch: a folder, made for what is converted.

        Raises:
            UserError: CTranslate2, or what its converter needs, is not installed.
        """
        self.package = needed("ctranslate2")
        converter = needed("ctranslate2.converters").TransformersConverter(target)
        converter.convert(scratch)
        cuda = device != "cpu" and self.package.get_cuda_device_count() > 0
        self.device, self.threads = "cuda" if cuda else "cpu", threads
        self.translator = self.package.Translator(
            scratch, device=self.device, compute_type=dtype, inter_threads=1, intra_threads=threads
        )
        vocabulary = Path(scratch, "shared_vocabulary.json").read_text("utf-8")
        self.tokens: list[str] = json.loads(vocabulary)
        self.ids = {token: i for i, token in enumerate(self.tokens)}

    def describe(self) -> dict[str, Any]:
        """As `Program.describe`."""
        return {
            "ctranslate2": self.package.__version__,
            "device": self.device,
            "threads": self.threads,
        }

    def decode(
        self, prompts: Ids, num_draft: int | str, max_tokens: int, batch_size: int
    ) -> list[list[int]]:
        """As `Program.decode`; the program itself sorts prompts by length."""
        if num_draft:
            raise UserError("CTranslate2 has no speculative decoding")
        results = self.translator.translate_batch(
            [[self.tokens[i] for i in ids] for ids in prompts],
            beam_size=1,
            max_decoding_length=max_tokens,
            max_batch_size=batch_size,
        )
        return [[self.ids[token] for token in result.hypotheses[0]] for result in results]

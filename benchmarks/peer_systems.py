"""Other programs that run T5, each with the same weights, the same prompts and as many threads.

Token ids go in and come out, so that differences between tokenizers play no part.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.extras import needed
from mlx_t5.backend import mx
from mlx_t5.checkpoints.checkpoint import SAFETENSORS, open_checkpoint
from mlx_t5.errors import UserError
from mlx_t5.network.config import T5Config
from mlx_t5.network.weights import read_config, read_mlx, tensor_names

Decode = Callable[[Sequence[int]], list[int]]  # source tokens → tokens, without start and end


def hugging_face_folder(folder: Path, scratch: Path) -> Path:
    """The folder itself if transformers can read it; otherwise one in `scratch` that it can.

    Args:
        folder: of Hugging Face, or as convert.py writes it.
        scratch: made if it is needed.

    Raises:
        UserError: the weights are quantised.
    """
    with open_checkpoint(folder) as checkpoint:
        if checkpoint.metadata.get("format") != "mlx":
            return folder
    raw = read_config(folder)
    if raw.get("quantization"):
        raise UserError(f"{folder} is quantised for MLX, which nothing else reads; compare without")
    theirs = {ours: name for name, ours in tensor_names(T5Config.from_dict(raw)).items()}
    scratch.mkdir(parents=True)
    for file in folder.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy(file, scratch)
    tensors = {theirs[name]: array for name, array in read_mlx(folder)}
    mx.save_safetensors(str(scratch / SAFETENSORS), tensors, metadata={"format": "pt"})
    return scratch


class Transformers:
    """transformers' own torch models."""

    def __init__(self, folder: Path, dtype: str, device: str, threads: int):
        """Loads a model.

        Args:
            folder: of Hugging Face.
            dtype: to compute in.
            device: by torch's name.
            threads: on the CPU.

        Raises:
            UserError: torch is not installed.
        """
        self.torch = needed("torch")
        from transformers import AutoModelForSeq2SeqLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.torch.set_num_threads(threads)
        self.device = device
        model = AutoModelForSeq2SeqLM.from_pretrained(
            folder, dtype=getattr(self.torch, dtype), local_files_only=True
        )
        self.model = model.to(device).eval()

    def greedy(self, max_tokens: int, **more: Any) -> Decode:
        """Greedy decoding; `more` goes to `generate`."""
        from transformers import GenerationConfig

        special = ("eos_token_id", "pad_token_id", "decoder_start_token_id")
        known = {name: getattr(self.model.config, name, None) for name in special}
        saved = self.model.generation_config
        known = {name: getattr(saved, name) if n is None else n for name, n in known.items()}
        config = GenerationConfig(
            do_sample=False, num_beams=1, max_new_tokens=max_tokens, use_cache=True, **known
        )

        def decode(ids: Sequence[int]) -> list[int]:
            source = self.torch.tensor([list(ids)], device=self.device)
            mask = self.torch.ones_like(source)
            with self.torch.inference_mode():
                out = self.model.generate(
                    source, attention_mask=mask, generation_config=config, **more
                )
            tokens = out[0].tolist()[1:]
            end = known["eos_token_id"]
            return tokens[: tokens.index(end)] if end in tokens else tokens

        return decode

    def widen(self, vocab_size: int) -> None:
        """Adds tokens that are never chosen, up to this size; a larger vocabulary stays.

        Assisted generation demands vocabularies of one size. A new token is embedded as the
        padding, which no trained model writes, so its logit never wins either.
        """
        own = self.model.config.vocab_size
        if own >= vocab_size:
            return
        self.model.resize_token_embeddings(vocab_size, mean_resizing=False)
        pad = self.model.config.pad_token_id
        with self.torch.no_grad():
            for layer in (self.model.get_input_embeddings(), self.model.get_output_embeddings()):
                layer.weight[own:] = layer.weight[pad].clone()

    def assisted(self, draft: Transformers, max_tokens: int, num_draft: int | None) -> Decode:
        """Assisted generation.

        Args:
            draft: the smaller model.
            max_tokens: generated at most.
            num_draft: always so many proposals; None leaves number and early stop as they are by
                default in transformers.
        """
        config = draft.model.generation_config
        names = (
            *("num_assistant_tokens", "num_assistant_tokens_schedule"),
            "assistant_confidence_threshold",
        )
        usual = {name: getattr(config, name) for name in names}
        wanted = (
            usual
            if num_draft is None
            else dict(zip(names, (num_draft, "constant", 0.0), strict=True))
        )
        decode = self.greedy(max_tokens, assistant_model=draft.model)

        def run(ids: Sequence[int]) -> list[int]:
            for name, value in wanted.items():
                setattr(config, name, value)
            return decode(ids)

        return run


class CTranslate2:
    """CTranslate2, whose own format is made in a temporary folder."""

    def __init__(self, folder: Path, dtype: str, device: str, threads: int, scratch: Path):
        """Converts and loads a model.

        Args:
            folder: of Hugging Face.
            dtype: to compute in.
            device: "cpu" or "cuda".
            threads: on the CPU.
            scratch: made for what is converted.

        Raises:
            UserError: CTranslate2 is not installed.
        """
        package = needed("ctranslate2")
        converter = needed("ctranslate2.converters").TransformersConverter(str(folder))
        converter.convert(str(scratch))
        self.translator = package.Translator(
            str(scratch), device=device, compute_type=dtype, inter_threads=1, intra_threads=threads
        )
        self.tokens: list[str] = json.loads((scratch / "shared_vocabulary.json").read_text("utf-8"))
        self.ids = {token: i for i, token in enumerate(self.tokens)}

    def greedy(self, max_tokens: int) -> Decode:
        """Greedy decoding."""

        def decode(ids: Sequence[int]) -> list[int]:
            (result,) = self.translator.translate_batch(
                [[self.tokens[i] for i in ids]], beam_size=1, max_decoding_length=max_tokens
            )
            return [self.ids[token] for token in result.hypotheses[0]]

        return decode

"""One run of fine-tuning: the body of `mlx_t5.finetune`.

Other programs can read the result: adapters have PEFT's format, and a whole model has the format of
Hugging Face. At regular intervals, the held-out prompts are decoded with the current weights, and
the weights that write the best texts are kept (mlx_t5/training).
"""

from __future__ import annotations

import contextlib
import json
import math
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlx_t5.backend import mx, tree_flatten
from mlx_t5.checkpoints.adapters import CONFIG, TRANSLATION, WEIGHTS
from mlx_t5.checkpoints.writing import is_model_file
from mlx_t5.cli import finetune_options
from mlx_t5.cli.finetune_options import ADAMW, FULL, RELATIVE, FinetuneOptions, lora_config
from mlx_t5.cli.training import compared_options, reporter, say, work_folder
from mlx_t5.cli.training_pairs import NAMES, read_lines
from mlx_t5.cli.uploading import check_output, fine_tuned_card, upload
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.disk import absolute, replace_file
from mlx_t5.drafting.draft_model import DraftModel
from mlx_t5.errors import UserError, readable
from mlx_t5.loading import choose_pair
from mlx_t5.model import load
from mlx_t5.training import batches, evaluation, examples, fine_tuning, learner, trainer
from mlx_t5.training.examples import MOST_HELD_OUT, TrainingPair, hold_out, read_pairs
from mlx_t5.training.loss import token_loss
from mlx_t5.training.run_folder import RunFolder
from mlx_t5.training.start import require_plain, require_texts
from mlx_t5.training.teacher_answers import given
from mlx_t5.training.training_memory import ADAM_COPIES, COPIES, estimate, report_memory

LEAST = 10  # minimum number of pairs to train on
EVALUATED_AT_ONCE = 16  # batch size of evaluations
MAX_GRAD_NORM = 1.0  # as transformers' Trainer
PROMPTS = "prompts.jsonl"  # in the work folder, for distill.py


def finetune_command(options: FinetuneOptions) -> int:
    return FineTuning(options).run()


class FineTuning:
    """One run of fine-tuning: a model, its trained parameters, and the data."""

    def __init__(self, args: FinetuneOptions) -> None:
        self.args, self.full = args, args.fine_tune_type == FULL
        is_output = is_model_file if self.full else {CONFIG, TRANSLATION, WEIGHTS[0]}.__contains__
        check_output(args, is_output)
        self.log = reporter(args.metrics_file)
        files = finetune_options.pair_files(args.data, args.valid)
        languages = args.source_language, args.target_language
        names: Any = [languages] if args.source_language else NAMES
        lines = {part: list(read_lines(file, names)) for part, file in files.items()}
        self.folder = RunFolder(work_folder(args.output))
        self.prompts = self.folder.path / PROMPTS
        chosen = choose_pair(args.model, None)
        self.base = chosen.target
        self.model, self.tokenizer = load(self.base, "float32" if self.full else None)
        require_texts(self.model, self.tokenizer, args.model)
        if self.full:
            require_plain(self.model, args.model)
            fine_tuning.unfreeze_last(self.model, args.num_layers)
            self.drop = self.model.drop if self.model.config.dropout_rate else None
        else:
            adapter = lora_config(args), args.num_layers, args.lora_dropout, args.seed
            adapters = fine_tuning.adapt(self.model, *adapter)
            self.drop = adapters.drop if args.lora_dropout else None
        self._read(lines)
        self.draft = None  # the model's default draft, for faster evaluations
        with contextlib.suppress(UserError):  # it does not fit this model
            if chosen.draft is not None:
                draft = load(chosen.draft, shared_with=self.model)[0]
                self.draft = DraftModel(draft, self.model)

    def _read(self, lines: dict[str, list[Any]]) -> None:
        longest, size = self.args.max_seq_length, self.model.config.vocab_size
        pairs = {
            part: read_pairs(pair_lines, self.tokenizer, size, longest, say)
            for part, pair_lines in lines.items()
        }
        if "valid" not in pairs:
            pairs["train"], pairs["valid"] = hold_out(pairs["train"], self.args.seed)
        self.train, self.valid = pairs["train"], pairs["valid"][:MOST_HELD_OUT]
        if (count := len(pairs["valid"])) > MOST_HELD_OUT:
            say(f"{MOST_HELD_OUT} of {count:,} pairs are used for evaluation")
        self.test: list[TrainingPair] = pairs.get("test", [])
        counts = f"{len(self.train):,} pairs to train on, {len(self.valid)} to evaluate by"
        if len(self.train) < LEAST or not self.valid:
            raise UserError(f"{counts}; {LEAST} and 1 are the least that can be used")
        say(counts + (f", {len(self.test):,} to test with" if self.test else ""))

    def run(self) -> int:
        options, texts = compared_options(self.args, [*self.train, *self.valid]), None
        with self.folder.opened(options, self.args.resume):
            trainer = self._trainer()
            mx.reset_peak_memory()
            if not trainer.run():
                return 1
            say(f"peak memory: {readable(mx.get_peak_memory())}")
            if self.test or self.args.upload_repo:
                texts = self._evaluated(self.test or self.valid)
                numbers = {f"test_{name}": number for name, number in texts.numbers.items()}
                self.log(f"{'test' if self.test else 'held out'}: {texts}", **numbers)
            path = self._save()
        say(f"the result is in {self.args.output}; {self.folder.kept()}")
        say("commands to run next:")
        held_out = self.valid[0].prompt
        for command in finetune_options.next_commands(self.args, self.prompts, held_out):
            print(shlex.join(command))
        base = fine_tuning.base_name(self.base)
        card = partial(fine_tuned_card, folder=path, source=self.base, base=base, tested=texts)
        return upload(path, self.args.upload_repo, card) or int(trainer.failed)

    def _trainer(self) -> trainer.Trainer:
        args, warm_up = self.args, self.args.warmup_steps
        if warm_up is None:
            warm_up = math.ceil(learner.WARM_UP_SHARE * args.iters)
        decays, relative = (args.lr_scheduler_type == kind for kind in ("linear", RELATIVE))
        labeled = [given(pair.source, pair.answer) for pair in self.train]
        self.rows = self._rows()
        sizes = args.batch_size, self.rows
        self.learner = learner.Learner(
            self.model,
            token_loss(self.model, 0.0),
            args.iters,
            args.learning_rate,
            schedule=learner.linear(args.iters, warm_up) if decays else learner.constant(warm_up),
            optimizer=learner.adamw() if args.optimizer == ADAMW else learner.adafactor(relative),
            drop=self.drop,
            seed=args.seed,
            max_grad_norm=MAX_GRAD_NORM,
            weight_decay=args.weight_decay,
        )
        return trainer.Trainer(
            self.learner,
            partial(batches.micro_batches, labeled, self.model, *sizes, args.seed),
            trainer.schedule_of(args),
            self.folder,
            lambda: self._evaluated(self.valid),
            self.log,
        )

    def _rows(self) -> int:
        args, model = self.args, self.model
        rows = min(args.batch_size, len(self.train))
        copies = ADAM_COPIES if args.optimizer == ADAMW else COPIES
        adapted = 0
        if not self.full and args.lora_dropout > 0:
            adapted += 1
        if args.fine_tune_type == "dora":
            adapted += 2
        model.grad_checkpoint = args.grad_checkpoint
        needed = model, *examples.longest(self.train), rows, copies, adapted
        if estimate(*needed).rows < rows and not args.grad_checkpoint:
            model.grad_checkpoint = True
            say("a batch takes too much memory: layers are computed twice (--grad-checkpoint)")
        size = estimate(*needed)
        if size.rows < rows:
            say(f"the {rows} pairs of a step are worked on {size.rows} at a time")
        cure = "a lower --max-seq-length, --fine-tune-type lora or a quantized model"
        report_memory(model, size, cure, say)
        return size.rows

    def _evaluated(self, pairs: Sequence[TrainingPair]) -> evaluation.Texts:
        decoder = SpeculativeDecoder(self.model, self.draft, self.tokenizer)
        sources, longest = [pair.source for pair in pairs], self.args.max_seq_length[1]
        decoded = decoder.results(sources, decoder.request(max_tokens=longest), EVALUATED_AT_ONCE)
        results = list(trainer.bar("evaluating", "prompts", len(pairs), 0, decoded))
        if failed := [result.error for result in results if result.error]:
            say(f"{len(failed)} prompts could not be decoded and count as wrong: {failed[0]}")
        written = [result.text or "" for result in results]
        labeled = [given(pair.source, pair.answer) for pair in pairs]
        labeled.sort(key=lambda example: len(example.answer))
        loss = self.learner.held_out_loss(batches.in_batches(labeled, self.model, self.rows))
        prompts, right = [p.prompt for p in pairs], [p.completion for p in pairs]
        texts = evaluation.Texts(prompts, written, right, loss)
        say(texts.samples())
        return texts

    def _save(self) -> Path:
        args, path = self.args, absolute(self.args.output)
        prompts = "".join(json.dumps({"prompt": pair.prompt}) + "\n" for pair in self.train)
        replace_file(self.prompts, lambda partial: partial.write_text(prompts, encoding="utf-8"))
        overwrite, prefix = self.folder.written.exists(), args.translation_prefix
        template = {"translation_prefix": prefix} if prefix else {}
        if self.full:
            fine_tuning.write_model(path, self.model, self.base, overwrite, **template)
        else:
            weights = dict(tree_flatten(self.model.trainable_parameters()))
            lora, layers = lora_config(args), args.num_layers
            entries: dict[str, Any] = {"lora_dropout": args.lora_dropout, **template}
            entries["base_model_name_or_path"] = fine_tuning.base_name(self.base)
            fine_tuning.write_adapter(path, self.model, weights, lora, layers, overwrite, **entries)
        self.folder.written.touch()
        return path

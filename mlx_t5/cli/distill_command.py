"""One run of distillation: the body of `mlx_t5.distill`.

The target answers the prompts, and a draft learns to guess these answers (mlx_t5/training). At the
end, the best version of the draft is compared with the draft that the target had before (if any)
and with copying tokens of the prompt. A bad draft cannot change the target's output, because the
target verifies every proposal.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

from mlx_t5.backend import mx
from mlx_t5.checkpoints.hub import locate
from mlx_t5.checkpoints.writing import is_model_file
from mlx_t5.cli.distill_options import DistillOptions
from mlx_t5.cli.input import LineReader
from mlx_t5.cli.training import compared_options, reporter, say, work_folder
from mlx_t5.cli.training_pairs import SUFFIXES, read_lines
from mlx_t5.cli.uploading import check_output, draft_card, upload
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.drafting.draft_model import DraftModel
from mlx_t5.drafting.named import DRAFTERS, make_drafter
from mlx_t5.drafting.proposals import Drafter
from mlx_t5.errors import UserError, readable
from mlx_t5.installation import command
from mlx_t5.loading import choose_pair
from mlx_t5.model import T5, load
from mlx_t5.network.draft_vocabulary import narrow
from mlx_t5.network.sharing import shared_draft, whole
from mlx_t5.settings import AUTO
from mlx_t5.text.prompts import Prompt
from mlx_t5.text.tokenizer import same_vocabulary
from mlx_t5.training import batches, evaluation, examples, learner, loss, start, trainer
from mlx_t5.training.draft_folder import save_draft
from mlx_t5.training.examples import Example
from mlx_t5.training.run_folder import RunFolder
from mlx_t5.training.teacher_answers import Answers, LabeledExample, Tokens, label
from mlx_t5.training.training_memory import estimate, report_memory

ANSWERS_AT_ONCE = 32  # batch size while the target answers
EVALUATED_AT_ONCE = 16  # batch size of evaluations
OWN_SHARE = 0.9  # share of the target's own choices in its answers; rounding may change some
LABELED_FIRST = 32  # completions that are compared with the target before all are used


def distill_command(options: DistillOptions) -> int:
    return Distillation(options).run()


class Distillation:
    """One run of distillation: the target, the draft to train, and the previous draft."""

    def __init__(self, args: DistillOptions) -> None:
        check_output(args, is_model_file)
        self.args, self.folder = args, RunFolder(work_folder(args.output))
        self.log = reporter(args.metrics_file)
        if args.data.endswith(SUFFIXES):
            lines: Iterable[Any] = read_lines(args.data, prompts_only=True)
        else:
            lines = (line.pair for line in LineReader(args.data, optional="completion").lines())
        default = choose_pair(args.model, None, args.adapter_path)
        self.target_folder = default.target
        self.start = None if args.draft_model is None else locate(args.draft_model)
        self.before = self.start or default.draft  # the new draft has to be faster than this one
        self.target, self.tokenizer = load(default.target, adapter=default.adapter)
        start.require_texts(self.target, self.tokenizer, args.model)
        vocab_size = self.target.config.vocab_size
        usable = examples.read_examples(lines, self.tokenizer, vocab_size, args.max_tokens, say)
        self.train, self.held_out = examples.hold_out(usable, args.seed)
        self.draft = self._first_draft()

    def run(self) -> int:
        options, failed = compared_options(self.args, [*self.train, *self.held_out]), False
        self._check_completions()
        with self.folder.opened(options, self.args.resume):
            if self.args.iters:
                longest = max(len(example.source) for example in self.train)
                rows = min(self.args.batch_size, len(self.train))
                size = estimate(self.draft, longest, self.args.max_tokens, rows)
                cure = "a lower --max-tokens, shorter prompts or fewer --decoder-layers"
                report_memory(self.target, size, cure, say)
            labeled = self._answered()
            self._choose_vocabulary(labeled)
            if self.args.iters:
                trainer = self._trainer(labeled)
                if not trainer.run():
                    return 1
                failed = trainer.failed
                if evaluation.needs_prompts(trainer.history):
                    cause = "the training loss fell, but held-out acceptance stood still"
                    say(f"{cause}: train on more than {len(labeled):,} prompts")
            whole = self.draft.shares_with is None
            self.source = self.start if self.start and whole else self.target_folder
            overwrite = self.folder.written.exists()
            path = save_draft(self.draft, self.source, self.args.output, overwrite=overwrite)
            self.folder.written.touch()
            print(self._verdict(path), flush=True)
        say(f"the draft is in {self.args.output}; {self.folder.kept()}")
        return upload(path, self.args.upload_repo, lambda name: self.card(name)) or int(failed)

    def _check_completions(self) -> None:
        pairs = [(e.source, e.answer) for e in self.train if e.answer][:LABELED_FIRST]
        if not pairs or self.args.temp:
            return  # sampled answers are not the likeliest
        labeled = label(self.target, pairs)
        own = [(e.top_ids[range(len(e.answer)), e.top_p.argmax(1)] == e.answer) for e in labeled]
        count, total = sum(map(sum, own)), sum(map(len, own))
        if count < OWN_SHARE * total:
            cause = f"of the completions' tokens the target itself would write {count / total:.0%}"
            raise UserError(f"--data: {cause}; leave them out, and the target answers the prompts")

    def _first_draft(self) -> T5:
        if self.args.draft_model is None or self.start is None:
            draft = shared_draft(self.target, self.args.decoder_layers or 1, mx.float32)
            return draft if self.args.share_encoder is not False else whole(draft)
        trained = self.args.iters > 0
        draft, tokenizer = load(self.start, "float32" if trained else None, None, self.target)
        same_vocabulary(self.tokenizer, tokenizer)
        return start.start_from(draft, self.target, self.args.draft_model, trained)

    def _answered(self) -> list[LabeledExample]:
        answers = Answers(self.folder.answers, self.train)
        reads = self.draft.shares_with is not None and self.args.iters > 0
        keep = reads and answers.done < len(self.train)
        if keep:  # 16 bits a number; half of the disk's free space is left alone
            positions = sum(len(example.source) for example in self.train)
            size = 2 * positions * self.target.config.d_model
            keep = 2 * size < shutil.disk_usage(self.folder.path).free
            if not keep:
                say(f"no disk space for {readable(size)}: prompts are encoded in every step")
        with trainer.bar("answers", "prompts", len(self.train), answers.done) as bar:
            answers.complete(self.target, self._written, self.args.temp, keep, bar.update)
        labeled = answers.labeled()
        if not labeled:
            cure = f"try one with {command('generate')}"
            raise UserError(f"the target answered none of the prompts; {cure}")
        answers.report(labeled, self.target.config.eos_token_id, self.args.max_tokens, say)
        return labeled

    def _written(
        self, examples: Sequence[Example], indices: Sequence[int]
    ) -> Iterator[Tokens | None]:
        end = self.target.config.eos_token_id
        for result in self._decoding(None)(examples, ANSWERS_AT_ONCE, indices):
            ended = (end,) if result.finish_reason == "stop" else ()
            yield None if result.error else (*result.tokens, *ended)

    def _choose_vocabulary(self, labeled: Sequence[LabeledExample]) -> None:
        size, vocab_size = self.args.draft_vocab_size, self.draft.config.vocab_size
        if isinstance(size, str) or (size is None and self.args.share_encoder is False):
            return  # a draft with all tokens: other programs can use it too

        def counted() -> Any:
            unknown = [e for e in self.held_out if not e.answer]
            written = filter(None, self._written(unknown, range(len(unknown))))
            held_out = [*(e.answer for e in self.held_out if e.answer), *written]
            answers, ends = [e.answer for e in labeled], self.target.config.eos_token_ids
            return start.frequent_tokens(answers, held_out, ends, vocab_size, size, say)

        ids = self.folder.vocabulary(counted)
        if len(ids) < vocab_size:
            narrow(self.draft, ids)

    def _trainer(self, labeled: list[LabeledExample]) -> trainer.Trainer:
        args, draft = self.args, self.draft
        longest, of_draft = examples.longest(labeled), loss.token_loss(draft, args.temp)
        rows = estimate(draft, *longest, args.batch_size).rows
        return trainer.Trainer(
            learner.Learner(draft, of_draft, args.iters, args.learning_rate),
            partial(batches.micro_batches, labeled, draft, args.batch_size, rows, args.seed),
            trainer.schedule_of(args),
            self.folder,
            lambda: self._evaluate(self.draft),
            self.log,
        )

    def _evaluate(self, draft: T5 | Drafter) -> evaluation.Acceptance:
        decoded = self._decoding(draft, evaluation.NUM_DRAFT)(self.held_out, EVALUATED_AT_ONCE)
        results = list(trainer.bar("evaluating", "prompts", len(self.held_out), 0, decoded))
        answered = [not result.error for result in results]
        if not any(answered):
            raise UserError(f"no held-out prompt could be decoded: {results[0].error}")
        if not all(answered):
            say(f"{answered.count(False)} held-out prompts could not be decoded and are left out")
            self.held_out = list(compress(self.held_out, answered))
        return evaluation.Acceptance.of(list(compress(results, answered)))

    def _verdict(self, path: Path) -> str:
        self.draft = load(path, shared_with=self.target)[0]
        drafts: dict[str, Any] = {self.args.output: self.draft}
        if self.before is not None:
            try:
                before = load(self.before, shared_with=self.target)[0]
                drafts[str(self.before)] = DraftModel(before, self.target)
            except UserError as error:
                say(f"{self.before} is not compared: {error}")
        drafts |= {name: make_drafter(name, self.tokenizer) for name in DRAFTERS}

        def decoding(name: str) -> Any:
            decode = self._decoding(drafts.get(name))  # adapts the number of proposals
            return lambda turn: list(decode(self.held_out[turn : turn + 1], 1))

        say("measuring …")
        # First, because evaluating removes the prompts that cannot be decoded.
        accepted = {name: self._evaluate(draft) for name, draft in drafts.items()}
        proposers, turns = evaluation.measure_proposers(decoding, accepted, len(self.held_out))
        facts = proposers, self.args.output, turns
        models = self.target_folder, self.source, self.target.dtype
        self.card = lambda name: draft_card(name, *models, evaluation.report(*facts, name))
        return evaluation.report(*facts)

    def _decoding(
        self, draft: T5 | Drafter | None, num_draft: int | str = AUTO
    ) -> Callable[..., Iterator[Any]]:
        args, decoder = self.args, SpeculativeDecoder(self.target, draft, self.tokenizer, num_draft)

        def decode(
            examples: Sequence[Example], batch_size: int, indices: Iterable[int] = ()
        ) -> Iterator[Any]:
            seeds = [args.seed + i for i in indices or [0] * len(examples)]
            prompts = [Prompt(e.source, seed=s) for e, s in zip(examples, seeds, strict=True)]
            request = decoder.request(reuse=False, temp=args.temp, max_tokens=args.max_tokens)
            return decoder.results(prompts, request, batch_size)

        return decode

"""Speculative decoding: a small draft proposes tokens, the target checks them in one pass.

    draft    x (B, gamma) ~ q           by the draft model, or copied from the source (then q = 1)
    verify   logits (B, gamma + 1, V)   one pass of the target over the row's last token and x
    accept   n (B,), next (B,)          keep the longest prefix of x that equals the target's own
                                        choices by p. It has n tokens; next is the choice after them
    commit   tokens += x[:n] + next     next will be fed at position len(tokens) - 1

The method is from Leviathan et al. (https://arxiv.org/abs/2211.17192) and Chen et al.
(https://arxiv.org/abs/2302.01318); tokens are sampled as in Daliri et al.
(https://arxiv.org/abs/2408.07978). `Engine.step` does these four things once for all rows. All
decoding except beam search (engine/beams.py) uses this method: one prompt is a batch of one row, a
stream yields after each step, a server inserts rows between two steps, and regular decoding
proposes nothing.

After every step a row's part of the target's cache holds tokens[:-1]. Later slots may hold
rejected proposals. The next pass overwrites these slots before any query can see them, so dropping
rejected proposals costs nothing.

Symbols: B rows, gamma proposals x, T = gamma + 1 positions, V vocabulary; p target and q draft
probabilities.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_t5.backend import cpu_only, mx
from mlx_t5.drafting.adaptive import Adaptive, Plan
from mlx_t5.drafting.costs import StepCosts
from mlx_t5.drafting.draft_model import DraftModel
from mlx_t5.drafting.proposals import Copy, Drafter, Proposal
from mlx_t5.drafting.source_copy import NO_COPY, SourceCopy
from mlx_t5.engine import scheduler
from mlx_t5.engine.batch import Batch
from mlx_t5.engine.beams import Beams
from mlx_t5.engine.document_results import rows_of, with_token_texts
from mlx_t5.engine.generation_request import GenerationRequest
from mlx_t5.engine.rows import Chunk, Result, Row
from mlx_t5.errors import UserError, log
from mlx_t5.loading import ModelPair, choose_pair, load_pair
from mlx_t5.model import T5
from mlx_t5.network.draft_vocabulary import require_all_tokens
from mlx_t5.network.exact import exact_targets
from mlx_t5.network.interface import Target
from mlx_t5.sampling.acceptance import UNDECIDED, accept
from mlx_t5.sampling.beam_search import texts_of
from mlx_t5.sampling.draws import Sampling
from mlx_t5.sampling.processors import History, Processing
from mlx_t5.scoring.embeddings import Embeddings
from mlx_t5.scoring.pairs import Ranked, Score
from mlx_t5.scoring.scores import Scoring
from mlx_t5.settings import AUTO, DEFAULT_BATCH_SIZE, FLAG, NONE, Settings, checked, unexpected
from mlx_t5.text.languages import Translations
from mlx_t5.text.prompts import DocumentOptions, Prompt, checked_prompts, numbered, split_unit

if TYPE_CHECKING:
    import numpy as np

MOST_COPIED = 64 << 20  # bytes of a cache; see `Engine._prefetch`
SMALL_WEIGHTS = 64 << 20  # bytes that a pass reads; see `Engine.prefetches`


class Engine(Batch):
    """A batch of rows at different positions: `insert` adds rows at any time, `step` advances all.

    Attributes:
        draft: the draft model; None without one.
        copy: proposes tokens that are known without a model.
        copying: whether `copy` may have tokens for some row.
        proposes: whether there is anything to propose, or else this is regular decoding.
        tokens: the tokens of each row so far, the start token first.
        sampling: the rows' sampling settings and random keys.
        copies: the tokens that each row could copy in the last step.
        plan: what each row proposed in the last step.
        on_verified: a callback that gets, in every step, the rows, the target's logits (rows,
            positions, vocabulary) and the tokens (rows, positions) from `acceptance.accept`. Both
            arrays are lazy; do not wait for them. If a step makes several calls, only the last
            call counts.
    """

    copy: Drafter

    def __init__(
        self,
        target: Target,
        draft: DraftModel | None = None,
        copy: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
        adaptive: Adaptive | None = None,
    ) -> None:
        """Starts without rows.

        Args:
            target: the model that verifies proposals.
            draft: a draft model without rows, if any.
            copy: a drafter without rows; None copies from the rows' predictions alone.
            clock: returns seconds.
            adaptive: chooses the number of proposals if num_draft is "auto"; None creates one.
        """
        super().__init__(target, clock)
        self.draft, self.copy = draft, copy or SourceCopy(lookup=False)
        self.models = [target, draft.model] if draft else [target]
        self.always_copying = copy is not None
        self.adaptive = adaptive or Adaptive(StepCosts(target, draft.model if draft else None))
        self.copies: Sequence[Copy] = ()
        self.idle = False
        # Whether a pass may start before its token has been read, and such a pass. On a CPU, large
        # weights occupy all cores, and the pass after a text's end token delays the next text.
        self.prefetches = not cpu_only() or self.adaptive.costs.target.bytes <= SMALL_WEIGHTS
        self.prefetched: tuple[Row, int, mx.array] | None = None  # row, position, logits
        self.on_verified: Callable[[list[Row], mx.array, mx.array], None] | None = None

    def forget(self) -> None:
        """Discards what was learned from sampled rows; keeps what was learned from greedy rows."""
        self.adaptive = self.adaptive.new_call()

    def step(self) -> None:
        """Drafts, verifies, accepts and commits once; finished rows leave the batch."""
        started = self.clock()
        proposal, keys = self._draft()
        logits = self._verify(proposal)
        outcome = self._accept(logits, proposal, keys, self.sampling).tolist()  # the only wait
        if any(row[0] == UNDECIDED for row in outcome):  # rare: the candidates do not reach top-p
            again = self._accept(logits, proposal, keys, self.sampling.exhaustive()).tolist()
            pairs = zip(outcome, again, strict=True)
            outcome = [full if row[0] == UNDECIDED else row for row, full in pairs]
            if self.on_verified:
                self.on_verified(self.rows, logits, mx.array([row[1:] for row in outcome]))
        self._commit(proposal, outcome, self.clock() - started)

    def _draft(self) -> tuple[Proposal, mx.array | None]:
        """Returns the proposals of all rows, and random keys (rows, gamma + 1, 2).

        Each row has a key for each of gamma proposals and for the target's own token. The keys are
        None if all rows are greedy.
        """
        size = len(self.rows)
        self.copies = self.copy.propose() if self.copying else [NO_COPY] * size
        plan = Plan([()] * size, [0] * size, 0, idle=True)
        if self.proposes:
            unread = self.draft.unread(self.tokens) if self.draft else None
            plan = self.adaptive.choose(self.rows, self.copies, unread, self.idle)
        self.plan, self.gamma, self.idle = plan, plan.gamma, plan.idle
        keys = None
        if not self.sampling.all_greedy:
            keys = self.sampling.step_keys([row.decided for row in self.rows], plan.gamma + 1)
        if self.draft:
            proposal = self.draft.propose(self.tokens, plan.drafted, self.sampling, keys)
        else:
            proposal = Proposal.nothing(size)
        if any(plan.copies):
            proposal = proposal.with_copies(plan.copies)
        return proposal, keys

    def _verify(self, proposal: Proposal) -> mx.array:
        """Returns the target's logits after each row's last token and each proposal.

        Their shape is (rows, gamma + 1, vocabulary) for gamma proposals per row.
        """
        prefetched, self.prefetched = self.prefetched, None
        if prefetched and proposal.tokens is None and self.rows == [prefetched[0]]:
            row, position, logits = prefetched
            if position == row.decided:
                return logits
        tokens = mx.array([row[-1:] for row in self.tokens], mx.int32)
        if proposal.tokens is not None:
            tokens = mx.concatenate([tokens, proposal.tokens], axis=1)
        positions = [len(row) - 1 for row in self.tokens]
        return self.target.decode(tokens, self.cache, positions)

    def _accept(
        self, logits: mx.array, proposal: Proposal, keys: mx.array | None, sampling: Sampling
    ) -> mx.array:
        """Returns an array (rows, 1 + T): each row's number of kept proposals, then T tokens.

        The T tokens are the kept proposals, the target's own token, and tokens to ignore.
        """
        x, lengths, processed = proposal.tokens, proposal.valid_lengths, logits
        if rules := sampling.processing:
            history = History.align(self.tokens).then(x)
            processed = rules(history, logits, [n + 1 for n in proposal.lengths])
        accepted, tokens = accept(processed, x, proposal.q, lengths, sampling, keys)
        outcome = mx.concatenate([accepted[:, None], tokens], axis=1)
        if self.on_verified:
            self.on_verified(self.rows, logits, tokens)
        # Not for several rows, which often join or leave: then the pass is wasted.
        if self.prefetches and x is None and self.idle and len(self.rows) == 1:
            self._prefetch(tokens, outcome)
        return outcome

    def _prefetch(self, tokens: mx.array, outcome: mx.array) -> None:
        """Starts the next pass of regular decoding before Python has read `outcome`."""
        (row,) = self.rows
        position = len(row.tokens)
        # As the pass before still reads the cache, MLX copies it before a new token is written to
        # it; for a large cache that takes longer than the early start saves.
        size = self.target.cache_memory(1, 0, position + 1)
        if position < row.settings.max_tokens and size <= MOST_COPIED:
            mx.async_eval(outcome)
            self.prefetched = row, position, self.target.decode(tokens, self.cache, [position])
            mx.async_eval(self.prefetched[-1])

    def _commit(self, proposal: Proposal, outcome: list[list[int]], seconds: float) -> None:
        """Adds the accepted tokens to the rows; `adaptive`, draft and drafter learn the outcome."""
        eos = self.target.config.eos_token_ids
        for i, (row, (accepted, *tokens)) in enumerate(zip(self.rows, outcome, strict=True)):
            drafted, origin = proposal.lengths[i], proposal.origins[i]
            new, count = row.commit(tokens[: accepted + 1], drafted, origin, eos)
            row.stats.decode_seconds += seconds
            if self.proposes and row.settings.num_draft == AUTO:
                by_draft = drafted if origin == "draft" else 0
                self.adaptive.update(row, self.copies[i], by_draft, new, count)
        if self.plan.usual:
            self.adaptive.costs.update(len(self.rows), self.gamma, max(self.plan.drafted), seconds)
        if self.draft:
            self.draft.update(self.tokens)
        if self.copying:
            self.copy.update(self.tokens)
        self.drop_finished()

    def _collect(self) -> None:
        """Collects what a step needs of the rows, whenever they have changed."""
        self.tokens = [row.tokens for row in self.rows]
        settings, keys = [row.settings for row in self.rows], [row.key for row in self.rows]
        rules = None
        if any(row.processes_logits for row in settings):
            rules = Processing(settings, self.target.config.eos_token_ids)
        self.sampling = Sampling.of(settings, rules, keys)
        self.copying = self.always_copying or any(row.prediction for row in self.rows)
        self.proposes = self.copying or self.draft is not None
        self.idle = False  # what the last plan said of the next step is no longer true


class SpeculativeDecoder:
    """Decodes text to text with a target and, if given, a draft.

        decoder = SpeculativeDecoder.from_pretrained("google/flan-t5-xl")
        result = decoder.generate("translate English to German: I have two cats.", max_tokens=100)
        print(result.text)
        for chunk in decoder.stream("summarize: …", temp=0.7, seed=1):
            print(chunk.text, end="")

    Attributes:
        target: the function target(batch_size, settings), which returns the model that verifies
            proposals. In exact decoding, this model is an `ExactTarget` (network/exact.py).
        scoring: scores and ranks texts with the target alone.
        embeddings: turns texts into vectors with the target's encoder.
    """

    def __init__(
        self,
        model: T5,
        draft_model: T5 | DraftModel | Drafter | None = None,
        tokenizer=None,
        num_draft: int | str | None = None,
        delta: float = 0.0,
        *,
        copy: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
        exact: bool = False,
    ) -> None:
        """Pairs a target with a draft.

        Args:
            model: the target.
            draft_model: a smaller T5 with the same tokenizer, a drafter, or None
                for regular decoding.
            tokenizer: from `model.load`; None if prompts are token ids.
            num_draft: proposals per row in a step, at least 1; "auto" or None chooses the number
                that is fastest at the moment.
            delta: relaxation of the acceptance rule, from 0 (lossless) to 1.
            copy: a drafter that proposes beside a draft model, such as `SourceCopy(tokenizer)`.
            clock: returns seconds, for the statistics.
            exact: whether to give every pass of the target the same shape, so that not even
                rounding makes the tokens depend on the draft, num_draft or the batch's other rows.

        Raises:
            UserError: a value is out of range, or the vocabularies differ.
        """
        self.defaults = Settings(num_draft=AUTO if num_draft is None else num_draft, delta=delta)
        if self.defaults.num_draft == 0:
            raise UserError("num_draft is 0; for regular decoding give no draft model")
        require_all_tokens(model)
        self.model, self.tokenizer, self.clock = model, tokenizer, clock
        if isinstance(draft_model, T5):
            draft_model = DraftModel(draft_model, model)
        self.draft: DraftModel | None = None
        self.copy = copy
        if isinstance(draft_model, DraftModel):
            self.draft = draft_model
        elif draft_model is not None:
            if copy is not None:
                raise UserError("draft_model and copy are drafters; give only one")
            self.copy = draft_model
        self.exact = checked("exact", exact, FLAG)
        self.target: Callable[..., Target] = (
            exact_targets(model, self.defaults) if self.exact else lambda *_: model
        )
        self.adaptive: Adaptive | None = None  # made with the first engine, shared by all engines

    def __repr__(self) -> str:
        models = [f"target {self.model.config.size}"]
        if self.draft:
            models.append(f"draft {self.draft.model.config.size}")
        if self.copy:
            models.append(type(self.copy).__name__)
        default = f"num_draft={self.defaults.num_draft!r}, delta={self.defaults.delta:g}"
        return f"SpeculativeDecoder({', '.join(models)}, {default})"

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        draft: str | Path | None = "auto",
        revision: str | None = None,
        dtype: str | None = None,
        adapter: str | Path | None = None,
        **options: Any,
    ) -> SpeculativeDecoder:
        """Loads a target and a draft by name, and prints to standard error which ones.

        Args:
            model: the target: a folder, the name of one in `models/`, or a Hub id.
            draft: the draft, named in the same way. "auto" uses the target's default draft if it
                has one, "lookup" copies from the source, "NAME+lookup" both uses the draft NAME
                and copies, and None uses no draft.
            revision: branch, tag or commit of the target, if `model` is a Hub id.
            dtype: type to compute in; None is the default of `model.load`, but bfloat16 on a GPU
                for a folder or Hub id in float32 or of torch's `.bin`.
            adapter: folder of a LoRA adapter to merge into the target.
            **options: further arguments of `SpeculativeDecoder`.

        Raises:
            UserError: a model cannot be found or read, or the draft does not fit the target.
        """
        name = NONE if draft is None else str(draft)
        chosen = choose_pair(str(model), name, adapter, revision)
        log(chosen.note)
        return cls.load(chosen, dtype, **options)

    @classmethod
    def load(cls, chosen: ModelPair, dtype: str | None, **options: Any) -> SpeculativeDecoder:
        """Loads a pair; arguments and errors as in `from_pretrained`."""
        pair = load_pair(chosen, dtype)
        return cls(pair.target, pair.draft, pair.tokenizer, copy=pair.copy, **options)

    def generate(
        self,
        prompts: str | Iterable[str] | Iterable[int] | Iterable[Iterable[int]],
        max_tokens: int = 256,
        temp: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | Sequence[int] = 0,
        batch_size: int = DEFAULT_BATCH_SIZE,
        num_samples: int = 1,
        prediction: Any = None,
        reuse: bool = True,
        attention_mask: Any = None,
        **options: Any,
    ) -> Result | list[Result]:
        """Decodes one prompt or several.

        Args:
            prompts: a text, a list of texts, a list of token ids, or a list of lists of token ids.
            max_tokens: maximum number of generated tokens per prompt, EOS included.
            temp: temperature; 0 is greedy.
            top_k: samples from the top_k likeliest tokens only; 0 is off.
            top_p: samples from the fewest likeliest tokens with a total probability of at least
                top_p; 1 is off.
            seed: one seed for the call, or a list with one seed per prompt. With one seed, prompt
                i uses the seed's random stream i. With a list, prompt i gives the same tokens as if
                decoded alone with seed[i].
            batch_size: maximum number of rows decoded at once, which bounds memory; clamped to
                1024.
            num_samples: results per prompt, each from its own random stream; several need temp > 0.
            prediction: the expected output, as text or token ids, to copy proposals from; for a
                list of prompts, a list with a prediction or None for each prompt.
            reuse: whether greedy prompts with equal tokens are decoded once.
            attention_mask: for token ids, 0 for each that must be ignored and 1 for the others, as
                in transformers; for a list of prompts, a list with a mask or None for each prompt.
            **options: further arguments of `request`: the other generation settings, such as
                repetition_penalty, and those that cut texts into pieces or translate them.

        Returns:
            One result, or a list in the order of the prompts. If prompts have several results
            each, the results of the same prompt are adjacent in the list.

            In a list, a prompt that fails leaves the other results unchanged; its own result has
            `finish_reason` "error". A prompt fails if it is empty, is neither text nor token ids,
            has an id outside the vocabulary, needs too much memory, or gives NaN or infinite
            logits.

        Raises:
            UserError: a value is out of range, or the only prompt cannot be decoded.
        """
        given, single = checked_prompts(prompts, seed, prediction, attention_mask)
        predicted = any(prompt.prediction is not None for prompt in given)
        options.update(max_tokens=max_tokens, temp=temp, top_k=top_k, top_p=top_p)
        request = self.request(0, num_samples, reuse, predicted=predicted, **options)
        results = list(self.results(given, request, batch_size))
        if single and results[0].error:
            raise UserError(results[0].error)
        return results[0] if single and len(results) == 1 else results

    def request(
        self,
        seed: int = 0,
        num_samples: int = 1,
        reuse: bool = True,
        *,
        stream: bool = False,
        predicted: bool = False,
        split: str | None = None,
        prefix: str | None = None,
        target_language: str = "",
        source_language: str = "",
        max_source_tokens: int | None = None,
        file_type: str = "",
        num_draft: int | str | None = None,
        **settings: Any,
    ) -> GenerationRequest:
        """Returns how to decode prompts; errors as in `generate`.

        Args:
            seed: one seed for all prompts.
            num_samples: results per prompt.
            reuse: whether greedy prompts with equal tokens are decoded once.
            stream: whether texts are read while they grow, by `chunks`.
            predicted: whether some prompt has a prediction, so that no text to translate is cut.
            split: "sentences" or "lines" makes each prompt a document, decoded in such pieces.
            prefix: text to put before every piece; see `DocumentOptions` (text/documents.py), also
                for the next arguments.
            target_language: "de" translates texts with the model's own prefix, sentence by sentence
                unless `split` says otherwise.
            source_language: "en" is needed where the model translates from several languages.
            max_source_tokens: maximum number of tokens in a piece.
            file_type: ".srt" or ".vtt" for subtitles.
            num_draft: None stands for the number given to the decoder.
            **settings: max_tokens, min_tokens, temp, top_k, top_p, min_p, delta,
                repetition_penalty, no_repeat_ngram_size, stop, repetition_detection, num_beams,
                length_penalty, early_stopping, num_return_sequences, logits_processors,
                bad_words_ids, suppress_tokens, forced_bos_token_id, forced_eos_token_id; see
                `settings.Settings`.
        """
        if num_draft is None:
            num_draft = self.defaults.num_draft
        unknown = settings.keys() - vars(self.defaults).keys()
        if unknown:
            raise unexpected(min(unknown))
        if target_language and settings.get("num_beams", 1) == 1:
            settings = {**Settings.TRANSLATING, **settings}
        values = replace(self.defaults, num_draft=num_draft, **settings)
        seed, num_samples = checked("seed", seed), checked("num_samples", num_samples)
        several = num_samples > 1 or values.num_return_sequences > 1
        if num_samples > 1 and values.temp == 0:
            raise UserError("num_samples requires temp above 0")
        unit = split_unit(split, target_language, whole=several or predicted)
        if several and unit != "none":
            raise UserError("num_samples and num_return_sequences cannot be combined with split")
        of_cuts = prefix, max_source_tokens, file_type, not target_language and source_language
        if unit == "none" and any(of_cuts):
            raise UserError("prefix, source_language, max_source_tokens and file_type need split")
        if target_language and prefix is not None:
            raise UserError("prefix cannot be combined with target_language")
        if target_language:
            prefix, source_language = self.translations.prefix(target_language, source_language)
        of_pieces = prefix, source_language, max_source_tokens, file_type
        document = DocumentOptions(unit, *of_pieces, target_language)
        return GenerationRequest(values, seed, num_samples, document, stream, reuse=reuse)

    def results(
        self,
        prompts: Iterable[Prompt | str | Sequence[int] | Exception],
        request: GenerationRequest | None = None,
        batch_size: int = DEFAULT_BATCH_SIZE,
        ready: Callable[[], bool] = lambda: True,
    ) -> Iterator[Result]:
        """Decodes prompts as a request says, and yields the results in the order of the prompts.

        Prompts are read lazily, so their number is not limited.

        Args:
            prompts: texts or token ids, or `text.prompts.Prompt`, which may have a prediction, an
                index, a seed and a mask. An exception in place of a prompt becomes its result's
                error.
            request: how to decode the prompts, made by `request`; None for the defaults.
            batch_size: as in `generate`.
            ready: while rows are decoding, the next prompt is read only if `ready` returns True, so
                that reading never delays the rows.
        """
        for row in self._finished_rows(prompts, request or self.request(), batch_size, ready):
            several = row.settings.num_return_sequences > 1
            for text in texts_of(row) if several else [row]:
                result = text.chunk().result if text.document else text.result()
                if result:
                    yield result

    def _finished_rows(
        self, prompts: Any, request: GenerationRequest, batch_size: int, ready: Any = lambda: True
    ) -> Iterator[Row]:
        self.model.require_decoder()
        engine = self.engine(request.settings, checked("batch_size", batch_size))
        rows = rows_of(numbered(prompts), request, self.tokenizer, self.model.config)
        return scheduler.decode_rows(engine, rows, batch_size, ready)

    def stream(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 256,
        seed: int = 0,
        batch_size: int = DEFAULT_BATCH_SIZE,
        prediction: str | Sequence[int] | None = None,
        attention_mask: Sequence[int] | None = None,
        **options: Any,
    ) -> Generator[Chunk, None, None]:
        """Decodes one prompt, step by step; arguments and errors as in `generate`.

        In exact decoding, the tokens equal those of `generate` for the same `batch_size`.

        Yields:
            A chunk per step, or per piece of a document. The chunks' texts, joined, are the
            result's text.
        """
        predicted = prediction is not None
        request = self.request(
            seed, stream=True, predicted=predicted, max_tokens=max_tokens, **options
        )
        source = Prompt(prompt, prediction=prediction, attention_mask=attention_mask)
        chunks = self.chunks(source, request, batch_size)
        return _with_errors_raised(chunks)

    def chunks(
        self, prompt: Prompt, request: GenerationRequest, batch_size: int = DEFAULT_BATCH_SIZE
    ) -> Generator[Chunk, None, None]:
        """Does what `stream` does, by a request with stream=True; a document keeps its error."""
        self.model.require_decoder()
        if request.document.split != "none":
            rows = self._finished_rows([prompt], request, batch_size)
            return (with_token_texts(row.chunk(), self.tokenizer) for row in rows)
        if request.settings.num_beams > 1:
            beams = f"num_beams is {request.settings.num_beams}"
            raise UserError(f"{beams}: the text is known at the end only; stream without beams")
        row = next(request.rows(prompt, self.tokenizer, self.model.config.vocab_size))
        if row.error:
            raise UserError(row.error)
        engine = self.engine(request.settings, checked("batch_size", batch_size))
        return (row.chunk() for _ in scheduler.follow(engine, row))

    def score(
        self,
        prompts: Any,
        targets: Any,
        batch_size: int = DEFAULT_BATCH_SIZE,
        attention_mask: Any = None,
    ) -> list[Score]:
        """Returns the log-probabilities of given target texts; see `Scoring.score`."""
        return self.scoring.score(prompts, targets, batch_size, attention_mask)

    def rerank(
        self, query: str, documents: Sequence[str], top_n: int | None = None, **options: Any
    ) -> list[Ranked]:
        """Ranks documents by relevance to a query, with a monoT5 model; see `Scoring.rerank`."""
        return self.scoring.rerank(query, documents, top_n, **options)

    def embed(
        self,
        prompts: Any,
        normalize: bool = False,
        batch_size: int = DEFAULT_BATCH_SIZE,
        attention_mask: Any = None,
    ) -> np.ndarray:
        """Returns one vector per prompt, float32 (prompts, size); see `Embeddings.embed`."""
        return self.embeddings.embed(prompts, normalize, batch_size, attention_mask)

    @cached_property
    def scoring(self) -> Scoring:
        return Scoring(self.model, self.tokenizer)

    @cached_property
    def embeddings(self) -> Embeddings:
        return Embeddings(self.model, self.tokenizer)

    @cached_property
    def translations(self) -> Translations:
        """The pairs of languages that the model translates, and the prefix of each."""
        vocabulary = self.tokenizer.get_vocab() if self.tokenizer else {}
        config = self.model.config
        return Translations.of(config.tasks, vocabulary, config.translation_prefix)

    def engine(self, settings: Settings, batch_size: int = DEFAULT_BATCH_SIZE) -> Engine | Beams:
        """Returns an empty batch and restarts the measurement of peak memory.

        Args:
            settings: the settings that most rows will have; num_beams must be that of all rows.
            batch_size: maximum number of rows in flight.

        Raises:
            UserError: exact decoding does not support these settings or this device.
        """
        target = self.target(batch_size, settings)
        mx.reset_peak_memory()
        if settings.num_beams > 1:
            return Beams(self.model, settings.num_beams, self.clock)
        draft = self.draft.empty() if self.draft else None
        copy = self.copy.empty() if self.copy else None
        if self.adaptive is not None:
            return Engine(target, draft, copy, self.clock, self.adaptive.new_call())
        engine = Engine(target, draft, copy, self.clock)
        self.adaptive = engine.adaptive  # so that later engines go on from what this one learns
        return engine


def _with_errors_raised(chunks: Iterable[Chunk]) -> Generator[Chunk, None, None]:
    for chunk in chunks:
        if chunk.result and chunk.result.error:
            raise UserError(chunk.result.error)
        yield chunk

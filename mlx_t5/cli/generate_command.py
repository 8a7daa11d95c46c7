"""Decodes or scores prompts, and writes the results: the body of `mlx_t5.generate` (main.py)."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mlx_t5 import loading
from mlx_t5.backend import device_name, mx
from mlx_t5.checkpoints import generation_config
from mlx_t5.checkpoints.config import read_config
from mlx_t5.cli.arguments import BAD_INPUT, INTERRUPTED, log, message_of, resuming_command
from mlx_t5.cli.generate_options import MainOptions
from mlx_t5.cli.input import Line, Lines
from mlx_t5.cli.output import TokenHighlighter, error_of, open_output, summary
from mlx_t5.cli.resuming import ResumePoint, find_resume_point
from mlx_t5.cli.streaming import progress_bar, write_text
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.engine.document_results import DocumentStats
from mlx_t5.engine.generation_request import GenerationRequest
from mlx_t5.errors import UserError
from mlx_t5.loading import ModelPair
from mlx_t5.settings import NONE, Settings
from mlx_t5.text.prompts import DocumentOptions
from mlx_t5.text.tokenizer import encode

LONG_PROMPT = 2048  # tokens, if the model does not say how many it was trained with


def generate_command(inputs: Sequence[MainOptions]) -> int:
    """Decodes each input with the same models; returns the exit status."""
    common = inputs[0]
    draft = common.draft_model
    searches = common.settings.get("num_beams", 1) > 1  # which has no draft
    if common.regular_decode or searches or not common.writes_text:
        draft = NONE
    models = loading.choose_pair(common.model, draft, common.adapter_path)
    # The settings in the model's own files; later ones override earlier ones.
    presets = []
    if not common.ignore_generation_config:
        presets.append(generation_config.read_generation_config(models.target))
    if common.task is not None:
        tasks = generation_config.read_tasks(models.target)
        presets.append(generation_config.find_task(tasks, common.task))
    requests = [_request(options, presets) for options in inputs]
    decoder, language, is_loading, status, failed = None, None, False, 0, list[str]()
    for options, request in zip(inputs, requests, strict=True):
        if options.place:
            # A copy, whose input is closed with it: many files may not be open at once.
            options = replace(options)
        try:
            done = _resume_point(options) if options.resume else ResumePoint()
            if done is None:
                continue
            if decoder is None:
                is_loading = True
                decoder = _load(models, presets, request, options)
                if options.target_language:
                    names = options.target_language, options.source_language
                    language = decoder.translations.prefix(*names)
                is_loading = False
            if language:
                prefix, code = language
                document = replace(request.document, prefix=prefix, source_language=code)
                request = replace(request, document=document)
            status = _decode(decoder, options, request, done)
        except Exception as error:
            message = message_of(error)
            if is_loading or not options.place or message is None:
                raise  # it does not concern one file of several alone
            name, place = str(options.input_file), options.place
            if message.startswith(name):
                place = place.removesuffix(f"{name}: ")
            log(f"error: {place}{message}")
            status = BAD_INPUT
        if status == INTERRUPTED:
            return INTERRUPTED
        if status and options.place:
            failed.append(options.input_file or "")
    if failed:
        have = "has" if len(failed) == 1 else "have"
        log(f"error: {len(failed)} of {len(inputs)} files {have} errors: {', '.join(failed)}")
        return BAD_INPUT
    return status


def _resume_point(options: MainOptions) -> ResumePoint | None:
    """What an earlier run has written; None if that is all."""
    if options.is_output_whole:  # a file among several; it is there if it is complete
        exists = Path(options.output_file or "").exists()
        return None if exists else ResumePoint()
    lines, texts = options.lines, options.texts_per_prompt
    result = "text" if options.json else None
    if not options.writes_text:
        result = "logprob" if options.score else "embedding"
    done = find_resume_point(options.output_file or "", lines, texts, result, lines.count)
    of_all = f" of {lines.count}" if lines.count else ""
    kept = f"{done.prompts * texts} lines are kept"
    log(f"{options.place}resuming: {kept}, {done.prompts}{of_all} prompts are done")
    return None if lines.count == done.prompts > 0 else done


def _decode(
    decoder: SpeculativeDecoder, options: MainOptions, request: GenerationRequest, done: ResumePoint
) -> int:
    """Decodes one input, and writes its results; returns the exit status."""
    # Unlike other texts, subtitles do not begin with a prefix of their own.
    lacks_prefix = options.file_type and options.is_document and request.document.prefix is None
    if lacks_prefix and (decoder.translations.tags or decoder.model.config.tasks):
        cure = 'give --target-language, --task or --prefix (--prefix "" for none)'
        raise UserError(f"this model needs to know what to do with subtitles; {cure}")
    highlighter = None
    where = sys.stderr if options.json or options.output_file else sys.stdout
    if options.verbose and options.writes_text and TokenHighlighter.suits(where):
        highlighter = TokenHighlighter(decoder.tokenizer)
        log(highlighter.legend)
    if options.place and options.output_file:
        Path(options.output_file).parent.mkdir(parents=True, exist_ok=True)
    if request.stream:
        line = next(options.lines)  # the only one
        note_long(line, request, decoder)
        return write_text(decoder, line, request, options, highlighter)
    return _write_all(decoder, options.lines, request, done, highlighter, options)


def _request(options: MainOptions, presets: list[generation_config.Preset]) -> GenerationRequest:
    """How to decode; what the user omits is from the presets."""
    given = *(preset.settings for preset in presets), options.settings
    defaults = Settings.TRANSLATING if options.target_language else {}
    settings = Settings(**generation_config.combined(defaults, *given))
    if options.num_samples > 1 and settings.temp == 0:
        raise UserError("--num-samples requires --temp above 0")
    prefix = options.prefix
    if prefix is None:  # without any prefix, each text to cut is searched for one at its beginning
        prefix = "".join(preset.prefix for preset in presets) or None
    limit, file_type = options.max_source_tokens, options.file_type
    source, target = options.source_language, options.target_language
    document = DocumentOptions(options.unit, prefix, source, limit, file_type, target)
    # A text is streamed if it is the only one, or a document.
    one = len(options.prompt or [""]) == 1 and (not options.input_file or options.is_document)
    whole = options.num_samples == settings.num_beams == 1 and not options.output_file
    streamed = one and not options.json and options.writes_text
    streamed = streamed and (whole or options.unit != "none")
    return GenerationRequest(settings, options.seed, options.num_samples, document, streamed)


def _load(
    models: ModelPair,
    presets: list[generation_config.Preset],
    request: GenerationRequest,
    options: MainOptions,
) -> SpeculativeDecoder:
    """Loads the models, and logs notes about them and their settings."""
    num_draft = request.settings.num_draft if options.exact else None  # sets the passes' width
    decoder = SpeculativeDecoder.load(
        models, options.dtype, num_draft=num_draft, exact=options.exact
    )
    if options.writes_text:
        decoder.model.require_decoder()
    if decoder.tokenizer is None and "chronos_config" in read_config(models.target):
        cause = "the model continues series of numbers, and has no tokenizer for text"
        raise UserError(f"{cause}; call it in Python as docs/forecasting.md does")
    if options.translation_prefix:
        template = options.translation_prefix
        decoder.translations = replace(decoder.translations, template=template)
    if options.exact:
        decoder.engine(request.settings, options.batch_size)  # refuses settings that do not fit
    notes = [models.note, f"on {device_name()}" if options.verbose else ""]
    if request.settings.num_beams > 1 and options.draft_model not in (None, NONE):
        notes.append(f"--draft-model {options.draft_model} is not used: beams have no draft")
    if options.writes_text:
        notes += [preset.note for preset in presets if preset.left_out]
        if request.settings.temp == 0:
            notes += [preset.unread_note for preset in presets if preset.unread]
        beams = [preset.beams_note for preset in presets if preset.num_beams > 1]
        notes += beams[-1:] if "num_beams" not in options.settings else []
    prefix = options.prefix or ""
    if prefix[-1:].isascii() and (prefix[-1:].isalnum() or prefix.endswith(":")):
        notes.append(f"note: --prefix {prefix!r} has no space at its end, so the text joins it")
    for note in filter(None, notes):
        log(note)
    return decoder


def note_long(line: Line, request: GenerationRequest, decoder: SpeculativeDecoder) -> bool:
    """Notes a prompt longer than the model's n_positions or LONG_PROMPT; returns whether it is.

    From then on, a terminal shows how far encoding is. Documents are cut into pieces that fit.
    """
    pooled = decoder.model.pooling.max_tokens  # what is embedded is cut, too
    trained = decoder.model.config.n_positions
    limit = trained or LONG_PROMPT
    if decoder.tokenizer is None or pooled or request.document.split != "none":
        return False
    # A text of fewer bytes has fewer tokens, so it need not be tokenized here.
    if (
        len(line.text.encode()) < limit
        or (count := len(encode(decoder.tokenizer, line.text))) <= limit
    ):
        return False
    more = f", more than the model's n_positions ({trained})" if trained else ""
    log(f"note: a prompt has {count:,} tokens{more}; encoding takes long, and the text may be poor")
    if sys.stderr.isatty():
        decoder.model.progress = partial(tqdm, desc="encoding", unit=" layers", leave=False)
    return True


def _outcomes(
    decoder: SpeculativeDecoder,
    lines: Iterator[Line],
    ready: Any,
    request: GenerationRequest,
    options: MainOptions,
) -> Iterator[Any]:
    """Computes the texts, scores or vectors of lines."""
    size = options.batch_size
    if options.writes_text:
        return decoder.results(lines, request, size, ready)
    prefix = request.document.prefix or ""
    if prefix:
        lines = (
            line if isinstance(line.source, Exception) else replace(line, source=prefix + line.text)
            for line in lines
        )
    if options.score:
        return decoder.scoring.scores((line.pair for line in lines), size, ready)
    return decoder.embeddings.vectors(lines, options.normalize, size, ready)


def _write_all(
    decoder: SpeculativeDecoder,
    lines: Lines,
    request: GenerationRequest,
    done: ResumePoint,
    highlighter: TokenHighlighter | None,
    options: MainOptions,
) -> int:
    """Writes results and errors in prompt order, and logs a summary; returns the exit status."""
    texts = options.texts_per_prompt
    unit = "prompts" if texts == 1 else "texts"
    total = lines.count and lines.count * texts
    in_hand = deque[Line]()  # lines that have been read, but not all of whose results are written

    def read() -> Iterator[Line]:
        noted = False
        for line in lines:
            noted = noted or note_long(line, request, decoder)
            in_hand.append(line)
            yield line

    began = time.perf_counter() - lines.waited
    stats, results, status, interrupted = DocumentStats(), 0, 0, ""
    mx.reset_peak_memory()
    try:
        with (
            open_output(options, done.size, highlighter) as output,
            progress_bar(total, done.prompts * texts, unit, options) as bar,
        ):
            for outcome in _outcomes(decoder, read(), lines.ready, request, options):
                line = in_hand[0]
                output.write(line, outcome)
                if error := error_of(outcome):
                    status = BAD_INPUT
                    unread = isinstance(line.source, Exception)  # its error names the line
                    where = "" if unread else f"prompt {line.index + 1}: "
                    log(f"error: {where}{error}")
                results += 1
                if results % texts == 0:
                    in_hand.popleft()
                if of_outcome := getattr(outcome, "stats", None):  # scores and vectors have none
                    stats.add(of_outcome)
                    if outcome.finish_reason == "length" and not outcome.pieces:
                        stats.length += 1
                bar.update()
    except KeyboardInterrupt:
        of_all = f" of {total}" if total else ""
        status, interrupted = INTERRUPTED, f"interrupted: {results}{of_all} {unit} done · "
    stats.peak_memory_bytes = mx.get_peak_memory()
    seconds = time.perf_counter() - lines.waited - began  # waiting for input is not counted
    sums = summary(stats, results, seconds, unit, options.writes_text, stats.length)
    log(options.place + interrupted + sums)
    if status == INTERRUPTED and options.output_file and (options.is_resumable or options.place):
        log(f"go on with: {resuming_command('generate', options.argv)}")
    return status

"""Decodes or scores prompts, and writes the results: the body of `mlx_t5.generate` (main.py)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mlx_t5 import loading
from mlx_t5.backend import device_name, mx
from mlx_t5.checkpoints import generation_config
from mlx_t5.cli.arguments import BAD_INPUT, INTERRUPTED, log
from mlx_t5.cli.generate_options import DEFAULT_PROMPT, MainOptions
from mlx_t5.cli.input import Lines
from mlx_t5.cli.output import Painter, error_of, open_output, summary
from mlx_t5.cli.runs import Compute, Run, note_long, prefixed, unpaired
from mlx_t5.cli.streaming import progress_bar, write_text
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.engine.codec import Job
from mlx_t5.engine.document_batch import DocumentStats
from mlx_t5.errors import UserError
from mlx_t5.loading import ModelPair
from mlx_t5.settings import NONE, Settings
from mlx_t5.text.documents import Cutting


def generate(options: MainOptions, prompts: list[str] | Lines) -> int:
    draft = options.draft_model
    beams = options.settings.get("num_beams", 1) > 1 and draft is None  # which use no draft
    if options.regular_decode or beams or not options.writes_text:
        draft = NONE
    models = loading.choose_pair(options.model, draft, options.adapter_path)
    # The settings in the model's own files; later ones override earlier ones.
    presets = []
    if not options.ignore_generation_config:
        presets.append(generation_config.read_generation_config(models.target))
    if options.task is not None:
        tasks = generation_config.read_tasks(models.target)
        presets.append(generation_config.find_task(tasks, options.task))
    job = _job(options, presets)
    remaining = Run(prompts, options, job)
    if options.resume:
        of_all = f" of {remaining.count}" if remaining.count else ""
        lines = remaining.first * remaining.texts
        log(f"resuming: {lines} lines are kept, {remaining.first}{of_all} prompts are done")
        if remaining.count == remaining.first > 0:
            return 0
    decoder = _load(models, presets, job, options)
    if job.target_language:
        job = job.translating(decoder.translations)
    painter = None
    where = sys.stderr if options.json or options.output_file else sys.stdout
    if options.verbose and options.writes_text and Painter.suits(where):
        painter = Painter(decoder.tokenizer)
        log(painter.legend)
    if job.stream and isinstance(prompts, list):
        (prompt,) = note_long(prompts, job, decoder)
        return write_text(decoder, prompt, job, options, painter)
    return _write_all(remaining, _computation(decoder, job, options), painter, options)


def _job(options: MainOptions, presets: list[generation_config.Preset]) -> Job:
    """How to decode; what the user omits is from the presets."""
    given = *(preset.settings for preset in presets), options.settings
    settings = Settings(**generation_config.combined(*given))
    if options.num_samples > 1 and settings.temp == 0:
        raise UserError("--num-samples requires --temp above 0")
    of_presets, cutting = "".join(preset.prefix for preset in presets), None
    prefix = of_presets if options.prefix is None else options.prefix
    if options.unit != "none":
        # Without any prefix, each text is searched for a prefix at its beginning.
        fixed = prefix if prefix or options.prefix is not None else None
        limit = options.max_source_tokens
        source = options.source_language
        cutting, prefix = Cutting(options.unit, fixed, source, limit, options.file_type), ""
    # A text is streamed if it is the only one, or a document.
    one = len(options.prompt or [""]) == 1 and (not options.input_file or options.is_document)
    whole = options.num_samples == settings.num_beams == 1 and not options.output_file
    streamed = one and not options.json and options.writes_text and (whole or cutting is not None)
    return Job(
        settings,
        options.seed,
        options.num_samples,
        cutting,
        stream=streamed,
        prefix=prefix,
        target_language=options.target_language,
        source_language=options.source_language,
    )


def _load(
    models: ModelPair, presets: list[generation_config.Preset], job: Job, options: MainOptions
) -> SpeculativeDecoder:
    """Loads the models, and logs notes about them and their settings."""
    pair = loading.load_pair(models, options.dtype)
    if options.writes_text:
        pair.target.require_decoder()
    num_draft = job.settings.num_draft if options.exact else None  # sets the passes' width
    decoder = SpeculativeDecoder(
        pair.target, pair.draft, pair.tokenizer, num_draft, copy=pair.copy, exact=options.exact
    )
    if options.translation_prefix:
        template = options.translation_prefix
        decoder.translations = replace(decoder.translations, template=template)
    if options.exact:
        decoder.engine(job.settings, options.batch_size)  # refuses settings that do not fit
    notes = [models.note, f"on {device_name()}" if options.verbose else ""]
    if options.writes_text:
        notes += [preset.note for preset in presets]
        notes += [preset.unread_note for preset in presets if job.settings.temp == 0]
        beams = [preset.beams_note for preset in presets if preset.num_beams > 1]
        notes += beams[-1:] if "num_beams" not in options.settings else []
    notes += [] if options.prompt or options.input_file else [f"prompt: {DEFAULT_PROMPT}"]
    for note in filter(None, notes):
        log(note)
    return decoder


def _computation(decoder: SpeculativeDecoder, job: Job, options: MainOptions) -> Compute:
    """Returns the function that computes texts, scores or vectors from prompts."""
    batch_size = options.batch_size

    def compute(prompts: Iterator[Any], indexes: Iterator[int], ready: Any) -> Iterator[Any]:
        prompts = note_long(prompts, job, decoder)
        if options.writes_text:
            prompts, predictions = unpaired(prompts)
            return decoder.results(prompts, job, batch_size, ready, indexes, predictions)
        prompts = prefixed(prompts, job.prefix)
        if options.score:
            return decoder.scoring.scores(prompts, batch_size, ready)
        return decoder.embeddings.vectors(prompts, options.normalize, batch_size, ready)

    return compute


def _write_all(run: Run, compute: Compute, painter: Painter | None, options: MainOptions) -> int:
    """Writes results and errors in prompt order, and logs a summary; returns the exit status."""
    began, stats, results, status, interrupted = run.clock(), DocumentStats(), 0, 0, ""
    unit = "prompts" if run.texts == 1 else "texts"
    mx.reset_peak_memory()
    total, done = run.count and run.count * run.texts, run.first * run.texts
    try:
        with (
            open_output(options, run.keep, painter) as output,
            progress_bar(total, done, unit, options) as shown,
        ):
            for n, prompt, outcome in run.outcomes(compute):
                output.write(prompt, outcome)
                if error := error_of(outcome):
                    status = BAD_INPUT
                    where = "" if isinstance(prompt, UserError) else f"prompt {n}: "
                    log(f"error: {where}{error}")
                results += 1
                if of_outcome := getattr(outcome, "stats", None):  # scores and vectors have none
                    stats.add(of_outcome)
                shown.update()
    except KeyboardInterrupt:
        of_all = f" of {total}" if total else ""
        status, interrupted = INTERRUPTED, f"interrupted: {results}{of_all} {unit} done · "
    stats.peak_memory_bytes = mx.get_peak_memory()
    log(interrupted + summary(stats, results, run.clock() - began, unit, options.writes_text))
    return status

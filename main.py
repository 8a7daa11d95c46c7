"""Command line: reads prompts, and writes texts and statistics.

    python main.py                                  # the default prompt, the bundled models
    python main.py --prompt "fix grammar: She have two cat."
    python main.py --model t5-11b --draft-model t5-small --input-file prompts.txt

Generated text goes to standard output or --output-file, and everything else to standard error. The
exit status is 0 if all is done, 2 for bad input (one line `error: …`), and 130 after Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_t5.checkpoints.generation_config import (
    Preset,
    combined,
    find_task,
    read_generation_config,
    read_tasks,
)
from mlx_t5.cli.arguments import BAD_INPUT, INTERRUPTED, log, run
from mlx_t5.cli.input import Lines, read_document, read_prompts
from mlx_t5.cli.options import DEFAULT_PROMPT, MainOptions, cutting_of, read_options
from mlx_t5.cli.output import (
    ARRAY,
    LineFile,
    LineOf,
    Painter,
    check_output_file,
    embedding_object,
    error_of,
    score_object,
    text_lines,
)
from mlx_t5.cli.runs import Compute, MainJob, Run, lines_of, prefixed, unpaired
from mlx_t5.cli.streaming import progress_bar, write_text
from mlx_t5.errors import UserError
from mlx_t5.settings import NONE, Settings

if TYPE_CHECKING:
    from decoder import SpeculativeDecoder
    from mlx_t5.cli.array_file import ArrayFile
    from mlx_t5.loading import ModelPair


def main(argv: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments after the program's name; None: the process's own arguments.

    Returns:
        The exit status.
    """
    return run(lambda: _run(read_options(argv)))


def _run(options: MainOptions) -> int:
    prompts = _prompts(options)
    if options.output_file:
        check_output_file(options.output_file, options.input_file)
    models = _choose(options)
    presets = _presets(options, models.target)
    job = _job(options, models, presets)
    if job.spec.stream and isinstance(prompts, list):
        decoder = _load(job)
        painter = _begin(decoder, job, presets)
        return write_text(decoder, prompts[0], job, painter)
    run = Run.of(prompts, job)
    if options.resume:
        run.log_resumed()
        if run.count == run.first > 0:
            return 0
    decoder = _load(job)
    painter = _begin(decoder, job, presets)
    return _write_all(run, _computation(decoder, job), _output(run, painter, options), options)


def _is_streamed(options: MainOptions, settings: Settings) -> bool:
    """Returns whether to stream the text, which needs a single prompt or a single document."""
    several = len(options.prompt or []) > 1 or (options.input_file and not options.is_document)
    if several or options.json or not options.writes_text:
        return False
    one = options.num_samples == settings.num_beams == 1
    return (one and not options.output_file) or options.split != "none"


def _prompts(options: MainOptions) -> list[str] | Lines:
    if options.input_file:
        if options.is_document:
            return [read_document(options.input_file, options.file_type)]
        return lines_of(options.input_file, options)
    return read_prompts(options.prompt or [DEFAULT_PROMPT])


def _choose(options: MainOptions) -> ModelPair:
    # Imported late, so that `--help` and errors about options do not wait for MLX.
    from mlx_t5 import loading

    draft = options.draft_model
    beams = options.settings.get("num_beams", 1) > 1 and draft is None  # which use no draft
    if options.regular_decode or beams or not options.writes_text:
        draft = NONE
    return loading.choose_pair(options.model, draft, options.adapter_path)


def _presets(options: MainOptions, folder: Path) -> list[Preset]:
    """Returns the settings in the model's own files: general ones, then those of the task.

    Later settings override earlier ones.
    """
    presets = [] if options.ignore_generation_config else [read_generation_config(folder)]
    task = options.task
    return presets if task is None else [*presets, find_task(read_tasks(folder), task)]


def _job(options: MainOptions, models: ModelPair, presets: list[Preset]) -> MainJob:
    """Returns what to run and how; settings that the user omits come from the presets."""
    sources = [preset.settings for preset in presets]
    settings = Settings(**combined(*sources, options.settings))
    if options.num_samples > 1 and settings.temp == 0:
        raise UserError("--num-samples requires --temp above 0")
    prefix = options.prefix
    if prefix is None:
        prefix = "".join(preset.prefix for preset in presets)
    from mlx_t5.engine.codec import Job

    how = options.seed, options.num_samples, cutting_of(options, prefix)
    spec = Job(settings, *how, stream=_is_streamed(options, settings))
    return MainJob(options, spec, prefix, models)


def _load(job: MainJob) -> SpeculativeDecoder:
    from decoder import SpeculativeDecoder
    from mlx_t5 import loading

    options = job.options
    target, drafter, tokenizer, other = loading.load_pair(job.models, options.dtype)
    if options.writes_text:
        target.require_decoder()
    num_draft = job.spec.settings.num_draft if options.exact else None  # sets the passes' width
    return SpeculativeDecoder(
        target, drafter, tokenizer, num_draft, draft_tokenizer=other, exact=options.exact
    )


def _begin(decoder: SpeculativeDecoder, job: MainJob, presets: list[Preset]) -> Painter | None:
    """Checks the settings if --exact is given; then logs notes about the models and settings.

    Returns:
        The painter that colors texts for --verbose; None if nothing is colored.
    """
    from mlx_t5.backend import device_name

    options = job.options
    if options.exact:
        decoder.engine(job.spec.settings, options.batch_size)  # may raise UserError
    texts, verbose = options.writes_text, options.verbose
    painter = Painter(decoder.tokenizer) if verbose and texts else None
    notes = [job.models.note, f"on {device_name()}" if verbose else ""]
    notes += [preset.note for preset in presets if texts]
    notes += [] if options.prompt or options.input_file else [f"prompt: {DEFAULT_PROMPT}"]
    notes += [painter.legend] if painter else []
    for note in filter(None, notes):
        log(note)
    return painter


def _computation(decoder: SpeculativeDecoder, job: MainJob) -> Compute:
    """Returns the function that computes texts, scores or vectors from prompts."""
    options, batch_size = job.options, job.options.batch_size

    def compute(prompts: Iterator[Any], indexes: Iterator[int], ready: Any) -> Iterator[Any]:
        prompts = prompts if job.spec.cutting else prefixed(prompts, job.prefix)
        if options.score:
            return decoder.scoring.scores(prompts, batch_size, ready)
        if options.embed:
            return decoder.embeddings.vectors(prompts, options.normalize, batch_size, ready)
        prompts, predictions = unpaired(prompts)
        return decoder.results(prompts, job.spec, batch_size, ready, indexes, predictions)

    return compute


def _output(run: Run, painter: Painter | None, options: MainOptions) -> LineFile | ArrayFile:
    """Returns the object that formats the results and writes them."""
    if options.embed and (run.output_file or "").endswith(ARRAY):
        from mlx_t5.cli.array_file import ArrayFile

        return ArrayFile(str(run.output_file))
    if options.score:
        line_of: LineOf = score_object
    elif options.embed:
        line_of = embedding_object
    else:
        line_of = text_lines(options.json, bool(run.output_file) or options.json, painter)
    return LineFile(run.output_file, run.keep, line_of)


def _write_all(
    run: Run, compute: Compute, output: LineFile | ArrayFile, options: MainOptions
) -> int:
    """Writes results and errors in prompt order, and logs a summary; returns the exit status."""
    from mlx_t5.backend import mx
    from mlx_t5.cli.totals import Totals

    began, totals, status = run.clock(), Totals(), 0
    per_prompt = run.outcomes_a_prompt
    unit = "prompts" if per_prompt == 1 else "texts"
    mx.reset_peak_memory()
    total, done = run.count and run.count * per_prompt, run.first * per_prompt
    with output, progress_bar(total, done, unit, options) as shown:
        try:
            for n, prompt, outcome in run.outcomes(compute):
                output.write(prompt, outcome)
                if error := error_of(outcome):
                    status = BAD_INPUT
                    where = "" if isinstance(prompt, UserError) else f"prompt {n}: "
                    log(f"error: {where}{error}")
                totals.add(outcome)
                shown.update()
        except KeyboardInterrupt:
            status = INTERRUPTED
    totals.stats.peak_memory_bytes = mx.get_peak_memory()
    interrupted = ""
    if status == INTERRUPTED:
        of_all = f" of {total}" if total else ""
        interrupted = f"interrupted: {totals.results}{of_all} {unit} done · "
    seconds = run.clock() - began
    log(interrupted + totals.summary(seconds, unit, options.writes_text, options.verbose))
    return status


if __name__ == "__main__":
    sys.exit(main())

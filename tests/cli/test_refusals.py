"""Refused options: one table a command. Each is one line and status 2, and nothing is written."""

import json
import shlex
from pathlib import Path

import pytest

import convert
import distill
import finetune
import main
import server
from command_line import ROOT
from mlx_t5.cli.server_options import KEY_VARIABLE
from mlx_t5.settings import UNREADABLE

SMALL = f"--model {ROOT}/demo/target --dtype float32"
LINES = "--input-file in.txt"
SPLIT = f"{LINES} --split sentences"
MAIN = {
    "--num-draft 0": "--num-draft: a whole number, at least 1, or auto (or --regular-decode",
    f"-m {'9' * 5000}": f"--max-tokens: a whole number, at least 1, not '{'9' * 58}…",
    "--stop ''": "stop is ['']",
    "--dtype int4": "--dtype",
    "--no-such-option": "--no-such-option; see --help",
    "--num-beam 4": "unrecognized arguments: --num-beam 4; did you mean --num-beams?",
    "--temprature 1": "unrecognized arguments: --temprature 1; did you mean --temperature?",
    "'fix it: She have.'": "fix it: She have.; did you mean --prompt 'fix it: She have.'?",
    "fix it --nope": "did you mean --prompt 'fix it'?",
    "fix it": "fix it; did you mean --prompt 'fix it'?",
    "in.txt half.txt": "did you mean --input-file in.txt half.txt?",
    "--prompt a --prompt ' \n'": "the prompt is empty",
    "--input-file none.txt": "none.txt",
    "--output-file none/out.txt": "there is no folder none",
    f"{LINES} --output-file in.txt": "is the input file too",
    f"{LINES} --output-file empty": "is a folder",
    "--model models/none": "there is no model folder models/none",
    "--model empty": "config.json",
    "--model hollow": "hollow",
    f"{SMALL} --draft-model {{target}}": "vocabularies differ",
    "--adapter-path none": "there is no adapter folder 'none'",
    "--task x --prompt a": "no task 'x'; it has grammar, translation_en_to_fr",
    "--num-samples 2": "--num-samples requires --temp",
    "--task x": "--task requires --prompt or --input-file",
    "--score": "--score requires --input-file",
    "--normalize": "--normalize requires --embed",
    "--output-file x.npy": "--output-file FILE.npy requires --embed",
    "--source-language de": "--source-language requires --split or --target-language",
    "--max-source-tokens 9": "--max-source-tokens requires --split or --target-language",
    "--target-language fr": "--target-language requires --prompt or --input-file",
    "--prompt a --translation-prefix '{target}: '": "--translation-prefix requires --target-lang",
    "--prompt a --target-language fr --translation-prefix x": "a text with {target}",
    "--prompt a --target-language fr --prefix x": "cannot be combined with --prefix",
    "--prompt a --target-language fr --task grammar": "cannot be combined with --task",
    "--prompt a --encoding cp1252": "--encoding requires --input-file",
    f"{LINES} --encoding cp0": "there is no encoding 'cp0'; try cp1252",
    f"{LINES} --encoding hex": "there is no encoding 'hex'; try cp1252",
    "--resume --output-file x": "--resume requires --input-file",
    f"--resume {LINES}": "--resume requires --output-file",
    "--resume --input-file - --output-file x": "--resume of a pipe requires",
    "--num-return-sequences 2": "num_return_sequences is 2; it must be num_beams (1) at most",
    "--exact --num-draft 32": "num_draft is 32; it must be 31 at most in exact decoding",
    "--prompt a --input-file b": "--prompt cannot be combined with --input-file",
    f"{LINES} --score --embed": "--score cannot be combined with --embed",
    "--exact --delta 0.5": "--exact cannot be combined with --delta",
    "--exact --num-beams 2": "--exact cannot be combined with --num-beams",
    "--exact --embed": "--embed cannot be combined with --exact",
    "--regular-decode --draft-model x": "--regular-decode cannot be combined with --draft-model",
    "--regular-decode --num-draft 5": "--regular-decode cannot be combined with --num-draft",
    "--draft-model none --num-draft 5": "--draft-model none cannot be combined with --num-draft",
    "--draft-model none --delta 0.5": "--draft-model none cannot be combined with --delta",
    "--num-beams 4 --num-draft 5": "--num-beams cannot be combined with --num-draft",
    "--num-beams 4 --delta 0.5": "--num-beams cannot be combined with --delta",
    "--num-beams 4 --temp 1": "--num-beams cannot be combined with --temp",
    "--repetition-detection 16,1": "--repetition-detection: invalid repetition value: '16,1'",
    "--repetition-detection 4,3,2": "--repetition-detection: invalid repetition value: '4,3,2'",
    "--repetition-detection -1": "--repetition-detection: ",
    "--num-beams 4 --repetition-detection 8": "num_beams cannot be combined with repetition_detec",
    f"{SPLIT} --score": "--score cannot be combined with --split",
    "--embed --input-file talk.srt": "--embed cannot be combined with --split",
    f"{SPLIT} --num-samples 2 --temp 1": "--split cannot be combined with --num-samples",
    f"{SPLIT} --resume --output-file x": "--resume cannot continue a document; without it",
    f"{LINES} --resume --overwrite --output-file x": "--resume cannot be combined with --overwrite",
    "--prompt a --overwrite": "--overwrite requires --output-file",
    f"{LINES} --output-file half.txt": "half.txt has 1 of 2 lines, from an interrupted run",
    "--input-file in.txt half.txt": "several files require --output-file FOLDER",
    "--input-file in.txt half.txt --output-file in.txt": "in.txt is a file; name a folder for",
    "--input-file in.txt half.txt --output-file o.txt": "several files require a folder",
    f"{LINES} {LINES} --output-file o": "in.txt and in.txt would both be written to o/in.txt",
    f"{LINES} folder --output-file o": "in.txt and folder/in.txt would both be written to o/in.txt",
    f"{LINES} none.txt --output-file o": "there is no file none.txt",
    f"{LINES} a.md --output-file o --split lines": "there is no file a.md",
    "--input-file empty --output-file o": "empty has no files to read; they end in .txt .srt .vtt",
    f"{LINES} folder/b.txt --output-file folder": "folder/b.txt is the input file too",
    f"{LINES} folder/b.txt --output-file out": "out/in.txt has 1 of 2 lines, from an interr",
    f"{LINES} --output-file film.vtt": "film.vtt would not hold vtt subtitles; end it as the",
    "--input-file a.srt --output-file film.vtt": "film.vtt would not hold vtt subtitles",
    "--input-file a.srt --json --output-file film.srt": "film.srt would not hold srt subtitles",
    "--prompt a --output-file film.SRT": "film.SRT would not hold srt subtitles",
    **{
        f"{LINES} --embed --output-file v{end}": f"vectors are not written as {end}; name the file"
        for end in (".csv", ".tsv", ".npz", ".parquet", ".pt", ".safetensors")
    },
    f"{LINES} --embed --resume --output-file x.npy": "--resume cannot continue an array; name",
    **{
        f"{cut} --input-file a{end}": f"{end} files cannot be split or translated; convert them to"
        for end in (*UNREADABLE, ".lrc", ".sub")
        for cut in ("--split lines", "--target-language fr")
    },
}
SERVER = {
    "--host 0.0.0.0": "set --api-key, or say --no-auth",
    "--host example.org": "set --api-key, or say --no-auth",
    "--api-key é": "--api-key",
    "--api-key 'a key\n'": "--api-key",
    "--api-key ''": "--api-key is empty",
    "--allow-origin https://app.example.org/page": "--allow-origin",
    "--root-path t5": "--root-path: use a path such as /t5",
    "--port 65536": "--port",
    "--max-batch 0": "--max-batch",
    "--num-draft 0": "--num-draft: a whole number, at least 1, or auto (or --draft-model none",
    "--exact --delta 0.5": "--exact cannot be combined with --delta",
    "--prompt x": "unrecognized arguments: --prompt x; did you mean --log-prompts?",
    "--port 0 --model no/such/folder": "there is no model folder",
    "--port 0 --host no.such.host.invalid --no-auth": "choose another --host",
}
CONVERT = {
    "": "the following arguments are required: --model",
    "--model ./nowhere": "neither a folder nor a Hub id",
    "--model {target} -q --q-bits 7": "--q-bits 7 does not exist",
    "--model {target} --q-bits 4": "--q-mode and --quant-predicate require -q",
    "--model {target} --mlx-path ''": "exists",
    "--model empty": "cannot read empty/config.json",
    "--model {target} --mlx-path in.txt/out": "cannot write",
    "--model {target} --dtype int8": "--dtype",
}
NEEDED = "--model m --data d --output o"
DISTILL = {
    "": "the following arguments are required: --model, --data, --output",
    f"{NEEDED} --draft-model x --decoder-layers 2": "--draft-model cannot be combined with --dec",
    f"{NEEDED} --draft-model x --no-share-encoder": "cannot be combined with --share-encoder",
    f"{NEEDED} --adapter-path x --upload-repo a/b": "--upload-repo cannot be combined with --adapt",
    f"{NEEDED} --iters 0": "--iters 0 requires --draft-model",
    f"{NEEDED} --iters 0 --draft-vocab-size all": "--iters 0 cannot be combined with --draft-vocab",
    f"{NEEDED} --draft-vocab-size many": "--draft-vocab-size",
    f"{NEEDED} --learning-rate 0": "--learning-rate",
    f"{NEEDED} --draft-model x+lookup": "x+lookup is not a folder for --draft-model",
    "--model m --data d --output lookup": "lookup is not a folder for --draft-model",
    "--model m --data d --output=": "--output: the name of a folder, not ''",
}
FINETUNE = {
    "": "the following arguments are required: --model, --data, --output",
    f"{NEEDED} --lora-alpa 3": "--lora-alpa 3; did you mean --lora-alpha?",
    f"{NEEDED} --max-seq-length 1 2 3": "--max-seq-length",
    f"{NEEDED} --num-layers 0": "--num-layers",
    f"{NEEDED} --lr-scheduler-type relative --learning-rate 1": "combined with --learning-rate",
    f"{NEEDED} --lr-scheduler-type relative --optimizer adamw": "combined with --optimizer adamw",
    f"{NEEDED} --fine-tune-type full --r 8": "--fine-tune-type full cannot be combined with --r",
    f"{NEEDED} --lora-dropout 1": "--lora-dropout",
}
TABLES = {main: MAIN, server: SERVER, convert: CONVERT, distill: DISTILL, finetune: FINETUNE}


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [(command, *row) for command, table in TABLES.items() for row in table.items()],
    ids=lambda value: getattr(value, "__name__", str(value)[:60]),
)
def test_options_are_refused_in_one_line(
    command, options, message, models, tmp_path, monkeypatch, capsys
):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("a\nb\n")
    Path("half.txt").write_text("A\nb")
    for name in ("empty", "hollow", "folder", "out"):
        Path(name).mkdir()
    for name in ("folder/in.txt", "folder/b.txt", "out/in.txt"):
        Path(name).write_text("a\n")
    sizes = dict.fromkeys(("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads"), 8)
    Path("hollow/config.json").write_text(json.dumps({"model_type": "t5", **sizes}))
    before = sorted(Path().rglob("*"))
    try:
        status = command.main(shlex.split(options.format(target=models[1])))
    except SystemExit as end:  # from argparse
        status = end.code
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ") and message in err
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    "options",
    ["--regular-decode --draft-model none --delta 0 --num-draft auto", "--num-beams 1 -m 1"],
)
def test_defaults_conflict_with_nothing(run, models, options):
    status, _, err = run(*models[:2], "--prompt", "x", "-m", "1", *options.split())
    assert status == 0, err

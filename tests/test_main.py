"""Tests the command line from end to end, on small random models and the bundled pair."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from command_line import ROOT, start
from devices import cpu_allocation
from mlx_t5.backend import device_name
from mlx_t5.cli.generate_options import DEFAULT_PROMPT
from mlx_t5.cli.output import one_line
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.model import T5, load
from standard_error import messages

BUNDLED = ROOT / "demo"
TRANSLATION = (
    "Allons au magasin et achetons des provisions, notamment des œufs, des avocats et du pain."
)
COUNTS = ["prompt_tokens", "generated_tokens", "target_calls", "drafted", "accepted"]
RATES = ["acceptance_rate", "tokens_per_call", "encode_seconds", "decode_seconds"]
STATS = {**dict.fromkeys(COUNTS, int), **dict.fromkeys([*RATES, "tokens_per_second"], float)}
STATS |= {"peak_memory_bytes": int, "reused": int, "reused_tokens": int, "speculation": dict}
PROMPTS = ["Étude", "a", "le chat est noir", "?", "one two three four five"]


def texts(out: str) -> list[str]:
    return [json.loads(line)["text"] for line in out.splitlines()]


# ---- the bundled pair ----------------------------------------------------------------------------


@pytest.mark.slow
def test_without_options_the_bundled_pair_translates():
    process = start(stdin=subprocess.DEVNULL, cwd="/")  # works in any folder
    out, err = (stream.decode() for stream in process.communicate())
    assert process.returncode == 0 and out.startswith("Allons au magasin")  # a GPU has bfloat16
    assert "(a demonstration pair: it knows two tasks, and few words; no models/t5-11b" in err
    assert DEFAULT_PROMPT in err
    assert re.search(r"\d+ tokens in .* tokens/s · acceptance \d+%", err.splitlines()[-1])


def test_json_has_exactly_the_promised_keys(run):
    target = ["--model", str(BUNDLED / "target"), "--dtype", "float32"]
    status, out, err = run(*target, "--json", "-v")
    assert f"on {device_name()}\n" in err
    assert status == 0
    record = json.loads(out)
    assert list(record) == ["prompt", "text", "tokens", "finish_reason", "stats"]
    assert {name: type(value) for name, value in record["stats"].items()} == STATS
    assert record["prompt"] == DEFAULT_PROMPT
    assert (record["text"], record["finish_reason"]) == (TRANSLATION, "stop")
    assert len(record["tokens"]) == record["stats"]["generated_tokens"]


def test_beams_give_their_best_texts_with_scores(run):
    wishes = "--num-beams", "3", "--num-return-sequences", "2", "--early-stopping", "never"
    status, out, _ = run("--model", str(BUNDLED / "target"), "--json", *wishes)
    best, second = map(json.loads, out.splitlines())
    assert status == 0 and best["text"] == TRANSLATION and second["text"] != TRANSLATION
    assert 0 > best["score"] > second["score"] and best["stats"]["drafted"] == 0
    # No draft is loaded, even if one is named.
    _, plain, err = run("--model", str(BUNDLED / "target"), *wishes, "--draft-model", "not/loaded")
    assert plain.splitlines() == [best["text"], second["text"]]
    assert err.count("not/loaded") == 1 and "not/loaded is not used: beams have no draft\n" in err


@pytest.mark.parametrize(
    "draft", [[], ["--num-draft", "5"], ["--draft-model", "lookup"], ["--draft-model", "BOTH"]]
)
def test_the_draft_changes_how_the_text_is_made_and_not_the_text(run, draft):
    prompt = "fix grammar: The engineers wants to buy some tools including saws and brushes."
    argv = ["--model", str(BUNDLED / "target"), "--prompt", prompt, "--json", "--dtype", "float32"]
    draft = [word.replace("BOTH", f"{BUNDLED / 'draft'}+lookup") for word in draft]
    draft += ["--num-draft", "5"] if "--draft-model" in draft else []
    fast = json.loads(run(*argv, *draft)[1])
    _, out, slow_err = run(*argv, "--regular-decode")
    slow = json.loads(out)
    assert fast["tokens"] == slow["tokens"] and "no draft" in slow_err
    if draft:  # with "auto" a busy machine may propose nothing
        assert 2 * fast["stats"]["target_calls"] < slow["stats"]["target_calls"]
    assert (slow["stats"]["drafted"], slow["stats"]["tokens_per_call"]) == (0, 1)
    copied = fast["stats"]["speculation"]["copied_accepted"]
    assert copied > 5 if "lookup" in str(draft) else copied == 0


@pytest.mark.parametrize("name", ["in.txt", "in.jsonl"])
def test_an_empty_text_has_a_vector_of_its_own(run, tmp_path, name):
    """It is that of the end token alone, as in sentence-transformers."""
    texts, lines = ["a", "", "b"], ["a", "", "b"]
    if name == "in.jsonl":
        lines = [json.dumps({"prompt": text}) for text in texts]
    (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    argv = ["--model", str(BUNDLED / "target"), "--dtype", "float32", "--embed"]
    files = ["--input-file", str(tmp_path / name), "--output-file", str(tmp_path / "v.npy")]
    assert run(*argv, *files)[0] == 0
    vectors = np.load(tmp_path / "v.npy")
    model, tokenizer = load(BUNDLED / "target", "float32")
    expected = SpeculativeDecoder(model, None, tokenizer).embed([[*tokenizer.encode("a")], [1]])
    np.testing.assert_allclose(vectors[:2], expected, atol=1e-5)
    assert run(*argv, "--prompt", "")[0] == 0 and run(*argv[:-1], "--prompt", "")[0] == 2


@pytest.mark.parametrize(
    "options", [["--draft-model", "none"], ["--regular-decode"], ["--num-beams", "2"], ["--embed"]]
)
def test_a_prediction_in_a_line_is_copied_ignored_or_refused(run, tmp_path, options):
    """It is copied, ignored if nothing is proposed, and refused with beams."""
    name, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": DEFAULT_PROMPT, "prediction": TRANSLATION}, {"prompt": "a"}]
    name.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["--model", str(BUNDLED / "target"), "--dtype", "float32", *options, "-m", "60"]
    argv += ["--num-draft", "15"] if "none" in options else []
    status, _, err = run(*argv, "--input-file", str(name), "--output-file", str(out))
    first, second = map(json.loads, out.read_text().splitlines())
    assert (first["prompt"], second["prompt"]) == (DEFAULT_PROMPT, "a")
    if "--embed" in options:
        assert status == 0 and first["embedding"]
        return
    assert second["text"] is not None and second["stats"]["drafted"] == 0
    if "--num-beams" in options:
        assert (status, first["finish_reason"]) == (2, "error")
        assert "error: prompt 1: num_beams cannot be combined with prediction" in err
        return
    assert (status, first["text"]) == (0, TRANSLATION)
    counts = first["stats"]["speculation"]
    copied = first["stats"]["target_calls"] == 2 and counts["predicted_accepted"] > 20
    assert copied == ("none" in options) and counts["predicted"] == counts["predicted_accepted"]


# ---- one prompt ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [[], ["--temp", "0.5", "--seed", "3"]])
def test_the_streamed_text_is_the_text(run, models, sampling):
    argv = [*models, *sampling, "-m", "120", "--prompt", "Étude"]
    status, streamed, err = run(*argv)
    _, out, _ = run(*argv, "--json")
    assert status == 0
    assert streamed == json.loads(out)["text"] + "\n"
    assert re.search(r"\d+ tokens in", err)


@pytest.mark.slow
def test_every_write_has_whole_characters(models):
    sampling = ["--temp", "0.7", "--seed", "5", "-m", "150"]
    process = start(*models, *sampling, "--prompt", "x")
    parts = iter(lambda: os.read(process.stdout.fileno(), 1 << 16), b"")
    written = [part.decode() for part in parts]  # raises an error if a character is cut
    assert process.wait() == 0
    assert len(written) > 20, "the text arrives piece by piece"
    assert any(ord(character) > 127 for character in "".join(written))


def test_verbose_adds_only_marks_and_only_at_a_terminal(run, models, monkeypatch):
    """With JSON, the colored text goes to standard error."""
    argv = [*models, "--temp", "1", "-m", "80", "--prompt", "x"]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, plain, _ = run(*argv)
    assert run(*argv, "-v")[1] == plain and "\033" not in run(*argv, "-v", "--json")[2]
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda stream: True)
    _, colored, err = run(*argv, "-v")
    assert re.sub(r"\033\[\d+m", "", colored) == plain != colored and "by the draft" in err
    _, out, err = run(*argv, "-v", "--json")
    assert "\033[32m" in err and "\033" not in out
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert "\033" not in "".join(run(*argv, "-v")[1:])


@pytest.mark.slow
def test_standard_input_is_decoded_without_torch(models):
    """Libraries print no warning about missing torch on standard error."""
    code = "import sys; sys.modules['torch'] = None; import main; sys.exit(main.main())"
    argv = [sys.executable, "-c", code, *models, "-m", "5", "--json", "--prompt", "-"]
    stdin = "première ligne\nseconde\n".encode()
    process = subprocess.run(argv, cwd=ROOT, capture_output=True, input=stdin)
    assert process.returncode == 0
    assert [line.split()[0] for line in messages(process.stderr.decode())] == ["target", "5"]
    assert json.loads(process.stdout)["prompt"] == "première ligne\nseconde"


# ---- several prompts -----------------------------------------------------------------------------


@pytest.mark.slow
def test_results_keep_the_order_of_the_file(run, models, tmp_path):
    source, results = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    files = ["--input-file", str(source), "--output-file", str(results)]
    status, out, err = run(*models, "-m", "20", "--batch-size", "2", *files)
    assert (status, out) == (0, "")
    assert "5 prompts · 100 tokens" in err
    records = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    assert [record["prompt"] for record in records] == PROMPTS
    alone = [run(*models, "-m", "20", "--json", "--prompt", prompt)[1] for prompt in PROMPTS]
    assert [record["text"] for record in records] == [texts(out)[0] for out in alone]


def test_equal_prompts_with_one_seed_give_independent_samples(run, models):
    argv = [*models, "-m", "60", "--temp", "1", "--prompt", "x", "--prompt", "x", "--seed"]
    first, second = texts(run(*argv, "1", "--json")[1])
    assert first != second != texts(run(*argv, "2", "--json")[1])[1]
    assert run(*argv, "1")[1].split("\n") == [one_line(first), one_line(second), ""]


@cpu_allocation
def test_the_batch_size_bounds_memory(run, models):
    prompts = [part for i in range(8) for part in ("--prompt", str(i) * 200)]
    argv = [*models, "-m", "8", "--json", *prompts]
    small, large = (
        json.loads(run(*argv, "--batch-size", size)[1].splitlines()[-1])["stats"]
        for size in ("1", "8")
    )
    assert small["peak_memory_bytes"] + 5 * 10**5 < large["peak_memory_bytes"]


def test_one_prompt_too_long_for_memory_does_not_cost_the_others(run, models, monkeypatch):
    encode = T5.encode

    def limited(self, ids, mask=None):
        if ids.shape[1] > 50:
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        return encode(self, ids, mask)

    monkeypatch.setattr(T5, "encode", limited)
    argv = [*models, "-m", "5", "--json", "--prompt", "a", "--prompt", "b" * 60, "--prompt", "c"]
    status, out, err = run(*argv)
    assert status == 2 and [text is None for text in texts(out)] == [False, True, False]
    assert "error: prompt 2: no memory for a prompt of 61 tokens" in err
    status, out, err = run(*models, "--prompt", "b" * 60)
    assert (status, out) == (2, "") and "error: no memory" in err


def test_models_that_will_not_fit_give_a_warning_before_loading(run, models, monkeypatch):
    monkeypatch.setattr("mlx_t5.backend.device_memory.limit", lambda: 1000)
    status, _, err = run(*models, "--prompt", "x")
    assert status == 2 and err.count("warning: the weights take") == 1
    assert "error: no memory for a prompt" in err


# ---- rules for the text --------------------------------------------------------------------------


@pytest.mark.slow
def test_rules_reach_the_decoder(run, models):
    argv = [*models, "-m", "60", "--json", "--prompt", "x"]
    plain, penalized, ruled = (
        json.loads(run(*argv, *rule)[1])["tokens"]
        for rule in ([], ["--repetition-penalty", "1.3"], ["--no-repeat-ngram-size", "2"])
    )
    assert penalized != plain != ruled
    assert len(set(zip(ruled, ruled[1:], strict=False))) == len(ruled) - 1, "each pair once"


def test_a_text_ends_before_a_stop_string_however_it_is_shown(run, models, monkeypatch):
    argv = [*models, "-m", "60", "--prompt", "x"]
    whole = run(*argv)[1].rstrip("\n")
    stop = ["--stop", "no such text", "--stop", whole[20:23]]
    expected = whole[: whole.index(whole[20:23])]
    assert run(*argv, *stop)[1] == expected + "\n"
    record = json.loads(run(*argv, *stop, "--json")[1])
    assert (record["text"], record["finish_reason"]) == (expected, "stop")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda stream: True)
    for painted in (run(*argv, *stop, "-v")[1], run(*argv, *stop, "-v", "--prompt", "x")[1]):
        assert re.sub(r"\033\[\d+m", "", painted).splitlines()[0] == expected


def test_several_samples_of_each_prompt_are_written(run, models):
    argv = [*models, "-m", "12", "--temp", "1", "--seed", "4", "--num-draft", "5"]
    prompts = [part for prompt in "xxxyyy" for part in ("--prompt", prompt)]
    expected = texts(run(*argv, *prompts, "--json")[1])
    sampled = [*argv, "--num-samples", "3", "--prompt", "x", "--prompt", "y"]
    _, out, err = run(*sampled, "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["text"] for record in records] == expected
    assert [record["prompt"] for record in records] == list("xxxyyy")
    assert "6 texts · 72 tokens" in err
    alone = run(*argv, "--num-samples", "3", "--prompt", "x")[1]
    assert alone.split("\n")[:-1] == [one_line(text) for text in expected[:3]]

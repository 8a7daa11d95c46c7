"""Tests models by their names, from Python and on the command line, with a fake Hub."""

import json
import re
from pathlib import Path

import pytest

from command_line import ROOT, byte_model
from fake_hub import FakeHub, serve
from mlx_t5.convert import convert
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.disk import BUNDLED
from mlx_t5.errors import UserError
from mlx_t5.model import load
from mlx_t5.network.sharing import shared_draft
from mlx_t5.training.draft_folder import save_draft

TARGET, DRAFT = "google/byt5-xl", "google/byt5-small"
PROMPT = "fix grammar: She have two cat."


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    """Returns a target, its default draft, an old revision and an MLX folder."""
    root = tmp_path_factory.mktemp("hub")
    target, draft = byte_model(root / "target"), byte_model(root / "draft", noise=0.1)
    converted = convert(target, root / "mlx", dtype="float32")
    bundled, _ = load(BUNDLED / "target")
    return {
        TARGET: files(target),
        f"{TARGET}@old": files(draft),
        DRAFT: files(draft),
        "me/byt5-mlx": files(converted),
        "me/draft": files(
            save_draft(shared_draft(bundled, 1), BUNDLED / "target", root / "shared")
        ),
    }


@pytest.fixture
def python(tmp_path):
    """Returns a function that runs lines in a process; `tell(value)` adds to its results."""

    def run(hub: FakeHub, *lines: str, **environment: str) -> tuple[list, str]:
        code = (
            "import json, sys; from decoder import SpeculativeDecoder; from model import load\n"
            "tell = lambda value: print(json.dumps(value))\n"
            "def decoded(*names, **options):\n"
            "    decoder = SpeculativeDecoder.from_pretrained(*names, **options)\n"
            "    result = decoder.generate('a', max_tokens=12)\n"
            "    tell([result.tokens, result.stats.accepted > 0])\n"
        )
        done = hub.python(tmp_path, "-c", code + "\n".join(lines), **environment)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()], done.stderr

    return run


@pytest.mark.slow
def test_a_pair_is_loaded_by_its_hub_id_without_conversion(repositories, python, tmp_path):
    pair = f'decoded("{TARGET}", dtype="float32", num_draft=5)'
    with serve(FakeHub(repositories)) as hub:
        (result, *other_results), err = python(
            hub,
            pair,
            f'decoded("{TARGET}", draft=None, dtype="float32")',
            f'decoded("{TARGET}", "{DRAFT}+lookup", dtype="float32", num_draft=2)',
            f'decoded("{TARGET}", "lookup", dtype="float32", delta=0, num_draft=5)',
            f'decoded("{TARGET}", "none", "old", "float32")',
            f'decoded("{BUNDLED / "target"}", "me/draft")',
            "import main",
            'main.main("--model me/byt5-mlx --draft-model none --prompt a --json".split())',
        )
        assert not (tmp_path / "models").exists(), "nothing is converted"
        hub.requests.clear()
        (again,), log = python(hub, pair, HF_HUB_OFFLINE="1")
        assert again == result and not hub.requests and f"draft {DRAFT}" in log
    assert result[1] and len(result[0]) == 12
    assert [tokens for tokens, _ in other_results[:3]] == [result[0]] * 3
    assert [speculates for _, speculates in other_results[:2]] == [False, True]
    assert other_results[3][0] != result[0]
    assert other_results[5]["finish_reason"] == "length"
    assert [line for line in err.splitlines() if line.startswith("target ")] == [
        f"target {TARGET}, draft {DRAFT} (its default draft)",
        f"target {TARGET}, no draft",
        f"target {TARGET}, draft {DRAFT}, copying from the source",
        f"target {TARGET}, copying from the source",
        f"target {TARGET}, no draft",
        "target demo/target, draft me/draft",
        "target me/byt5-mlx, no draft",
    ]


@pytest.mark.slow
def test_the_command_line_reads_both_models_from_the_cache(tmp_path):
    """Only convert.py writes into models/."""

    def main(hub: FakeHub, *options: str, **environment: str) -> tuple[int, str, str]:
        command = f"{ROOT}/main.py", "--model", target, "--prompt", PROMPT, "-m", "12"
        command += ("--dtype", "float32", *(options or ("--num-draft", "5")))
        done = hub.python(tmp_path, *command, **environment)
        return done.returncode, done.stdout, done.stderr

    target, draft = "google/flan-t5-xl", "google/flan-t5-small"
    bundled = {target: files(BUNDLED / "target"), draft: files(BUNDLED / "draft")}
    with serve(FakeHub(bundled)) as hub:
        # Beams use no draft, so none is downloaded.
        status, _, err = main(hub, "--num-beams", "2")
        assert status == 0 and f"target {target}, no draft\n" in err
        assert hub.requests and draft not in "".join(path for _, path in hub.requests)
        status, text, err = main(hub)
        assert (status, text) == (0, "She has two cats.\n"), err
        assert f"its default draft is {draft}; --draft-model none does without\n" in err
        assert f"target {target}, draft {draft} (its default draft)\n" in err
        assert " drafted) " in err
        hub.requests.clear()
        assert main(hub, HF_HUB_OFFLINE="1")[:2] == (0, text) and not hub.requests
    assert not (tmp_path / "models").exists()


def test_folders_are_loaded_by_path_and_by_name(tmp_path, monkeypatch, capsys):
    """Names work as in main.py; the bundled target has a default draft."""
    decoder = SpeculativeDecoder.from_pretrained(BUNDLED / "target", dtype="float32")
    assert decoder.draft and decoder.generate(PROMPT).text == "She has two cats."
    assert re.search("target .*demo/target, draft .*demo/draft\n", capsys.readouterr().err)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine").symlink_to(BUNDLED / "target")
    monkeypatch.chdir(tmp_path)
    target, draft = (load(BUNDLED / name)[0].config for name in ("target", "draft"))
    assert load("mine")[0].config == target != draft
    assert SpeculativeDecoder.from_pretrained("mine", None).draft is None
    with pytest.raises(UserError, match="mine is a folder, and a revision is of a Hub id"):
        load("models/mine", revision="main")


def test_a_decoder_and_its_results_are_short_in_a_notebook():
    decoder = SpeculativeDecoder.from_pretrained("demo/target", "demo/draft+lookup", num_draft=5)
    sizes = "target t5 of 3 + 3 layers, d_model 256, draft t5 of 2 + 1 layers, d_model 96"
    expected = f"SpeculativeDecoder({sizes}, SourceCopy, num_draft=5, delta=0)"
    assert repr(decoder) == expected
    good, bad = decoder.generate(["fix grammar: She have two cat.", ""], max_tokens=9)
    assert repr(good).startswith("Result('She has two cats.', 6 tokens, 'stop', ")
    assert repr(bad).startswith(
        "Result(None, 0 tokens, 'error', 0 of 0 drafted accepted, error 'a "
    )
    (chunk,) = decoder.stream("fix grammar: She have two cat.", max_tokens=2)
    assert repr(chunk) == "Chunk('She', 2 tokens, the last)"
    assert repr(decoder.tokenizer) == "Tokenizer(3072 tokens)"
    good.text = "long " * 1000
    assert len(repr(good)) < 250

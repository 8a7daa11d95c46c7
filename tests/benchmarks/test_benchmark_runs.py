"""Smoke tests of `compare`, `sweep`, `report` and `server`. No time is judged."""

import contextlib
import json

import pytest

import benchmark
from mlx_t5.benchmarks import figures, pictures, report, server_load, sweep, workload
from mlx_t5.benchmarks.pass_times import ladder
from mlx_t5.disk import BUNDLED
from mlx_t5.settings import AUTO
from mlx_t5.timing import Ratio

pytestmark = pytest.mark.slow


@pytest.fixture
def measure(tmp_path, monkeypatch, capsys):
    """Returns a function that runs a subcommand in float32: (standard output, record)."""
    monkeypatch.chdir(tmp_path)

    def run(line, *more):
        argv = [*line.split(), *more, "--dtype", "float32", "--json", "figures.json"]
        assert benchmark.main(argv) == 0
        return capsys.readouterr().out, json.loads((tmp_path / "figures.json").read_text())

    return run


def test_every_proposer_writes_the_same_texts(measure):
    options = "--num-draft 2 auto --ways draft --task mixed --temp 0 0.7 --batch-size 1 2"
    out, record = measure(f"compare --count 3 --repeats 1 {options}")
    assert "dtype float32" in out and "prompts 3 of mixed" in out
    assert len(record["tables"]) == (2 + 1) + (1 + 1)  # one a task for greedy texts in batches of 1
    for table in record["tables"]:
        assert [row["way"] for row in table["rows"]] == ["regular", "draft 2", "draft auto"]
        assert {row["different"] for row in table["rows"]} == {0}
        if table["temp"] == 0 and table["batch_size"] == 1:
            regular, fixed, _ = table["rows"]
            assert regular["target_calls"] == regular["decided"] == regular["steps_by_accepted"][0]
            assert fixed["target_calls"] == sum(fixed["steps_by_accepted"])
            assert fixed["target_calls"] < regular["target_calls"]


def test_different_texts_set_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(figures, "differing", lambda *args: 1)
    argv = "compare --count 2 --num-draft 2 --task fix --ways lookup --dtype float32 --repeats 1"
    assert benchmark.main(argv.split()) == 1
    assert "| 1 DIFFER |" in capsys.readouterr().out


def test_a_sweep_is_drawn_and_saved(measure, tmp_path):
    grid = "--num-draft 2 3 --delta 1 --repeats 1 --output grid"
    out, record = measure(f"sweep --count 2 --quality-count 4 {grid}")
    assert "recommended: " in out and "| exact match |" in out
    settings = [(row["delta"], row["num_draft"]) for row in record["rows"]]
    assert settings == [(0.0, 2), (0.0, 3), (1.0, 2), (1.0, 3)]  # delta 0 is always measured
    for row in record["rows"]:
        if row["delta"] == 0:
            assert row["different"] == 0 and row["exact_match_lossless"] == 100.0
        else:
            assert row["acceptance_rate"] == 1.0 and row["exact_match"] < 100.0
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("draft", [[], ["--draft-model", "none"]])
def test_a_model_without_a_draft_is_compared_by_copying(measure, models, draft):
    pair = ["--model", models[1], *draft]
    out, record = measure("compare --count 2 --repeats 1 --num-draft 2 --task fix", *pair)
    ways = [row["way"] for row in record["tables"][0]["rows"]]
    assert ways == ["regular", "lookup 2"] and ", draft none, " in out and "\nc = " not in out
    assert record["tables"][0]["costs"]["c"] is None


def test_a_sweep_of_copying_needs_no_draft(measure, models, tmp_path):
    grid = "--num-draft 2 auto --delta 0 --repeats 1 --output grid --way lookup"
    (tmp_path / "own.txt").write_text("two cats\nred dogs\n")
    own = ["--model", models[1], "--prompts", "own.txt"]
    out, record = measure(f"sweep --count 2 --quality-count 2 {grid}", *own)
    assert "| exact match, delta 0 |" in out and "| exact match |" not in out, "no reference"
    assert [row["num_draft"] for row in record["rows"]] == [AUTO, 2]
    assert (tmp_path / "grid.png").exists()


@pytest.mark.parametrize("command", ["sweep --output grid", "compare --ways draft"])
def test_what_needs_a_draft_says_how_to_name_one(command, models, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert benchmark.main([*command.split(), "--count", "2", "--model", models[1]]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: this needs a draft: name one with --draft-model")


def swept(delta, num_draft, value, low, high, tokens=4.0):
    """A row of a sweep; every text is right."""
    row = {"delta": delta, "num_draft": num_draft, "speed_up": Ratio(value, low, high)}
    scores = ("exact_match", "chrf", "exact_match_lossless", "chrf_lossless")
    row |= dict.fromkeys(scores, 100.0) | {"tokens_per_call": tokens}
    return row | {"steps_by_length": [0, 0, 1, 1]}


def test_a_sweep_recommends_only_what_is_clear_of_the_noise():
    noise = swept(0.0, 2, 1.40, 0.76, 1.64)
    assert sweep.recommend([noise], 1.0) is None
    words = "recommended: keep --regular-decode: no setting of this grid is reliably faster than"
    assert words in sweep.explain([noise], 1.0, 9)
    clear = swept(0.0, 3, 1.30, 1.1, 1.5)
    assert sweep.recommend([noise, clear], 1.0) is clear
    auto = swept(0.0, AUTO, 1.29, 1.1, 1.5)
    assert sweep.recommend([noise, clear, auto], 1.0) is auto, "as fast, and needs no option"
    lenient = swept(1.0, 3, 1.8, 1.6, 1.9, tokens=6.0)
    assert sweep.recommend([noise, clear, lenient], 1.0) is lenient
    assert sweep.recommend([noise, clear, lenient | {"chrf": 90.0}], 1.0) is clear
    impossible = swept(0.0, 2, 4.5, 4.4, 4.6)
    assert sweep.recommend([impossible], 1.0) is None, "more than a target call yields tokens"


def test_a_picture_shows_ranges_and_its_whole_caption(tmp_path, monkeypatch):
    drawn = []

    def kept(figure, *args, **options):
        figure.draw_without_rendering()
        drawn.append(figure)

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", kept)
    rows = [swept(0.0, n, 1.4, 0.8, 1.6) for n in (1, 2, AUTO)]
    pictures.draw_deltas(
        rows, rows[1], "dtype float32, " * 20 + "\nsweep " + "--way x " * 40, tmp_path
    )
    (figure,) = drawn
    caption = figure._suptitle.get_window_extent()
    assert figure.bbox.x0 <= caption.x0 and caption.x1 <= figure.bbox.x1
    bars = [c for c in figure.axes[0].containers if len(c.lines[2])]
    assert len(bars) == 2, "of the numbers, and of auto"


def test_a_report_has_a_row_to_paste(measure, monkeypatch):
    monkeypatch.setattr(report, "MOST_PROMPTS", 2)
    pair = ["--model", workload.MODEL.default, "--draft-model", str(BUNDLED / "draft")]
    out, record = measure("report --num-draft 3 --seconds 1", *pair)
    (line,) = [line for line in out.splitlines() if line.startswith(f"| {record['date']} ")]
    cells = dict(zip(report.COLUMNS, line.strip("| ").split(" | "), strict=True))
    assert cells["texts"] == "equal" and cells["weights"] == "float32"
    assert record["v"]["1"] == 1.0 and record["c"] > 0 and 0 < record["alpha"] <= 1
    assert record["tokens_per_call"] > 2 and record["target"]["d_model"] == 256


def test_both_servers_send_every_client_the_same_text(measure, tmp_path, monkeypatch):
    serving, seconds = server_load.serving, []

    @contextlib.contextmanager
    def observed(argv):
        with serving(argv) as address:
            yield address
            *_, responses = server_load.send_all(address, ["fix grammar: He eat."] * 2, 1, {})
            seconds.extend(response["stats"]["decode_seconds"] for response in responses)

    monkeypatch.setattr(server_load, "serving", observed)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, record = measure("server --clients 1 3 --count 5 --repeats 1 --num-draft 5")
    keys = [(n, name) for n in (1, 3) for name in server_load.SERVERS]
    assert [(row["clients"], row["way"]) for row in record["rows"]] == keys
    for row in record["rows"]:
        assert row["different"] == 0 and len(row["latencies"]) == 5 and row["tokens"][0] > 20
    assert len({*seconds}) == 4, "each text is decoded, not taken from the cache"


def test_a_round_on_a_slower_machine_counts_like_the_others():
    """A program that runs for a while slows all passes alike, so ratios do not change."""
    rounds = iter([1.0] * 8 + [5.0] * 4 + [1.0] * 100)
    measured = ladder(lambda n: n * next(rounds), (1, 2, 3, 4), 10_000.0)
    assert measured == pytest.approx({1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0})


def test_held_out_prompts_and_files_have_references(tmp_path):
    fix, mixed = workload.held_out("fix", 4), workload.held_out("mixed", 9)
    assert [mixed.references[i] for i in mixed.positions("fix")] == fix.references
    assert all(prompt.startswith("fix grammar: ") for prompt in fix.prompts)
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "one", "target": "un"}\n{"prompt": "two"}\n')
    assert workload.from_file(str(file), 1).references == ["un"]
    assert workload.from_file(str(file), 2).references is None, "the second prompt has none"

"""Tests `report`: the number of turns, the row and a small run. No time is judged."""

import itertools
import json
import re
from types import SimpleNamespace

import pytest

import benchmark
from benchmarks import report
from benchmarks.figures import MEASURED_POSITIONS
from benchmarks.passes import NEEDED
from benchmarks.report import affordable, exactness, in_turns
from benchmarks.subject import Subject
from benchmarks.workload import DRAFT, REGULAR
from mlx_t5.backend import ON_CUDA, cpu_only
from mlx_t5.disk import BUNDLED
from mlx_t5.engine.rows import Stats
from mlx_t5.errors import UserError
from snippets import ROOT

PAIR = ["--model", str(BUNDLED / "target"), "--draft-model", str(BUNDLED / "draft")]


class Clock:
    """A clock that advances only during a turn."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def decode(self, name, seconds, log):
        def run(turn):
            log.append((name, turn))
            self.now += seconds
            stats = Stats(tokens_per_call=2.0, target_calls=5)
            return [SimpleNamespace(stats=stats)]

        return run


def test_the_opening_sets_the_number_of_turns_of_all_four_rounds():
    clock, log = Clock(), []
    both = clock.decode(REGULAR, 4.0, log), clock.decode(DRAFT, 1.0, log)
    timed = in_turns(*both, affordable(10.0, 32, clock), clock)
    warm, turns = log[:2], log[2:]
    assert warm == [(REGULAR, 0), (DRAFT, 0)]
    assert turns == [(name, n) for name in (REGULAR, DRAFT, DRAFT, REGULAR) for n in range(3)]
    assert timed[REGULAR].seconds == [[4.0] * 3] * 2 and timed[DRAFT].seconds == [[1.0] * 3] * 2
    assert timed[DRAFT].tokens == [[10] * 3] * 2
    # A slow decoder gets at least one turn; a fast decoder gets at most all turns.
    for seconds, turns in ((500.0, 1), (0.001, 5)):
        log.clear()
        in_turns(*[clock.decode("", seconds, log)] * 2, affordable(1.0, 5, clock), clock)
        assert len(log) == 2 + 4 * turns


class Exact:
    """Stands in for the decoder. Its texts depend on the prompt alone, unless it is broken."""

    broken = refused = False
    arguments = []

    def __init__(self, model, draft, tokenizer, num_draft, *, exact):
        self.draft = draft
        self.arguments.append((draft, num_draft, exact))

    def job(self, max_tokens):
        return max_tokens

    def results(self, prompts, max_tokens, batch_size):
        if self.refused:
            raise UserError("exact: this device does not keep it")
        changed = self.draft is not None and self.broken
        for prompt in prompts:
            yield SimpleNamespace(tokens=[len(prompt), int(changed)][:max_tokens])


@pytest.mark.parametrize(
    ("state", "reason", "prompts"),
    [
        ("kept", "", 2),
        ("broken", "2 of 2 texts differ", 2),
        ("refused", "exact: this device does not keep it", 0),
    ],
)
def test_the_report_says_whether_exact_decoding_holds(state, reason, prompts, monkeypatch):
    monkeypatch.setattr(report, "SpeculativeDecoder", Exact)
    monkeypatch.setattr(Exact, state, True, raising=False)
    monkeypatch.setattr(Exact, "arguments", [])
    subject = SimpleNamespace(target=None, tokenizer=None, drafter=lambda proposer: proposer)
    outcome = exactness(subject, 4, ["a", "bb"], 9.0)
    counts = {"prompts": prompts, "tokens": 2 * prompts}
    assert outcome == {"holds": not reason, "reason": reason, **counts}
    assert Exact.arguments == [(None, 4, True), (DRAFT, 4, True)]


@pytest.fixture
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "MOST_PROMPTS", 2)
    monkeypatch.setattr(report, "SpeculativeDecoder", Exact)
    monkeypatch.setattr(Exact, "arguments", [])  # freed, as other tests measure memory
    return tmp_path


def test_a_report_is_printed_and_saved(in_a_folder_of_its_own, capsys):
    assert (
        benchmark.main(
            ["report", *PAIR, "--dtype", "float32", "--num-draft", "3", "--seconds", "1"]
        )
        == 0
    )
    out, err = capsys.readouterr()
    record = json.loads((in_a_folder_of_its_own / "report.json").read_text("utf-8"))
    (line,) = [line for line in out.splitlines() if line.startswith(f"| {record['date']} ")]
    cells = dict(zip(report.COLUMNS, line.strip("| ").split(" | "), strict=True))
    assert cells["texts"] == "equal" and cells["exact decoding"] == "holds"
    assert cells["target, draft"] == "target, draft" and cells["weights"] == "float32"
    assert cells["γ (best by v)"].startswith("3 (")
    assert ": it fits.\nThe line above is" in out
    assert record["v"]["1"] == 1.0 and record["c"] > 0 and 0 < record["alpha"] <= 1
    assert record["tokens_per_call"] > 2 and record["target"]["d_model"] == 256
    assert all(record[name] for name in ("hardware", "environment", "speed_up", "prompts"))
    tried = r"mxfp4: \d+\.\d\d, v\(5\) \d+\.\d\d"
    assert re.fullmatch("–" if cpu_only() or ON_CUDA else tried, cells["fp mode"])
    steps = ("loading", "timing", "opening", "again", "closing", "fp mode")
    said = [err.find(what) for what in steps]
    assert -1 not in said and all(a < b for a, b in itertools.pairwise(said))


@pytest.mark.parametrize("num_draft", [2, 20, 66])
def test_every_width_of_a_step_is_timed(num_draft, capsys):
    """This includes more proposals than the report shows v(M) for."""
    subject = Subject.load(PAIR[1], PAIR[3], "float32")
    row = report.measured(subject, ["fix grammar: I has two cat."], num_draft, 0.0)
    assert len(row["passes"]) == max(NEEDED, num_draft + 1)
    assert row["best_num_draft"] < MEASURED_POSITIONS


def test_without_a_model_the_bundled_pair_is_grown_once(in_a_folder_of_its_own, monkeypatch):
    grown = []

    def grow(source, path, sizes, dtype):
        path.mkdir(parents=True)
        grown.append((source.name, str(path), sizes["d_model"], dtype))

    monkeypatch.setattr(report, "grow", grow)
    nothing = SimpleNamespace(model=None, draft_model=None, dtype=None)
    for cpu, dtype in ((False, "bfloat16"), (True, "float32")):
        monkeypatch.setattr(report, "on_cpu", lambda cpu=cpu: cpu)
        grown_pair = ("models/demo-large", "models/demo-small-draft", dtype)
        assert report.chosen_pair(nothing) == grown_pair
    assert grown == [
        ("target", "models/demo-large", 1024, "bfloat16"),
        ("draft", "models/demo-small-draft", 512, "bfloat16"),
    ]
    for model, draft in itertools.product((None, PAIR[1]), ("none", "lookup")):
        named = SimpleNamespace(model=model, draft_model=draft, dtype=None)
        with pytest.raises(UserError, match="name one with --draft-model"):
            report.chosen_pair(named)
    named = SimpleNamespace(model=PAIR[1], draft_model=None, dtype=None)
    assert report.chosen_pair(named) == (PAIR[1], PAIR[3], None)


@pytest.mark.parametrize(
    ("gpu", "cores", "device", "expected"),
    [
        ("Apple M2 Ultra", 76, "gpu", ("Apple M2 Ultra", "GPU, 76 cores")),
        ("NVIDIA H200", None, "gpu", ("Apple M2 Ultra, NVIDIA H200", "GPU")),
        (None, 76, "cpu", ("Apple M2 Ultra", "CPU, 24 cores, Accelerate")),
    ],
)
def test_a_row_names_the_machine_and_the_weights(gpu, cores, device, expected):
    hardware = {"chip": "Apple M2 Ultra", "gpu": gpu, "gpu_cores": cores}
    environment = {"device": device, "cores": 24, "blas": "Accelerate", "dtype": "bfloat16"}
    record = {"hardware": hardware, "environment": environment, "target": {"bits": [4]}}
    assert (report.chip(record), report.computes_on(record)) == expected
    assert report.weights(record) == "4 bits, bfloat16"
    assert report.v_at_shown({"v": {2: 1.0, 5: 1.25}}) == "1.00 – 1.25 – – – –"


def test_the_page_has_the_reports_columns_and_the_template_names_it():
    page = (ROOT / "docs" / "performance.md").read_text("utf-8")
    header, *rows = [line for line in page.splitlines() if re.match(r"\| (date|\d{4}-)", line)]
    assert header.strip("| ").split(" | ") == list(report.COLUMNS)
    assert rows and all(line.count(" | ") == header.count(" | ") for line in rows)
    template = (ROOT / ".github" / "ISSUE_TEMPLATE" / "measurement.yml").read_text("utf-8")
    assert "python benchmark.py report" in template and "report.json" in template

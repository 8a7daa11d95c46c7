"""Tests `report`: the number of turns, the row and a small run. No time is judged."""

import json
import re
from types import SimpleNamespace

import pytest

import benchmark
from benchmarks import report
from benchmarks.report import affordable, exactness, in_turns
from benchmarks.workload import DRAFT, REGULAR
from mlx_t5.backend import ON_CUDA, cpu_only
from mlx_t5.disk import BUNDLED
from mlx_t5.engine.rows import Stats
from mlx_t5.errors import UserError

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


class Exact:
    """Stands in for the decoder. Its texts depend on the prompt alone, unless it is broken."""

    broken = refused = False

    def __init__(self, model, draft, tokenizer, num_draft, *, exact):
        self.draft = draft
        assert exact

    def job(self, max_tokens):
        return max_tokens

    def results(self, prompts, max_tokens, batch_size):
        if self.refused:
            raise UserError("exact: this device does not keep it")
        changed = self.draft is not None and self.broken
        for prompt in prompts:
            yield SimpleNamespace(tokens=[len(prompt), int(changed)][:max_tokens])


@pytest.mark.parametrize(
    ("state", "reason"),
    [("kept", ""), ("broken", "2 of 2 texts differ"), ("refused", "exact: this device does not")],
)
def test_the_report_says_whether_exact_decoding_holds(state, reason, monkeypatch):
    monkeypatch.setattr(report, "SpeculativeDecoder", Exact)
    monkeypatch.setattr(Exact, state, True, raising=False)
    subject = SimpleNamespace(target=None, tokenizer=None, drafter=lambda proposer: proposer)
    outcome = exactness(subject, 4, ["a", "bb"], 9.0)
    assert outcome["holds"] == (not reason) and outcome["reason"].startswith(reason)


def test_a_report_is_printed_and_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "MOST_PROMPTS", 2)
    monkeypatch.setattr(report, "SpeculativeDecoder", Exact)
    options = ["--dtype", "float32", "--num-draft", "3", "--seconds", "1"]
    assert benchmark.main(["report", *PAIR, *options]) == 0
    out, _ = capsys.readouterr()
    record = json.loads((tmp_path / "report.json").read_text("utf-8"))
    (line,) = [line for line in out.splitlines() if line.startswith(f"| {record['date']} ")]
    cells = dict(zip(report.COLUMNS, line.strip("| ").split(" | "), strict=True))
    assert cells["texts"] == "equal" and cells["exact decoding"] == "holds"
    assert cells["weights"] == "float32"
    assert record["v"]["1"] == 1.0 and record["c"] > 0 and 0 < record["alpha"] <= 1
    assert record["tokens_per_call"] > 2 and record["target"]["d_model"] == 256
    tried = r"mxfp4: \d+\.\d\d, v\(5\) \d+\.\d\d"
    assert re.fullmatch("–" if cpu_only() or ON_CUDA else tried, cells["fp mode"])

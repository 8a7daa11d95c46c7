"""Statistics of results, added up."""

from fake_results import FakeStats
from mlx_t5.cli.output import Totals


def summary(stats: list[FakeStats], seconds: float) -> str:
    totals = Totals()
    for each in stats:
        totals.add(each)
    return totals.summary(seconds)


def test_the_summary_of_one_text():
    assert summary([FakeStats()], 2.0) == (
        "10 tokens in 2.00 s · 5.0 tokens/s · acceptance 50% (6 of 12 drafted) · "
        "2.50 tokens per target call · peak memory 2.50 GB"
    )


def test_the_summary_adds_up_and_leaves_out_what_did_not_happen():
    regular = FakeStats(
        target_calls=10, drafted=0, accepted=0, tokens_per_call=1.0, peak_memory_bytes=0
    )
    line = summary([FakeStats(), regular], 4.0)
    assert line.startswith("2 prompts · 20 tokens in 4.00 s · 5.0 tokens/s")
    assert "1.43 tokens per target call" in line
    assert "peak memory 2.50 GB" in line
    assert "acceptance" not in summary([regular], 1.0)
    assert "tokens per target call" not in summary([], 0.0)

"""Tests the costs of steps: from the table of devices, and learned from measured steps."""

from types import SimpleNamespace

import pytest

from fake_model import FakeModel, random_table
from mlx_t5.backend import mx
from mlx_t5.drafting import costs
from mlx_t5.drafting.costs import MOST, PASS_TIMES, StepCosts, device_kind

MODEL = FakeModel(random_table(5), 5)


@pytest.mark.parametrize(
    ("architecture", "weights", "row"),
    [
        ("applegpu_g13s", "affine", "affine before M3"),
        ("applegpu_g14d", "mxfp4", "fp before M3"),
        ("applegpu_g14g", "bfloat16", "matrix kernel"),
        ("applegpu_g15s", "affine", "quantized"),
        ("applegpu_g16p", "nvfp4", "quantized"),
        ("applegpu_g17s", "float16", "16 bits"),
        ("applegpu_g17s", "float32", "matrix kernel"),
        ("", "bfloat16", "16 bits"),  # a device without a name
    ],
)
def test_an_apple_gpu_finds_its_row_of_the_table(architecture, weights, row, monkeypatch):
    monkeypatch.setattr(costs, "on_cpu", lambda: False)
    monkeypatch.setattr(costs, "on_cuda", lambda: False)
    monkeypatch.setattr(costs, "device_info", lambda: {"architecture": architecture})
    assert device_kind(weights) == (costs.METAL, row) and row in PASS_TIMES


def test_other_devices_find_their_rows_of_the_table(monkeypatch):
    monkeypatch.setattr(costs, "on_cpu", lambda: True)
    for library, row in (("MKL", "cpu"), (costs.REFERENCE_BLAS, "cpu without blas")):
        monkeypatch.setattr(costs, "blas_name", lambda library=library: library)
        assert device_kind("float32") == (costs.CPU, row)
    monkeypatch.setattr(costs, "on_cpu", lambda: False)
    monkeypatch.setattr(costs, "on_cuda", lambda: True)
    assert device_kind("bfloat16") == (costs.CUDA, "cuda")


@pytest.mark.parametrize("row", PASS_TIMES)
def test_more_positions_never_cost_less(row):
    points, times = zip(*PASS_TIMES[row].items(), strict=True)
    assert list(points) == sorted(points) and points[0] == times[0] == 1
    assert list(times) == sorted(times)


def test_seconds_grow_with_positions_rows_and_draft_passes():
    expected = StepCosts(MODEL, MODEL).expected
    regular = expected(1, 1, 0)
    assert expected(1, 5, 0) > regular
    assert expected(1, 1, 2) == pytest.approx(3 * regular), "the draft is as large"
    assert expected(8, 1, 0) == expected(1, 8, 0)
    assert expected(1, 1, 0, sampled=True) > regular
    beyond = [expected(1, m, 0) for m in (64, 128, 192)]
    assert beyond[2] - beyond[1] == pytest.approx(beyond[1] - beyond[0])
    assert beyond[1] > beyond[0]
    assert StepCosts(MODEL).expected(1, 1, 3) == regular, "no draft, no passes"


def test_passes_of_exact_decoding_have_one_width():
    padded = SimpleNamespace(width=8, weights_read=MODEL.weights_read, config=MODEL.config)
    expected = StepCosts(padded).expected
    assert expected(2, 1, 0) == expected(2, 8, 0)
    assert expected(2, 1, 0) == StepCosts(MODEL).expected(2, 8, 0)


def test_proposals_stay_within_metals_vector_kernel(monkeypatch):
    for metal, cpu, most in ((True, False, 7), (True, True, 15), (False, False, 15)):
        monkeypatch.setattr(mx.metal, "is_available", lambda metal=metal: metal)
        monkeypatch.setattr(costs, "on_cpu", lambda cpu=cpu: cpu)
        assert costs.most_proposals() == most


# ---- learned -------------------------------------------------------------------------------------


def ratios(learned, rows=1):
    """Returns learned relative to expected seconds (2, N)."""
    return learned.seconds(rows, True) / learned.seconds(rows, False)


def measure(learned, factor, gamma, passes, times=1):
    for _ in range(times):
        learned.update(1, gamma, passes, factor * learned.expected(1, 1 + gamma, passes))


def greedy():
    learned = StepCosts(MODEL, MODEL)
    learned.most = MOST
    learned.softmax = 0.0  # so that sampled steps take as long
    return learned


def test_the_table_holds_at_first_and_the_first_step_of_a_shape_is_ignored():
    learned = greedy()
    measure(learned, 1000.0, 4, 4)  # this step compiled kernels
    measure(learned, 1000.0, 9, 0, 3)  # not one of the numbers that are compared
    assert ratios(learned) == pytest.approx(1.0)


def test_slower_steps_than_expected_are_gradually_believed():
    learned = greedy()
    for _ in range(100):
        measure(learned, 3, 0, 0)
        measure(learned, 6, 4, 4)
    copying, drafting = ratios(learned)
    assert 1.4 < drafting[4] / copying[0] < 2.1
    assert drafting[4] > drafting[2] > copying[0], "other steps that draft are slower as well"
    assert learned.seconds(8, True) == pytest.approx(learned.seconds(8, False))


def test_a_number_that_is_not_measured_returns_to_the_tables_ratio():
    learned = greedy()
    measure(learned, 9, 4, 4, 30)
    measure(learned, 1, 0, 0, 200)
    assert ratios(learned)[1, 4] == pytest.approx(ratios(learned)[0, 0], rel=0.1)


def test_a_single_slow_step_changes_little():
    learned = greedy()
    measure(learned, 1, 4, 4, 20)
    measure(learned, 100, 4, 4)
    assert 1 < ratios(learned)[1, 4] < 1.2

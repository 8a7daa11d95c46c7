"""Tests the costs of steps: from the table of devices, and learned from measured steps."""

from types import SimpleNamespace

import numpy as np
import pytest

from fake_model import FakeModel, random_table
from mlx_t5.backend import mx
from mlx_t5.drafting import costs
from mlx_t5.drafting.costs import PASS_TIMES, Expected, StepCosts, device_kind

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
    expected = Expected(MODEL, MODEL)
    regular = expected.seconds(1, 1, 0)
    assert expected.seconds(1, 5, 0) > regular
    assert expected.seconds(1, 1, 2) == pytest.approx(3 * regular), "the draft is as large"
    assert expected.seconds(8, 1, 0) == expected.seconds(1, 8, 0)
    assert expected.seconds(1, 1, 0, sampled=True) > regular
    beyond = [expected.seconds(1, m, 0) for m in (64, 128, 192)]
    assert beyond[2] - beyond[1] == pytest.approx(beyond[1] - beyond[0])
    assert beyond[1] > beyond[0]
    assert 0 < expected.catching_up(2, 1) < expected.catching_up(2, 9)
    assert Expected(MODEL).seconds(1, 1, 3) == regular, "no draft, no passes"


def test_passes_of_exact_decoding_have_one_width():
    padded = SimpleNamespace(width=8, weights_read=MODEL.weights_read, config=MODEL.config)
    expected = Expected(padded)
    assert expected.seconds(2, 1, 0) == expected.seconds(2, 8, 0)
    assert expected.seconds(2, 1, 0) == Expected(MODEL).seconds(2, 8, 0)


def test_proposals_stay_within_metals_vector_kernel(monkeypatch):
    for metal, cpu, most in ((True, False, 7), (True, True, 15), (False, False, 15)):
        monkeypatch.setattr(mx.metal, "is_available", lambda metal=metal: metal)
        monkeypatch.setattr(costs, "on_cpu", lambda cpu=cpu: cpu)
        assert costs.most_proposals() == most


# ---- learned -------------------------------------------------------------------------------------


def expected(rows, positions, passes):
    return 1.0 * rows + np.multiply(0.1, positions) + np.multiply(0.2, passes)


def ratios(learned, rows=1):
    """Returns learned relative to expected seconds (2, N), infinite for drafting nothing."""
    numbers = np.array(learned.numbers)
    return learned.seconds(rows) / expected(rows, 1 + numbers, np.outer((0, 1), numbers))


def test_the_table_holds_at_first_and_the_first_step_of_a_shape_is_ignored():
    learned = StepCosts(expected, 7)
    learned.note(1, 4, 4, 1000.0)  # this step compiled kernels
    assert ratios(learned)[0] == pytest.approx(1.0)
    assert ratios(learned)[1, 1:] == pytest.approx(1.0)
    assert np.isinf(learned.seconds(1)[1][0]), "drafting nothing is no choice"


def test_slower_steps_than_expected_are_gradually_believed():
    learned = StepCosts(expected, 7)
    for _ in range(100):
        learned.note(1, 0, 0, 3 * expected(1, 1, 0))
        learned.note(1, 4, 4, 6 * expected(1, 5, 4))
    copying, drafting = ratios(learned)
    assert copying[0] == pytest.approx(3, rel=0.1) and drafting[4] == pytest.approx(6, rel=0.1)
    assert copying[0] < drafting[1] < drafting[4], "other steps that draft are slower as well"
    assert ratios(learned, 8)[0, 0] > 2, "so are other batches"


def test_a_single_slow_step_changes_little():
    learned = StepCosts(expected, 7)
    for _ in range(20):
        learned.note(1, 0, 0, expected(1, 1, 0))
    learned.note(1, 0, 0, 100 * expected(1, 1, 0))
    assert 1 < ratios(learned)[0, 0] < 1.2


def test_a_number_that_is_not_compared_teaches_nothing():
    learned = StepCosts(expected, 7)
    for _ in range(3):
        learned.note(1, 9, 0, 5.0)
    assert ratios(learned)[0] == pytest.approx(1.0)

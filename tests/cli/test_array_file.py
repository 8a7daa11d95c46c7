"""Tests the files that the command line writes for vectors: arrays in NumPy's format."""

import numpy as np
import pytest

from mlx_t5.cli.array_file import ArrayFile
from mlx_t5.errors import UserError

VECTORS = np.arange(12, dtype=np.float32).reshape(4, 3) / 7
MANY = np.tile(VECTORS, (30, 1))  # enough rows for a longer header


def test_the_array_is_as_numpy_writes_it(tmp_path):
    with ArrayFile(str(tmp_path / "vectors.npy")) as output:
        for vector in MANY:
            output.write("a prompt", vector)
    np.save(tmp_path / "reference.npy", MANY)
    path, reference = (tmp_path / f"{name}.npy" for name in ("vectors", "reference"))
    assert np.array_equal(np.load(path), MANY) and np.load(path).dtype == np.float32
    assert path.read_bytes() == reference.read_bytes()


def test_each_row_belongs_to_its_prompt(tmp_path):
    path = tmp_path / "vectors.npy"
    outcomes = [UserError("empty"), VECTORS[0], UserError("too long"), VECTORS[1]]
    with ArrayFile(str(path)) as output:
        for outcome in outcomes:
            output.write("a prompt", outcome)
    array = np.load(path)
    assert array.shape == (4, 3) and np.isnan(array[[0, 2]]).all()
    assert np.array_equal(array[[1, 3]], VECTORS[:2])


def test_an_interrupted_array_holds_what_was_finished(tmp_path):
    path = tmp_path / "vectors.npy"
    path.write_text("from earlier")
    with pytest.raises(KeyboardInterrupt), ArrayFile(str(path)) as output:
        output.write("a prompt", VECTORS[0])
        assert path.read_text() == "from earlier", "it is replaced at the end"
        raise KeyboardInterrupt
    assert np.array_equal(np.load(path), VECTORS[:1])


def test_without_a_vector_there_is_no_file(tmp_path):
    path = tmp_path / "vectors.npy"
    with ArrayFile(str(path)) as output:
        output.write("a prompt", UserError("empty"))
    assert not path.exists()

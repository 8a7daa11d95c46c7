"""A file in parts: every rank has its lines, and rank 0 joins what becomes of them."""

import os

import pytest

from meeting import Meeting
from mlx_t5.cli.output import LineFile
from mlx_t5.errors import UserError
from mlx_t5.machines.parts import AT_ONCE, Part


@pytest.mark.parametrize("total", [1, 7, 3 * AT_ONCE + 5])
@pytest.mark.parametrize(("done", "lines"), [(0, 1), (1, 3)])
def test_parts_are_joined_in_the_order_of_the_input(tmp_path, total, done, lines):
    output = tmp_path / "out.txt"
    wanted = [f"{i} {k} é\u2028" for i in range(total) for k in range(lines)]
    kept = "".join(f"{line}\n" for line in wanted[: done * lines]).encode()
    output.write_bytes(kept + b"half a line")

    def work(ranks):
        part = Part(str(output), done, ranks)
        own = list(part.of(range(total)))
        assert len(own) == part.count(total)
        with LineFile(part.path) as file:
            for i in own:
                for k in range(lines):
                    file.write_line(f"{i} {k} é\u2028")
        part.join(lines, len(kept), lambda path: LineFile(path, len(kept)))

    assert Meeting(3).run(work) == [None] * 3
    assert output.read_text("utf-8").split("\n") == [*wanted, ""]
    assert os.listdir(tmp_path) == ["out.txt"], "parts are gone once the output is whole"


def test_an_output_that_cannot_be_replaced_is_refused():
    def work(ranks):
        Part("/dev/null", 0, ranks)

    for error in Meeting(2).run(work):
        assert isinstance(error, UserError) and "/dev/null is no file" in str(error)

"""The reader of snippets: what it finds on a page, and what it takes for the same output."""

import os
import sys

import pytest

import main
import snippets

PAGE = """# A page

<!-- not run: takes minutes -->
```bash
python benchmark.py compare  # everything
```

```python
print(1 + 1)
```

```text
2
```

Words between a block and a `text` block part them:

```bash
echo one \\
    two
```

They belong to nothing.

```text
one two
```
"""


@pytest.fixture
def session(tmp_path):
    return snippets.Session(tmp_path, lambda port: "http://localhost:1")


def test_blocks_of_a_page(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    blocks = snippets.read(tmp_path / "page.md")
    assert [(s.language, s.line, s.expected, s.not_run) for s in blocks] == [
        ("bash", 4, None, "takes minutes"),
        ("python", 8, "2", None),
        ("bash", 18, None, None),
        ("text", 25, None, None),
    ]
    assert list(snippets.commands(blocks[0].code)) == [["python", "benchmark.py", "compare"]]
    assert list(snippets.commands(blocks[2].code)) == [["echo", "one", "two"]]


def test_a_command_of_ours_reads_a_pipe_and_a_variable(session, monkeypatch):
    seen = []

    def read(argv: list[str]) -> int:
        seen.append((argv, sys.stdin.read(), os.environ["NO_COLOR"]))
        print("text")
        print("12 tokens", file=sys.stderr)
        return 0

    monkeypatch.setattr(main, "main", read)
    monkeypatch.delenv("NO_COLOR", raising=False)
    code = 'echo prompt | NO_COLOR=1 python main.py --stop "a b"'
    session.check(snippets.Snippet(1, "bash", code, "text\n9 tokens"))
    assert seen == [(["--stop", "a b"], "prompt\n", "1")] and "NO_COLOR" not in os.environ
    with pytest.raises(AssertionError):
        session.check(snippets.Snippet(2, "bash", code, "text\n9 words"))


def test_what_differs_from_run_to_run_is_not_compared():
    one = '{"id":"cmpl-1a","decode_seconds": 0.1, "drafted": 7}'
    other = '{"id":"cmpl-2b","decode_seconds": 2e-3, "drafted": 7}'
    assert snippets.plain(one) == snippets.plain(other) != snippets.plain(one.replace("7", "8"))

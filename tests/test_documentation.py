"""What README, docs and CONTRIBUTING say: snippets print it, files and options that they name exist."""

import functools
import re

import pytest

import model
import snippets
from snippets import ROOT

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
OWNERS = ("google", "google-t5")  # of models on the Hub
ids = functools.partial(pytest.mark.parametrize, ids=lambda page: page.name)


@pytest.fixture
def session(tmp_path, monkeypatch, request):
    """A reader who works through one page; models are loaded once for all pages."""
    monkeypatch.setattr(model, "load", loaded)
    monkeypatch.delenv("NO_COLOR", raising=False)
    folder = tmp_path / "t5-mlx"
    folder.mkdir()
    return snippets.Session(folder, lambda: request.getfixturevalue("server").url)


load = model.load


@functools.cache
def loaded(folder, dtype=None):
    return load(folder, dtype)


@ids("page", PAGES)
def test_snippets_print_what_the_page_says(page, session):
    for snippet in snippets.read(page):
        where = f"{page.name}:{snippet.line}"
        assert snippet.language in ("bash", "python"), f"{where}: belongs to no snippet"
        if not snippet.not_run:
            try:
                session.check(snippet)
            except Exception as error:
                raise AssertionError(f"{where}: {error}") from error


@ids("page", DOCS)
def test_a_page_opens_with_a_snippet(page):
    opening = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[0]
    assert re.search(r"^```(bash|python)$", opening, re.MULTILINE)


def test_readme_is_short_and_ends_with_an_index_of_all_pages():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 250
    last = "\n".join(lines[max(i for i, line in enumerate(lines) if line.startswith("## ")) :])
    assert re.findall(r"\(docs/(\S+\.md)\)", last) == [*dict.fromkeys(re.findall(r"\(docs/(\S+\.md)\)", last))]
    assert set(re.findall(r"\(docs/(\S+\.md)\)", last)) == {page.name for page in DOCS}


def prose(page) -> str:
    """A page without its blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


@ids("page", TEXTS)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not target.startswith("http"):
            name, _, heading = target.partition("#")
            place = (page.parent / name).resolve() if name else page
            assert place.exists(), target
            assert not heading or heading in headings(place), target


def headings(page) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def named(page) -> list[str]:
    """What looks like a file or folder of the project, in prose and in commands."""
    words = re.findall(r"`([\w.][\w./+-]*)`", prose(page))
    for snippet in snippets.read(page):
        if snippet.language == "bash":
            words += [word for words in snippets.commands(snippet.code) for word in words]
    return [word.removesuffix("+lookup") for word in words if is_ours(word)]


def is_ours(word: str) -> bool:
    if "/" not in word:
        return word.endswith((".py", ".md", ".toml"))
    return bool(re.fullmatch(r"[\w.][\w./+-]*", word)) and word.split("/")[0] not in ("models", ".venv", *OWNERS)


@ids("page", TEXTS)
def test_files_exist(page):
    missing = [
        name for name in named(page) if not ((ROOT / name).exists() or (page.parent / name).exists())
    ]
    assert not missing


@functools.cache
def options(program: str) -> set[str]:
    """All long options of a program, those of its subcommands included."""
    subcommands = ("compare", "sweep", "peers", "quantize", "memory", "server")
    if program != "benchmark":
        return snippets.options(program)
    return set().union(*(snippets.options(program, name) for name in subcommands))


@ids("page", TEXTS)
def test_options_exist(page):
    known = set().union(*map(options, snippets.PROGRAMS))
    assert set(re.findall(r"`(--[a-z][\w-]*)", prose(page))) <= known
    for snippet in snippets.read(page):
        if snippet.language == "bash":
            for words in snippets.commands(snippet.code):
                for program in snippets.PROGRAMS:
                    if f"{program}.py" in words or program in words:
                        given = {word for word in words if re.match(r"--[a-z]", word)}
                        assert given <= options(program), words

"""Tests README, docs and CONTRIBUTING: snippets print their output, and named things exist."""

import functools
import io
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path

import pytest

import main
import model
import snippets
from demo import picture
from devices import is_refusal
from snippets import ROOT

README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, *DOCS]
OTHERS = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "demo/README.md")
TEXTS = [*PAGES, *(ROOT / name for name in OTHERS)]
TODAY = [page for page in TEXTS if page.name != "CHANGELOG.md"]  # which also names removed things
# Outputs of commands, owners on the Hub, and folders of an earlier commit.
ELSEWHERE = ("models/", ".venv/", "google/", "google-t5/", "me/", "demo/recipe/", "castorini/")
ELSEWHERE += ("sentence-transformers/", "PixArt-alpha/")
PROGRAMS = ("main", "convert", "server", "benchmark", "distill", "finetune", "demo.grow")
ids = functools.partial(pytest.mark.parametrize, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.fixture(scope="module")
def load_once():
    """Returns a `model.load` that keeps loaded models, in float32 unless a type is given."""
    load, loaded = model.load, {}

    def once(folder, dtype=None, shared_with=None):
        arguments = Path(folder).resolve(), dtype or "float32"
        key = (*arguments, id(shared_with))
        if key not in loaded:
            loaded[key] = load(*arguments, shared_with=shared_with)
        return loaded[key]

    yield once
    loaded.clear()  # other tests measure this process's memory


@pytest.fixture
def session(tmp_path, monkeypatch, request, load_once):
    """Returns a session that runs one page as a reader would."""
    monkeypatch.setattr(model, "load", load_once)
    monkeypatch.delenv("NO_COLOR", raising=False)
    folder = tmp_path / "t5-mlx"
    folder.mkdir()
    return snippets.Session(folder, lambda port: request.getfixturevalue("server").url)


@pytest.mark.slow
@ids("page", [page for page in PAGES if page.name != "works-with.md"])  # has its own test file
def test_snippets_print_what_the_page_says(page, session):
    for snippet in snippets.read(page):
        location = f"{page.name}:{snippet.line}"
        assert snippet.language in ("bash", "python"), f"{location}: belongs to no snippet"
        if not snippet.not_run:
            try:
                session.check(snippet)
            except Exception as error:
                if not is_refusal(error):
                    raise AssertionError(f"{location}: {error}") from error


def text(page: Path) -> str:
    """Returns the text of a page."""
    return page.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """Returns a page without its blocks."""
    return re.sub(r"^```.*?^```$", "", text(page), flags=re.MULTILINE | re.DOTALL)


def commands(page: Path) -> Iterator[list[str]]:
    """Yields the words of every command of a page, in blocks and in sentences."""
    for command in re.findall(r"`(python [^`]+)`", prose(page)):
        yield shlex.split(command)
    for snippet in snippets.read(page):
        if snippet.language == "bash":
            lines = snippet.code.replace("\\\n", " ").splitlines()
            yield from filter(None, (shlex.split(line, comments=True) for line in lines))


@ids("page", TEXTS)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not target.startswith("http"):
            name, _, heading = target.partition("#")
            linked = (page.parent / name).resolve() if name else page
            assert linked.exists(), target
            assert not heading or heading in headings(linked), target


def test_pages_that_the_code_names_exist():
    folders = ("mlx_t5", "benchmarks", "demo", "tests")
    files = [*ROOT.glob("*.py"), *(f for name in folders for f in (ROOT / name).rglob("*.py"))]
    named = {page for f in files for page in re.findall(r"\bdocs/[\w-]+\.md", text(f))}
    assert named and named <= {str(page.relative_to(ROOT)) for page in DOCS}


def test_the_picture_shows_what_the_bundled_pair_writes():
    assert picture.draw(picture.run()) == text(picture.PICTURE)


def test_the_version_is_the_same_everywhere(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        main.main(["--version"])
    version = capsys.readouterr().out.strip()
    assert f'\nversion = "{version}"\n' in text(ROOT / "pyproject.toml")
    assert re.search(r"^## \[(\d.+)\]", text(ROOT / "CHANGELOG.md"), re.MULTILINE)[1] == version


def headings(page: Path) -> set[str]:
    """Returns the anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@ids("page", TODAY)
def test_files_that_pages_name_exist(page):
    words = " ".join(re.findall(r"`([^`]+)`", prose(page))).split()
    words += [word for command in commands(page) for word in command]
    files = {word.removesuffix("+lookup") for word in words if is_project_file(word)}
    missing = {f for f in files if not (ROOT / f).exists() and not (page.parent / f).exists()}
    assert not missing


def is_project_file(word: str) -> bool:
    """Returns whether a word looks like a file or folder of the project."""
    if not re.fullmatch(r"[\w.][\w./+-]*", word):
        return False
    if "/" not in word:
        return word.endswith((".py", ".md", ".toml")) or word.startswith("requirements")
    return not word.startswith(ELSEWHERE)


@functools.cache
def help_of(program: str, *subcommand: str) -> str:
    """Returns the help of a program."""
    output = io.StringIO()
    with redirect_stdout(output), suppress(SystemExit):
        import_module(program).main([*subcommand, "--help"])
    return output.getvalue()


def options(program: str) -> set[str]:
    """Returns all long options of a program and of its subcommands."""
    subcommands = re.findall(r"^    (\w+)  ", help_of(program), re.MULTILINE)
    helps = help_of(program) + "".join(help_of(program, name) for name in subcommands)
    return set(re.findall(r"--[a-z][\w-]*", helps))


@ids("page", TODAY)
def test_options_that_pages_name_exist(page):
    known = set().union(*map(options, PROGRAMS))
    assert set(re.findall(r"`(--[a-z][\w-]*)", prose(page))) <= known
    for words in commands(page):
        line = " ".join(words)
        program = re.search(r"python (-m )?([\w.]+?)(\.py)?(?= |$)", line)
        if program and program[2] in PROGRAMS:
            arguments = line[program.end() :].split()  # after any launcher
            assert {a for a in arguments if re.match(r"--[a-z]", a)} <= options(program[2]), words

"""Tests README, docs and CONTRIBUTING: snippets print their output, and links lead somewhere."""

import functools
import re
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


@ids("page", TEXTS)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not target.startswith("http"):
            name, _, heading = target.partition("#")
            linked = (page.parent / name).resolve() if name else page
            assert linked.exists(), target
            assert not heading or heading in headings(linked), target


def test_the_picture_shows_what_the_bundled_pair_writes():
    assert picture.draw(picture.run()) == text(picture.PICTURE)


def test_the_version_is_the_same_everywhere(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        main.main(["--version"])
    version = capsys.readouterr().out.strip()
    assert re.search(r"^## \[(\d.+)\]", text(ROOT / "CHANGELOG.md"), re.MULTILINE)[1] == version


def headings(page: Path) -> set[str]:
    """Returns the anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}

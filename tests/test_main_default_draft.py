"""main.py with only a Hub id also downloads the default draft, from a fake Hub."""

import shutil
import subprocess
import sys

import pytest

from command_line import ROOT, byte_model
from fake_hub import FakeHub, serve

TARGET, DRAFT = "google/byt5-xl", "google/byt5-small"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Returns the files of a target and of its draft by repository."""
    root = tmp_path_factory.mktemp("hub")
    folders = {TARGET: byte_model(root / "target"), DRAFT: byte_model(root / "draft", noise=0.1)}
    return {
        name: {file.name: file.read_bytes() for file in folder.iterdir()}
        for name, folder in folders.items()
    }


@pytest.fixture
def main(tmp_path):
    """Returns `main(hub, *options, **environment)`: (status, standard output, standard error)."""

    def run(hub: FakeHub, *options: str, **environment: str) -> tuple[int, str, str]:
        command = [sys.executable, str(ROOT / "main.py"), "--model", TARGET, "--prompt", "a"]
        done = subprocess.run(
            [*command, "-m", "12", "--dtype", "float32", "--num-draft", "5", *options],
            cwd=tmp_path,
            env=hub.environment(tmp_path / "hf") | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.slow
def test_the_default_draft_comes_with_its_target_and_is_kept(files, main, tmp_path):
    with serve(FakeHub(files)) as hub:
        status, text, err = main(hub)
        assert status == 0 and len(text) > 5, err
        assert f"its default draft is {DRAFT}; --draft-model none does without\n" in err
        assert "target models/byt5-xl, draft models/byt5-small (its default draft)\n" in err
        assert " drafted) " in err
        hub.requests.clear()
        assert main(hub)[:2] == (0, text)
        assert not hub.requests, "everything is there"
        # The draft is converted again from Hugging Face's cache, even without a connection.
        shutil.rmtree(tmp_path / "models" / "byt5-small")
        status, again, err = main(hub, HF_HUB_OFFLINE="1")
        assert (status, again) == (0, text) and "converted google/byt5-small to models/" in err
        # No request is made if the target was converted earlier, because it might fail slowly.
        for folder in ("models/byt5-small", "hf"):
            shutil.rmtree(tmp_path / folder)
        hub.requests.clear()
        status, again, err = main(hub)
        assert (status, again) == (0, text) and not hub.requests
        told = f"its default draft is not there; get it with: python convert.py --model {DRAFT})\n"
        assert f"target models/byt5-xl (regular decoding: {told}" in err
        # Beams use no draft, so none is downloaded.
        shutil.rmtree(tmp_path / "models")
        status, _, err = main(hub, "--num-beams", "2")
        assert status == 0 and "its default draft is not there" in err
        assert hub.requests and DRAFT not in "".join(path for _, path in hub.requests)

"""Sets up all tests: exact float32 products on every device, and a Ctrl-C that arrives."""

import functools
import os
import signal
import sys
from pathlib import Path

os.environ["MLX_ENABLE_TF32"] = "0"  # read once, when MLX is imported
os.environ.setdefault("T5_COMPILE", "0")  # a CPU's layers; their own tests compile them
# Shells start background processes that ignore Ctrl-C, and child processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402

import families  # noqa: E402
import index_checks  # noqa: E402

if os.environ.get("T5_REHEARSE"):
    index_checks.install()


def pytest_collection_finish():
    """Gives torch one thread, because with tiny models threads mostly wait for each other."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def reference_of(tmp_path_factory):
    """Returns `reference_of(family)`; the first call makes and saves the reference model."""
    root, named = tmp_path_factory.mktemp("families"), {f.name: f for f in families.FAMILIES}

    @functools.cache
    def once(family: families.Family) -> families.Reference:
        return families.make(family, root / family.name)

    return lambda family: once(named.get(family, family))


@pytest.fixture(params=families.FAMILIES, ids=lambda family: family.name)
def reference(request, reference_of):
    """Returns the reference model of each family in turn."""
    return reference_of(request.param)


@pytest.fixture
def tiny(tmp_path):
    """Returns a small Hugging Face folder with random weights."""
    import checkpoints

    return checkpoints.tiny(tmp_path / "source")


@pytest.fixture
def respelled(monkeypatch):
    """Returns `respelled(folder)`: its path in capitals, which leads to it as on a Mac's disk.

    On a disk that distinguishes case the path is a link, and resolving paths follows no links.
    """

    def respell(folder: Path) -> Path:
        other = folder.with_name(folder.name.upper())
        if not other.exists():
            other.symlink_to(folder)
            monkeypatch.setattr(Path, "resolve", lambda path, strict=False: path.absolute())
        return other

    return respell


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> list[str]:
    """Returns options for a random target and draft in float32, with 5 proposed tokens."""
    from command_line import byte_model

    root = tmp_path_factory.mktemp("models")
    target, draft = byte_model(root / "target"), byte_model(root / "draft", noise=0.1)
    names = ["--model", str(target), "--draft-model", str(draft)]
    return [*names, "--dtype", "float32", "--num-draft", "5"]


@pytest.fixture
def unpadded(monkeypatch):
    """Pads sources to the longest source only, also on GPUs, which use multiples of 32."""
    for module in ("network.cache", "engine.memory", "network.encoding"):
        monkeypatch.setattr(f"mlx_t5.{module}.source_width", lambda longest, rows=2: longest)


@pytest.fixture
def costs_of_a_cpu(monkeypatch):
    """Makes "auto" start from the same costs of passes on every machine."""
    from mlx_t5.drafting import costs

    monkeypatch.setattr(costs, "device_kind", lambda weights: (costs.CPU, "cpu"))


@pytest.fixture
def unchecked_indices():
    """Turns off the check of indices, which waits for the device."""
    index_checks.remove()
    yield
    if os.environ.get("T5_REHEARSE"):
        index_checks.install()


@pytest.fixture
def run(capsys):
    """Returns a function that runs main.py: (status, standard output, standard error)."""
    import main

    def run(*argv: str) -> tuple[int, str, str]:
        try:
            status = main.main(list(argv))
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def server():
    """Starts a process that serves the bundled pair with lookup."""
    from serving_process import LOOKUP_TOO, Server

    running = Server(*LOOKUP_TOO)
    yield running
    running.close()


@pytest.fixture(scope="module")  # freed early, as other tests measure memory
def decoder():
    """Returns a decoder of the same models, which writes the expected texts of the server."""
    from mlx_t5 import loading
    from mlx_t5.decoder import SpeculativeDecoder
    from mlx_t5.disk import BUNDLED

    chosen = loading.choose_pair(None, str(BUNDLED / "draft") + "+lookup")
    return SpeculativeDecoder.load(chosen, "float32", num_draft=5)

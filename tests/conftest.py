"""Before any test module: exact float32 products on every device, and Ctrl-C that arrives."""

import os
import signal
import sys
from pathlib import Path

os.environ["MLX_ENABLE_TF32"] = "0"  # read once, when MLX is imported
# A shell starts what it runs in the background without it, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402

import families  # noqa: E402
import index_checks  # noqa: E402

if os.environ.get("T5_REHEARSE"):
    index_checks.install()


def pytest_collection_finish():
    """One thread for torch, whose models are tiny here: several mostly wait for each other."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """`made(family)`: the family's reference model and its folder, made on the first call."""
    return families.Maker(tmp_path_factory.mktemp("families"))


@pytest.fixture(params=families.FAMILIES, ids=lambda family: family.name)
def reference(request, made):
    """The reference of every family in turn."""
    return made(request.param)


@pytest.fixture
def tiny(tmp_path):
    """A small Hugging Face folder with random weights."""
    import checkpoints

    return checkpoints.tiny(tmp_path / "source")


@pytest.fixture
def respelled(monkeypatch):
    """`respelled(folder)`: its name in capitals, which leads to it, as a Mac's disk has it.

    Where the disk minds case, that is a link, and none are followed to see what a path stands for.
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
    """Options that name a random target and draft, which proposes 5 tokens, in float32."""
    from command_line import byte_model

    root = tmp_path_factory.mktemp("models")
    target, draft = byte_model(root / "target"), byte_model(root / "draft", noise=0.1)
    names = ["--model", str(target), "--draft-model", str(draft)]
    return [*names, "--dtype", "float32", "--num-draft", "5"]


@pytest.fixture
def unpadded(monkeypatch):
    """Sources as wide as the longest of them, also where GPUs pad them to multiples of 32."""
    for module in ("network.cache", "network.memory", "network.encoding"):
        monkeypatch.setattr(f"mlx_t5.{module}.source_width", lambda longest, rows=2: longest)


@pytest.fixture
def costs_of_a_cpu(monkeypatch):
    """What "auto" expects of passes before it has seen any is the same on every machine."""
    from mlx_t5.drafting import costs

    monkeypatch.setattr(costs, "device_kind", lambda weights: (costs.CPU, "cpu"))


@pytest.fixture
def unchecked_indices():
    """Without the check of indices, which waits for the device."""
    index_checks.remove()
    yield
    if os.environ.get("T5_REHEARSE"):
        index_checks.install()


@pytest.fixture
def run(capsys):
    """Runs the command line in this process: status, standard output, standard error."""
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
    """A server of the bundled pair that copies as well, in a process of its own."""
    from serving_process import LOOKUP_TOO, Server

    running = Server(*LOOKUP_TOO)
    yield running
    running.close()


@pytest.fixture(scope="module")  # not longer: other tests measure this process's memory
def decoder():
    """The same models in this process: what the server is to write."""
    from convert import convert
    from decoder import SpeculativeDecoder
    from mlx_t5 import loading
    from mlx_t5.names import BUNDLED

    chosen = loading.choose_pair(None, str(BUNDLED / "draft") + "+lookup", convert)
    target, drafter, tokenizer, other = loading.load_pair(chosen, "float32")
    return SpeculativeDecoder(target, drafter, tokenizer, 5, draft_tokenizer=other)

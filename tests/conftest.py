"""Before any test module: where to import from, and exact float32 products on every device."""

import os
import sys
from pathlib import Path

os.environ["MLX_ENABLE_TF32"] = "0"  # read once, when MLX is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest  # noqa: E402

import families  # noqa: E402


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """`made(family)`: the family's reference model and its folder, made on the first call."""
    return families.Maker(tmp_path_factory.mktemp("families"))


@pytest.fixture(params=families.FAMILIES, ids=lambda family: family.name)
def reference(request, made):
    """The reference of every family in turn."""
    return made(request.param)

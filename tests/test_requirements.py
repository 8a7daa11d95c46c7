"""Each kind of machine gets one library of MLX and otherwise the same packages, either way."""

from __future__ import annotations

import sys

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from snippets import ROOT

PYTHON = {"python_version": "3.12", "python_full_version": "3.12.0"}
LINUX = {"sys_platform": "linux", "platform_machine": "x86_64", **PYTHON}
MAC = {"sys_platform": "darwin", "platform_machine": "arm64", **PYTHON}


def listed(name: str) -> list[Requirement]:
    """Returns the requirements in a file, and in those that it includes."""
    requirements, file = [], ROOT / name
    for line in file.read_text(encoding="utf-8").splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("-r "):
            path = (file.parent / line[3:]).resolve()
            requirements += listed(str(path.relative_to(ROOT)))
        elif line:
            requirements.append(Requirement(line))
    return requirements


def required(name: str, machine: dict[str, str]) -> dict[str, Requirement]:
    """Returns the requirements that pip would install from a file, by package."""
    requirements: dict[str, Requirement] = {}
    for requirement in listed(name):
        if not requirement.marker or requirement.marker.evaluate(machine):
            assert requirement.name not in requirements, f"{requirement.name} twice"
            requirements[requirement.name] = requirement
    return requirements


def test_each_machine_gets_one_library_of_mlx_and_otherwise_the_same_packages():
    """mlx[cpu] and mlx[cuda13] have a file of the same name; on a Mac mlx has its own."""
    cpu, mac = (required("requirements.txt", machine) for machine in (LINUX, MAC))
    cuda = required("requirements/cuda.txt", LINUX)
    assert [set(r["mlx"].extras) for r in (cpu, mac, cuda)] == [{"cpu"}, set(), {"cuda13"}]
    assert set(cpu) - set(cuda) == {"mkl"} and set(cuda) - set(mac) == {"nvidia-cuda-crt"}
    assert all(cuda[name] == mac[name] == cpu[name] for name in set(mac) - {"mlx"})
    for name in ("server", "benchmark"):  # installed with either file
        assert "mlx" not in required(f"requirements/{name}.txt", LINUX)


@pytest.mark.parametrize(
    ("files", "extras"),
    [
        (["requirements.txt"], ["", "cpu"]),
        (["requirements/common.txt", "requirements/cuda.txt"], ["", "cuda13"]),
        (["requirements/server.txt"], ["server"]),
        (["requirements/benchmark.txt"], ["benchmark"]),
        (["requirements/ray.txt"], ["ray"]),
    ],
)
def test_an_installed_package_requires_what_the_files_list(files, extras):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = {"": project["dependencies"], **project["optional-dependencies"]}
    required = {Requirement(line) for extra in extras for line in declared[extra]}
    if "cuda13" in extras:  # which has MLX, but not on a Mac
        required = {r for r in required if "darwin" not in str(r.marker)}
    assert required == {r for name in files for r in listed(name)}

"""Each kind of machine gets one library of MLX and otherwise the same packages."""

from __future__ import annotations

from pathlib import Path

from packaging.requirements import Requirement

import main

ROOT = Path(main.__file__).resolve().parent
PYTHON = {"python_version": "3.12", "python_full_version": "3.12.0"}
LINUX = {"sys_platform": "linux", "platform_machine": "x86_64", **PYTHON}
MAC = {"sys_platform": "darwin", "platform_machine": "arm64", **PYTHON}


def required(name: str, machine: dict[str, str]) -> dict[str, Requirement]:
    """Returns the requirements that pip would install from a file, by package."""
    requirements: dict[str, Requirement] = {}
    file = ROOT / name
    for line in file.read_text(encoding="utf-8").splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("-r "):
            path = (file.parent / line[3:]).resolve()
            requirements |= required(str(path.relative_to(ROOT)), machine)
        elif line:
            requirement = Requirement(line)
            if not requirement.marker or requirement.marker.evaluate(machine):
                assert requirement.name not in requirements, f"{requirement.name} twice"
                requirements[requirement.name] = requirement
    return requirements


def test_one_library_of_mlx_for_each_machine():
    """mlx[cpu] and mlx[cuda13] have a file of the same name; on a Mac mlx has its own."""
    assert required("requirements.txt", LINUX)["mlx"].extras == {"cpu"}
    assert required("requirements.txt", MAC)["mlx"].extras == set()
    assert required("requirements/cuda.txt", LINUX)["mlx"].extras == {"cuda13"}
    for name in ("server", "benchmark"):  # installed with either file
        assert "mlx" not in required(f"requirements/{name}.txt", LINUX)


def test_a_gpu_needs_all_but_mkl():
    cpu, cuda = (required(name, LINUX) for name in ("requirements.txt", "requirements/cuda.txt"))
    mac = required("requirements.txt", MAC)
    assert set(cpu) - set(cuda) == {"mkl"} and set(cuda) - set(mac) == {"nvidia-cuda-crt"}
    for name in set(mac) - {"mlx"}:
        assert cuda[name] == mac[name] == cpu[name]

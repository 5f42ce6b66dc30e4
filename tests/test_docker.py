"""The Dockerfiles copy what there is, and the CPU image runs the quickstart where docker is."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib

import pytest

from tests.conftest import ROOT

FILES = sorted((ROOT / "scripts" / "docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_dockerfiles_copy_all_package_and_environment_files(file: object) -> None:
    """Every folder of the wheel's packages, and every file that the environment is made from."""
    text = file.read_text()  # type: ignore[attr-defined]
    copied = {
        name for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()
    }
    assert copied and all((ROOT / name).exists() for name in copied)
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-dir"
    ]
    assert {*folders.values()} <= copied
    assert {"pyproject.toml", "constraints.txt", "constraints-dev.txt", "scripts"} <= copied


def docker_runs() -> bool:
    """Return True if there is a client of docker, and a daemon that answers it."""
    command = shutil.which("docker")
    return (
        command is not None
        and not subprocess.run([command, "info"], capture_output=True, check=False).returncode
    )


@pytest.mark.full
@pytest.mark.skipif(not docker_runs(), reason="no docker daemon answers")
def test_the_cpu_image_runs_the_quickstart() -> None:
    build = ["docker", "build", "-q", "-f", "scripts/docker/cpu.Dockerfile", "."]
    image = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=True)
    run = ["docker", "run", "--rm", image.stdout.strip(), "./scripts/quickstart.sh"]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "eagle" in done.stdout, done.stderr[-2000:]

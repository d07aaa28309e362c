"""The repository itself: what a clone holds, and that its parts agree."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import imagegen

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
ABSOLUTE_PATH = re.compile(r"(?<![\w.~$}<>!-])/(home|root|work|workspace|Users|mnt|data\d*)/\w")
REGISTRY_HOST = re.compile(
    r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|registry\.npmjs|deb\.debian\.org"
    r"|conda\.anaconda\.org|--(extra-)?index-url"
)
# Python, operating system and machine of the environments that are supported.
ENVIRONMENTS = [
    (python, *platform)
    for python in ("3.10", "3.11", "3.12", "3.13")
    for platform in (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))
]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Every text file that belongs to the repository, by its path."""
    listing = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
    )
    if listing.returncode != 0:
        pytest.skip(f"not a git checkout: {listing.stderr.strip()}")
    found = {}
    for name in filter(None, listing.stdout.split("\0")):
        path = ROOT / name
        content = path.read_bytes() if path.is_file() else b"\0"
        if b"\0" not in content:
            found[name] = content.decode()
    assert "pyproject.toml" in found
    return found


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """The [project] table of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def matches(texts: dict[str, str], pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]


def test_no_absolute_paths(texts: dict[str, str]) -> None:
    assert matches(texts, ABSOLUTE_PATH) == []


def test_no_registry_hosts(texts: dict[str, str]) -> None:
    assert matches(texts, REGISTRY_HOST) == []


def test_no_test_file_is_imported(texts: dict[str, str]) -> None:
    found = []
    for name, text in texts.items():
        for node in ast.walk(ast.parse(text if name.endswith(".py") else "")):
            if isinstance(node, ast.Import | ast.ImportFrom):
                imported = [alias.name for alias in node.names]
                parts = ".".join([getattr(node, "module", None) or "", *imported]).split(".")
                found += [f"{name}:{node.lineno}" for part in parts if part.startswith("test_")]
    assert found == []


def test_readme_is_short(texts: dict[str, str]) -> None:
    assert len(texts["README.md"].splitlines()) < 250


def test_every_yaml_parses(texts: dict[str, str]) -> None:
    names = [name for name in texts if name.endswith((".yaml", ".yml"))]
    assert "conf/train.yaml" in names
    for name in names:
        assert isinstance(yaml.safe_load(texts[name]), dict | list | None), name


def test_changelog_tells_of_this_version(texts: dict[str, str]) -> None:
    assert re.search(rf"^## \[?{re.escape(imagegen.__version__)}\b", texts["CHANGELOG.md"], re.M)


def pins(python: str, system: str, machine: str) -> dict[str, str]:
    """The versions that constraints.txt gives for an environment."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": system,
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
    }
    found: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        line = line.partition("#")[0].strip()
        if not line:
            continue
        requirement = Requirement(line)
        assert not requirement.extras, f"pip allows no extras in constraints: {line}"
        if requirement.marker is None or requirement.marker.evaluate(environment):
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", line
            assert requirement.name not in found, f"two versions for {environment}: {line}"
            found[requirement.name] = specifier.version
    return found


@pytest.mark.parametrize(("python", "system", "machine"), ENVIRONMENTS)
def test_constraints_pin_every_dependency_within_its_range(
    project: dict[str, Any], python: str, system: str, machine: str
) -> None:
    pinned = pins(python, system, machine)
    # Gradio takes no Pillow 13 yet, so `make page` installs it beside the pins.
    groups = project["optional-dependencies"].items()
    extras = [lines for name, lines in groups if name != "page"]
    declared = [*project["dependencies"], *(line for extra in extras for line in extra)]
    for requirement in map(Requirement, declared):
        needed = requirement.marker is None or requirement.marker.evaluate(
            {"python_version": python}
        )
        if needed and requirement.name != "imagegen":
            assert requirement.name in pinned, f"{requirement.name} has no pin"
            version = pinned[requirement.name]
            assert requirement.specifier.contains(version), f"{requirement} but {version} is pinned"


def test_docker_image_copies_only_what_its_context_holds(texts: dict[str, str]) -> None:
    allowed = {line[1:] for line in texts[".dockerignore"].splitlines() if line.startswith("!")}
    copied = [
        source.split("/")[0]
        for line in re.findall(r"^COPY (.+)$", texts["Dockerfile"], re.M)
        for source in line.split()[:-1]
    ]
    assert copied
    assert set(copied) <= allowed
    assert [name for name in sorted(allowed) if not (ROOT / name).exists()] == []

"""Names of earlier versions: classes are found under their present names, commands name theirs."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import imagegen
from imagegen.core import moved
from imagegen.core.build import resolve_target
from imagegen.core.errors import UserError
from imagegen.core.installation import PROJECT_ROOT
from imagegen.model.embeddings import InputEmbedding, Neighbourhood


def test_a_class_is_found_under_its_former_name() -> None:
    assert resolve_target("imagegen.embedding.Neighbourhood", InputEmbedding) is Neighbourhood
    assert moved.current_name("imagegen.muon.Muon") == "imagegen.training.muon.Muon"
    assert moved.current_name("torch.optim.AdamW") == "torch.optim.AdamW"
    assert moved.current_name(None) is None


@pytest.mark.parametrize("former", sorted(moved.MODULES))
def test_modules_are_where_the_table_says(former: str) -> None:
    importlib.import_module(moved.MODULES[former])
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(former)


def test_other_names_stay_refused() -> None:
    with pytest.raises(UserError, match="is not one of imagegen's InputEmbedding classes"):
        resolve_target("imagegen.embedding.Nothing", InputEmbedding)


@pytest.mark.parametrize("former", sorted(moved.COMMANDS))
def test_a_former_command_names_the_present_one(former: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", former, "ckpt=x"], capture_output=True, text=True, cwd=PROJECT_ROOT
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: python -m {former} is called {moved.COMMANDS[former]!r} now; type that instead.\n"
    )


def test_a_package_has_at_most_a_dozen_rooms() -> None:
    inside = Path(imagegen.__file__).parent
    names = {path.stem for path in inside.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert len({name for name in names if not name.startswith("_")} - {"conf"}) <= 12

"""Names of earlier versions lead to what they are called now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hydra.utils import get_object

import imagegen
from imagegen.core.build import resolve_target
from imagegen.core.installation import PROJECT_ROOT
from imagegen.core.moved import (
    COMMANDS,
    MODULES,
    NAMES,
    FormerCommands,
    current_name,
    with_current_names,
)
from imagegen.model.embeddings import InputEmbedding, Neighbourhood


@pytest.mark.parametrize(
    ("former", "present"),
    [
        ("imagegen.embedding.Neighbourhood", "imagegen.model.embeddings.Neighbourhood"),
        ("imagegen.callbacks.Grids", "imagegen.training.callbacks.Grids"),
        # Both the module and the single name have moved.
        ("imagegen.callbacks.StopWhole", "imagegen.training.stopping.StopWhole"),
        ("imagegen.callbacks.early_stopping", "imagegen.training.stopping.early_stopping"),
        ("imagegen.training.callbacks.StopWhole", "imagegen.training.stopping.StopWhole"),
        ("imagegen.training.callbacks.Grids", "imagegen.training.callbacks.Grids"),
        ("torch.optim.AdamW", "torch.optim.AdamW"),
        (None, None),
    ],
)
def test_former_names(former: object, present: object) -> None:
    assert current_name(former) == present


@pytest.mark.parametrize("name", [*NAMES.values(), *MODULES.values()])
def test_present_names_exist_and_move_no_further(name: str) -> None:
    assert get_object(name) is not None
    assert current_name(name) == name


def test_names_anywhere_in_a_configuration() -> None:
    former = {
        "a": [{"_target_": "imagegen.callbacks.StopWhole", "b": "imagegen.callbacks.Stop"}],
        "_target_": None,
    }
    assert with_current_names(former) == {
        "a": [
            {
                "_target_": "imagegen.training.stopping.StopWhole",
                "b": "imagegen.callbacks.Stop",
            }
        ],
        "_target_": None,
    }


def test_checkpoints_may_name_former_classes() -> None:
    found = resolve_target("imagegen.embedding.Neighbourhood", InputEmbedding)
    assert found is Neighbourhood


@pytest.mark.parametrize("former", ["imagegen.benchmark", "imagegen.evaluate"])
def test_a_former_command_names_the_present_one(former: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", former, "ckpt=x"], capture_output=True, text=True, cwd=PROJECT_ROOT
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: python -m {former} is called {COMMANDS[former]!r} now; type that instead.\n"
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_former_commands_say_what_to_type(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert FormerCommands in sys.meta_path
    FormerCommands.find_spec(name, None)
    # As Python has it while it looks for the module to run.
    monkeypatch.setattr(sys, "argv", ["-m", "out=x"])
    with pytest.raises(SystemExit, match=f"python -m {name} is called '{COMMANDS[name][:12]}"):
        FormerCommands.find_spec(name, None)


def test_the_package_has_at_most_a_dozen_rooms() -> None:
    inside = Path(imagegen.__file__).parent
    names = {path.stem for path in inside.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert len({name for name in names if not name.startswith("_")} - {"conf"}) <= 12

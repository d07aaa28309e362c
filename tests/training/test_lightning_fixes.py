"""The private names of Lightning that are touched exist, and are touched in one file only."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import WeightAveraging
from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from pytorch_lightning.utilities.combined_loader import CombinedLoader

import imagegen
from imagegen.training.lightning_fixes import ScriptLauncher

PACKAGE = Path(imagegen.__file__).parent
FIXES = PACKAGE / "training" / "lightning_fixes.py"
ROOMS = ("checkpoint", "cli", "commands", "data", "evaluation", "tracking", "training")
OF_TORCH = {"_foreach_copy_", "_foreach_lerp_", "_last_lr"}
"""Private names of PyTorch."""
OF_HYDRA = {"_apply_overrides_to_config"}
OF_OMEGACONF = {"_get_node", "_is_interpolation", "_is_missing", "_is_none"}


def test_the_private_names_exist() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    names = {
        trainer.strategy: ["_launcher"],
        trainer.fit_loop: [
            "_combined_loader",
            "_combined_loader_states_to_load",
            "_iteration_based_training",
        ],
        trainer.fit_loop.epoch_loop: ["_batches_that_stepped", "_should_accumulate"],
        CombinedLoader: ["_load_state_dicts"],
        WeightAveraging(): ["_average_model"],
    }
    for thing, needed in names.items():
        assert [name for name in needed if hasattr(thing, name)] == needed, thing
    assert all(hasattr(ConfigLoaderImpl, name) for name in OF_HYDRA)
    assert ScriptLauncher is _SubprocessScriptLauncher
    every = {name for some in names.values() for name in some}
    assert every == private_names(ast.parse(FIXES.read_text()))


def private_names(tree: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr)
    }


def defined(tree: ast.AST) -> set[str]:
    """Names that the package gives to functions, and to attributes of `self`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) == "self":
                found.add(node.attr)
    return found


def test_no_other_file_touches_private_names() -> None:
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py") if path != FIXES}
    known = {"_exit", *OF_TORCH, *OF_HYDRA, *OF_OMEGACONF}.union(*map(defined, trees.values()))
    for path, tree in trees.items():
        if path.relative_to(PACKAGE).parts[0] in ROOMS:
            assert not private_names(tree) - known, path
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pytorch_light"):
                assert not [name for name in node.names if name.name.startswith("_")], path

"""Starts the further processes of a run on this machine, and leaves none behind.

Not by torchrun's elastic agent: it starts every process from one that does not train, so that the
process which was typed, or runs a sweep, would hold neither the trainer nor its result; and where
one has failed it ends the others at once, though they may be saving together. Who wants an agent
starts torchrun, which works too (docs/scaling.md).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from pytorch_lightning import Trainer

from imagegen.core.errors import UserError
from imagegen.core.override_syntax import quote
from imagegen.training.lightning_fixes import ScriptLauncher, use_launcher
from imagegen.training.stopping import TOGETHER

_LOOK_SECONDS = 1.0
"""How often the first process looks whether the others are alive."""
_GRACE_SECONDS = 10.0
"""How long it has, once another has failed, to notice that by itself."""
_EXIT_SECONDS = 30.0
"""How long the others have to end once the run has ended."""
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from imagegen.commands.train import command; command()"
)
"""What the others run: the same code as the first, from a clone or not, wherever they are."""
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
"""Ends a process at once; Windows has only SIGTERM, which does so there."""
_FIRST = "IMAGEGEN_FIRST_PROCESS"
"""Environment variable that tells the others the number of the process that started them."""


class Launcher(ScriptLauncher):
    """As Lightning's launcher of scripts, with other arguments and another end.

    Lightning starts the others with the arguments in `sys.argv`, which in a sweep are those of the
    whole sweep; leaves them waiting where the first process fails; and kills the first one within
    seconds where another has ended first, even if it is about to save. Here the others look after
    the first one as well: were it killed alone, they would wait for it, on a GPU for half an hour.

    Args:
        theirs: the launcher that Lightning has made.
        arguments: what `imagegen train` is started with.
    """

    def __init__(self, theirs: ScriptLauncher, arguments: Sequence[str]) -> None:
        super().__init__(theirs.cluster_environment, theirs.num_processes, theirs.num_nodes)
        self.arguments = list(arguments)
        self._over = threading.Event()
        self._first = os.environ.get(_FIRST)

    def launch(self, function: Any, *args: Any, trainer: Any = None, **options: Any) -> Any:
        """Start the others, unless they have been started from outside, and call `function`."""
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            self._start()
        if self.procs or self._first:
            threading.Thread(target=self._watch, daemon=True, name="watch-processes").start()
        return function(*args, **options)

    def kill(self, signum: Any) -> None:
        """Send a signal to those that still run."""
        self._over.set()
        super().kill(signum)

    def finish(self) -> None:
        """Wait until the others have ended; those that do not are killed."""
        self._over.set()
        for process in self.procs:
            try:
                process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def failure(self, within: float = 0.0) -> str | None:
        """A sentence on a process that has failed, or fails within some seconds; None if none."""
        until = time.monotonic() + within
        while True:
            if self._first and self._first != str(os.getppid()):
                return "the first process of this run has been killed, so the others have ended."
            for rank, process in enumerate(self.procs, start=1):
                if process.poll():
                    return _sentence(rank, process.returncode)
            if time.monotonic() >= until:
                return None
            time.sleep(0.05)

    def _start(self) -> None:
        environment = self.cluster_environment
        shared = {
            "MASTER_ADDR": environment.main_address,
            "MASTER_PORT": str(environment.main_port),
            "NODE_RANK": str(environment.node_rank()),
            "WORLD_SIZE": str(self.num_processes * self.num_nodes),
        }
        for rank in range(1, self.num_processes):
            command = [sys.executable, "-c", _PROGRAM.format(path=sys.path), *self.arguments]
            own = {**os.environ, **shared, "LOCAL_RANK": str(rank), _FIRST: str(os.getpid())}
            # Where relative paths mean the same, with hydra.job.chdir=true too.
            folder = HydraConfig.get().runtime.cwd
            self.procs.append(subprocess.Popen(command, env=own, cwd=folder))

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            lost = self.failure()
            # Some backends wait for a lost process for half an hour.
            if lost and not self._over.wait(_GRACE_SECONDS):
                super().kill(_KILL)
                print(f"error: {lost}", file=sys.stderr, flush=True)
                os._exit(1)


@contextmanager
def further_processes(
    trainer: Trainer, overrides: Sequence[str], folder: Path, multirun: bool
) -> Iterator[None]:
    """While the block runs, the trainer may have further processes; none is left after it.

    Args:
        trainer: not started yet.
        overrides: as typed for this run.
        folder: the run folder, for all processes.
        multirun: whether the run is one of a sweep, whose arguments are not those of a run.

    Raises:
        UserError: if the block failed because another process did.
        SystemExit: of status 0 in a further process that was interrupted or has diverged with the
            first one, which tells the user.
    """
    theirs = trainer.strategy.launcher
    if not isinstance(theirs, ScriptLauncher):
        yield
        return
    own = [*_config_dir(), *overrides] if multirun else sys.argv[1:]
    launcher = Launcher(theirs, _arguments(own, folder))
    use_launcher(trainer, launcher)
    environment = dict(os.environ)
    try:
        yield
    except BaseException as error:
        cause = error.__context__ if isinstance(error, SystemExit) else error
        together = isinstance(cause, TOGETHER)
        if together and trainer.global_rank:
            raise SystemExit(0) from error
        lost = None if together else launcher.failure(within=_LOOK_SECONDS)
        if not together:
            launcher.kill(_KILL)
        if lost and isinstance(error, RuntimeError):
            raise UserError(lost) from error
        raise
    finally:
        launcher.finish()
        if launcher.procs:
            # The next run of a sweep in this process starts its own.
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            for name in ("MASTER_ADDR", "MASTER_PORT"):
                os.environ.pop(name, None)
            os.environ.update(environment)


def _sentence(rank: int, status: int) -> str:
    """What is said of a process that has failed; a negative status is the signal that ended it."""
    if status < 0:
        how = f"been killed by signal {-status}"
        why = "if that was the system, memory did not suffice"
    else:
        how, why = f"failed with status {status}", "the reason is printed above"
    return f"process {rank} of this run has {how}, so the run has ended; {why}."


def _config_dir() -> list[str]:
    """The flag --config-dir, where it was typed."""
    sources = HydraConfig.get().runtime.config_sources
    return [f"--config-dir={each.path}" for each in sources if each.provider == "command-line"]


def _arguments(own: Sequence[str], folder: Path) -> list[str]:
    """A run's arguments with its folder added; the first process keeps the configuration there."""
    overrides = [i for i, text in enumerate(own) if "=" in text and not text.startswith("-")]
    # Hydra wants all overrides in one place, among its own flags.
    place = overrides[-1] + 1 if overrides else len(own)
    added = [f"hydra.run.dir={quote(str(folder))}", "hydra.output_subdir=null"]
    return [*own[:place], *added, *own[place:]]

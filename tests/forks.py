"""Processes that start at once: forked from one that has imported what they need.

Importing takes most of a short process. What runs in a fork is a process like any other: it has its
own arguments, environment, signals, output and exit status.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from imagegen.core.installation import PROJECT_ROOT

TRAIN = "from imagegen.commands.train import command; command()"
SAMPLE = "from imagegen.commands.sample import main; main()"

# Forks one process that waits for another, which leaves the loop and becomes what was asked for.
_PARENT = """
import json, os, sys
import scipy.special, sklearn.datasets
import imagegen.commands.sample, imagegen.generation.job, imagegen.training.run, train
from imagegen.cli.entry import compose

compose("train")  # Hydra looks for its plugins once.

def tell(name, number):
    place = os.path.join(asked["folder"], name)
    with open(place + ".partial", "w") as file:
        file.write(str(number))
    os.replace(place + ".partial", place)

waiting = 0
for line in sys.stdin:
    while waiting and os.waitpid(-1, os.WNOHANG)[0]:
        waiting -= 1
    asked = json.loads(line)
    if os.fork():
        waiting += 1
        continue
    child = os.fork()
    if child:
        tell("pid", child)
        tell("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os._exit(0)
    break
else:
    while waiting:
        os.wait()
        waiting -= 1
    sys.exit()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for number, name in ((1, "stdout"), (2, "stderr")):
    os.dup2(os.open(os.path.join(asked["folder"], name), os.O_WRONLY | os.O_CREAT), number)
os.chdir(asked["cwd"])
os.environ.clear()
os.environ.update(asked["env"])
sys.argv = asked["argv"]
exec(asked["program"])
"""


class Fork:
    """A process that has been started; its output is in the files `stdout` and `stderr`."""

    def __init__(self, folder: Path) -> None:
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"
        self._status, pid = folder / "status", folder / "pid"
        _wait_for(pid, 600)
        self.pid = int(pid.read_text())

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return int(self._status.read_text()) if self._status.exists() else None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """Its status and all that it has printed; it is killed when it takes longer."""
        try:
            _wait_for(self._status, timeout)
        except TimeoutError:
            self.send_signal(signal.SIGKILL)
            raise
        printed = [path.read_text() for path in (self.stdout, self.stderr)]
        return subprocess.CompletedProcess([], int(self._status.read_text()), *printed)


class Forks:
    """Forks programs from one parent, which is started with the first."""

    def __init__(self) -> None:
        self._parent: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._started: list[Fork] = []

    def start(
        self,
        program: str,
        *argv: str,
        cwd: Path = PROJECT_ROOT,
        env: Mapping[str, str | None] | None = None,
    ) -> Fork:
        """Start the text of a program, `argv` being what is typed behind its name.

        Variables of `env` that are None are unset.
        """
        if self._parent is None:
            self._parent = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"import sys; sys.path[0] = {str(PROJECT_ROOT)!r}\n{_PARENT}",
                ],
                cwd=PROJECT_ROOT,
                stdin=subprocess.PIPE,
                text=True,
            )
        folder = Path(tempfile.mkdtemp(dir=self._folder.name))
        for name in ("stdout", "stderr"):  # which may be read at once
            (folder / name).touch()
        asked = {"program": program, "argv": ["command", *argv], "folder": str(folder)}
        own = {**os.environ, **(env or {})}
        asked |= {"cwd": str(cwd), "env": {k: v for k, v in own.items() if v is not None}}
        assert self._parent.stdin is not None
        self._parent.stdin.write(json.dumps(asked) + "\n")
        self._parent.stdin.flush()
        self._started.append(Fork(folder))
        return self._started[-1]

    def run(
        self,
        program: str,
        *argv: str,
        cwd: Path = PROJECT_ROOT,
        env: Mapping[str, str | None] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Start it, and wait until it has ended."""
        return self.start(program, *argv, cwd=cwd, env=env).wait()

    def close(self) -> None:
        """End all: the parent waits for those that a failed test has left."""
        for fork in self._started:
            if fork.poll() is None:
                fork.send_signal(signal.SIGKILL)
        if self._parent is not None:
            self._parent.communicate()
        self._folder.cleanup()


def _wait_for(path: Path, timeout: float) -> None:
    until = time.monotonic() + timeout
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"no {path.name} within {timeout} s")
        time.sleep(0.02)

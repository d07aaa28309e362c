"""A SLURM of one machine, for tests: its commands as small scripts, jobs as processes.

`sbatch` starts a job's script, once for each task of an array, and again where `scontrol requeue`
has asked for that; `srun` runs one process with the output that it is told.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

SBATCH = """
import os, re, subprocess, sys
from pathlib import Path

state, script = Path(STATE), Path(sys.argv[1])
array = re.search(r"--array=0-(\\d+)", script.read_text())
number = 100 + len(list(state.glob("*.job")))
(state / f"{number}.job").write_text(script.read_text())
print(f"Submitted batch job {number}")
sys.stdout.flush()
tasks = range(int(array[1]) + 1) if array else [None]
for task in tasks:
    name = f"{number}" if task is None else f"{number}_{task}"
    environment = {
        **os.environ,
        **{"SLURM_JOB_ID": f"{number + (task or 0)}", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        **{"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "1"},
    }
    if task is not None:
        environment |= {"SLURM_ARRAY_JOB_ID": f"{number}", "SLURM_ARRAY_TASK_ID": f"{task}"}
    loop = f'''
while :; do
  bash {state / f"{number}.job"}
  echo $? >> {state / f"{name}.statuses"}
  if [ -e {state / f"{name}.requeued"} ]; then rm {state / f"{name}.requeued"}; else break; fi
done'''
    subprocess.Popen(
        ["bash", "-c", loop], env=environment, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=open(state / f"{name}.err", "a"),
    )
"""

SRUN = """
import os, subprocess, sys
from pathlib import Path

state, words = Path(STATE), sys.argv[1:]
array = os.environ.get("SLURM_ARRAY_JOB_ID")
task = os.environ.get("SLURM_ARRAY_TASK_ID", "")
name = f"{array}_{task}" if array else os.environ["SLURM_JOB_ID"]
files = {}
while words[0].startswith("-"):
    word = words.pop(0)
    if word in ("--output", "--error"):
        path = words.pop(0).replace("%A_%a", name).replace("%j", name).replace("%t", "0")
        files[word] = open(path, "a")
process = subprocess.Popen(words, stdout=files.get("--output"), stderr=files.get("--error"))
(state / f"{name}.pid").write_text(str(process.pid))
sys.exit(process.wait() and 1)
"""

SCONTROL = """
import sys
from pathlib import Path

assert sys.argv[1] == "requeue"
(Path(STATE) / f"{sys.argv[2]}.requeued").touch()
"""

SACCT = """
print("JobID|State|NodeList")
"""


def install(folder: Path) -> dict[str, str]:
    """Write the commands.

    Returns:
        The environment in which they are found; what they note is in `folder / "state"`.
    """
    state, commands = folder / "state", folder / "bin"
    state.mkdir(parents=True)
    commands.mkdir()
    scripts = {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL, "sacct": SACCT}
    for name, text in scripts.items():
        path = commands / name
        path.write_text(f"#!{sys.executable}\nSTATE = {str(state)!r}\n{text}")
        path.chmod(0o755)
    return {**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}

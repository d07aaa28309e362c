"""The command-line entry points: Hydra with errors that a user can act on.

A user's mistake is one line on stderr and exit status 1; IMAGEGEN_DEBUG=1 (or HYDRA_FULL_ERROR=1)
shows the traceback instead. A refused command leaves nothing on disk.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import imagegen
from imagegen.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig
else:  # Annotations are checked in tests; omegaconf is not to be imported for them.
    DictConfig = Any

PROJECT_ROOT = Path(imagegen.__file__).resolve().parent.parent
"""The folder that holds conf/, data/ and outputs/."""

VERSION_BASE = "1.3"
_HINT = "IMAGEGEN_DEBUG=1 shows where"
_DISK_ERRORS = {
    getattr(errno, name)
    for name in (
        "ENOSPC EDQUOT EROFS EACCES EPERM ENOTDIR EISDIR EFBIG ENAMETOOLONG ELOOP EIO".split()
    )
    if hasattr(errno, name)
}


def register_resolvers() -> None:
    """Make `${project_root:}` known to OmegaConf."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("project_root", lambda: str(PROJECT_ROOT), replace=True)


def compose(config_name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration that the command line would compose, without running anything.

    Args:
        config_name: "train", "sample" or "evaluate".
        overrides: as typed, "dataset=mnist".
    """
    import hydra

    with _hydra_ready():
        return hydra.compose(config_name, overrides=list(overrides))


def hydra_entry(
    config_name: str,
    *,
    rewrite: Callable[[list[str]], list[str]] | None = None,
    check: Callable[[DictConfig, Path], None] | None = None,
) -> Callable[[Callable[[DictConfig], Any]], Callable[..., Any]]:
    """Decorate `main(cfg)` to run with the configuration `conf/<config_name>.yaml`.

    The configuration is found whatever the working directory. `main` may raise `UserError`. Called
    with a configuration, the decorated function just runs `main` with it.

    Args:
        config_name: name of the primary configuration.
        rewrite: turns the arguments typed into those to use (resuming recalls earlier ones).
        check: called with the configuration and the run folder before anything is created, in the
            first process of a run that is not a multirun; it refuses with a `UserError`.
    """

    def decorate(main: Callable[[DictConfig], Any]) -> Callable[..., Any]:
        @functools.wraps(main)
        def entry(cfg: DictConfig | None = None) -> Any:
            if cfg is not None:
                return main(cfg)
            status = _run(main, config_name, rewrite, check)
            if status:
                sys.exit(status)
            return None

        return entry

    return decorate


def debugging() -> bool:
    """Whether the user asked for tracebacks."""
    return any(os.environ.get(name) == "1" for name in ("IMAGEGEN_DEBUG", "HYDRA_FULL_ERROR"))


def _run(
    main: Callable[[DictConfig], Any],
    config_name: str,
    rewrite: Callable[[list[str]], list[str]] | None,
    check: Callable[[DictConfig, Path], None] | None,
) -> int:
    debug = debugging()
    reported: list[BaseException] = []
    try:
        register_resolvers()
        if rewrite is not None:
            # Other processes of a distributed run are started from sys.argv, so it is set for good.
            sys.argv[1:] = rewrite(sys.argv[1:])
        multirun = _check_command(config_name, check)
        _run_hydra(main, config_name, multirun, debug, reported)
    except KeyboardInterrupt:
        return _interrupted()
    except SystemExit as stop:
        # Lightning turns an interrupt into sys.exit(1).
        return _interrupted() if isinstance(stop.__context__, KeyboardInterrupt) else _status(stop)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): that is no error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        if error not in reported:
            _report(error)
        return 1
    return 0


def _run_hydra(
    main: Callable[[DictConfig], Any],
    config_name: str,
    multirun: bool,
    debug: bool,
    reported: list[BaseException],
) -> None:
    import hydra

    typed = os.environ.get("HYDRA_FULL_ERROR")

    @functools.wraps(main)
    def task(cfg: DictConfig) -> Any:
        # The environment is as the user set it while `main` and the processes it starts run.
        with _environment("HYDRA_FULL_ERROR", typed):
            try:
                return main(cfg)
            except Exception as error:
                if debug or isinstance(error, BrokenPipeError):
                    raise
                _report(error, _job() if multirun else "")
                if multirun:  # The other jobs go on; Hydra raises the first error at the end.
                    reported.append(error)
                    raise
                raise SystemExit(1) from error

    # Hydra would print its errors and exit; with this set it raises them.
    with _environment("HYDRA_FULL_ERROR", "1"):
        run = hydra.main(str(_conf()), config_name=config_name, version_base=VERSION_BASE)
        run(task)()


def _check_command(config_name: str, check: Callable[[DictConfig, Path], None] | None) -> bool:
    """Check the command line; returns whether it asks for several runs."""
    from hydra._internal.utils import get_args_parser

    # Hydra offers no public way to see its flags before it acts on them.
    args, unknown = get_args_parser().parse_known_args()
    if unknown:
        raise UserError(
            f"{unknown[0]!r} is not understood; options are typed key=value, together in one "
            "place, and --help lists them."
        )
    elsewhere = args.config_dir or args.config_path or args.experimental_rerun
    if elsewhere or args.shell_completion or args.hydra_help:
        return bool(args.multirun)

    from imagegen.overrides import check_overrides, check_values

    with _hydra_ready():
        multirun = bool(args.multirun) or "hydra.mode=MULTIRUN" in args.overrides
        config_name = args.config_name or config_name
        configs = check_overrides(config_name, args.overrides, multirun)
        if not (args.help or args.cfg or args.info):
            for config in configs:
                check_values(config)
            first = os.environ.get("LOCAL_RANK", "0") == "0"
            if check is not None and first and not multirun:
                check(configs[0], Path(configs[0].hydra.run.dir).absolute())
    return multirun


@contextlib.contextmanager
def _hydra_ready() -> Iterator[None]:
    from hydra import initialize_config_dir

    register_resolvers()
    with initialize_config_dir(str(_conf()), version_base=VERSION_BASE):
        yield


def _conf() -> Path:
    conf = PROJECT_ROOT / "conf"
    if not conf.is_dir():
        raise UserError(
            f"the folder {conf} is missing; run imagegen from a clone of its repository, "
            "installed with `make install` or `pip install -e .`."
        )
    return conf


@contextlib.contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """Set or, with None, unset an environment variable for a while."""
    before = os.environ.get(name)

    def put(value: str | None) -> None:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    put(value)
    try:
        yield
    finally:
        put(before)


def _job() -> str:
    from hydra.core.hydra_config import HydraConfig

    return " ".join(HydraConfig.get().overrides.task)


def _report(error: BaseException, job: str = "") -> None:
    """Print a user's mistake as a sentence, anything else as the traceback that it deserves."""
    sentence = describe(error)
    place = f" in the run with {job}" if job else ""
    if sentence is None:
        traceback.print_exception(error)
        if place:
            print(f"error{place}: see above", file=sys.stderr)
    else:
        print(f"error{place}: {sentence}", file=sys.stderr)


def describe(error: BaseException) -> str | None:
    """The sentence that tells a user what to mend, or None for what must be a bug."""
    for cause in _causes(error):
        if isinstance(cause, UserError):
            return str(cause)
    for cause in _causes(error):
        kind, text = type(cause).__name__, " ".join(str(cause).split())
        if kind == "MisconfigurationException":
            if "backend found" in text or "gpu" in text.lower():
                return f"no usable GPU: {text} Choose trainer=cpu, or trainer.devices to fit."
            return f"the trainer refuses its settings: {text}"
        if kind == "OutOfMemoryError":
            return "the GPU's memory is full; choose a smaller batch_size or model."
        if isinstance(cause, OSError) and cause.errno in _DISK_ERRORS:
            return _disk_sentence(cause)
        if isinstance(cause, RuntimeError) and "PytorchStreamWriter failed" in text:
            return f"cannot write a checkpoint{_below_run_folder()}; is the disk full?"
    return _config_sentence(error)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _disk_sentence(error: OSError) -> str:
    reason = (error.strerror or str(error)).lower()
    if error.filename is not None:
        return f"cannot use {os.fspath(error.filename)}: {reason}."
    return f"cannot write{_below_run_folder()}: {reason}."


def _below_run_folder() -> str:
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return ""
    return f" below {HydraConfig.get().runtime.output_dir}"


def _config_sentence(error: BaseException) -> str | None:
    """A sentence for what Hydra refuses, and for options that a class refuses when it is built."""
    from hydra.errors import HydraException, InstantiationException

    from imagegen.overrides import plain

    if isinstance(error, InstantiationException):
        cause = error.__cause__
        section = str(error).rpartition("full_key: ")[2].strip() if "full_key" in str(error) else ""
        if isinstance(cause, (TypeError, ValueError)):
            return f"{section or 'the configuration'} is refused: {plain(cause)} ({_HINT})."
        return None
    return f"{plain(error)}." if isinstance(error, HydraException) else None


def _interrupted() -> int:
    print("\ninterrupted", file=sys.stderr)
    return 128 + 2


def _status(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1

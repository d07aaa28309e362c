"""The command-line entry points: Hydra with errors that a user can act on.

A user's mistake is one line on stderr and exit status 1; IMAGEGEN_DEBUG=1 (or HYDRA_FULL_ERROR=1)
shows the traceback instead. A refused command leaves nothing on disk.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagegen.cli.messages import report
from imagegen.core.errors import UserError
from imagegen.core.installation import IN_CLONE, PACKAGE, PROJECT_ROOT, typed
from imagegen.core.machine import prepare, spin_briefly
from imagegen.core.processes import is_first_process

if TYPE_CHECKING:
    from omegaconf import DictConfig
else:  # Annotations are checked in tests; omegaconf is not to be imported for them.
    DictConfig = Any

VERSION_BASE = "1.3"


def register_resolvers() -> None:
    """Make known to OmegaConf `${project_root:}` and, for helps, `${typed:…}` and `${options:…}`.

    The former is a command as it is typed, the latter its options, by the name of its file.
    """
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("project_root", lambda: str(PROJECT_ROOT), replace=True)
    OmegaConf.register_new_resolver("typed", typed, replace=True)
    OmegaConf.register_new_resolver("options", _options, replace=True)


def _options(config_name: str) -> str:
    from imagegen.cli.help import described

    return described((conf_folder() / f"{config_name}.yaml").read_text(encoding="utf-8"))


def compose(config_name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration that the command line would compose, without running anything.

    Args:
        config_name: that of a file in conf/, such as "train" or "sample".
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


def at_home(text: str) -> str:
    """An argument with the home directory for a `~` that its value begins with.

    Shells leave it after names with dots, and Hydra refuses it, or takes it for a folder's name.
    """
    found = re.fullmatch(r"([\w.@/+-]+=['\"]?)~(/.*)?", text, re.DOTALL)
    home = os.path.expanduser("~")
    if found is None or not re.fullmatch(r"[\w./-]+", home, re.ASCII):
        return text
    return f"{found[1]}{home}{found[2] or ''}"


def quoted(text: str) -> str:
    """An argument whose regions rectangle:[…] are quoted: Hydra takes brackets for a list."""
    return re.sub(r"(?<!['\"\w])rectangle:\[[^\[\]'\"]*\]", lambda found: f"'{found[0]}'", text)


def debugging() -> bool:
    """Whether the user wants tracebacks."""
    return any(os.environ.get(name) == "1" for name in ("IMAGEGEN_DEBUG", "HYDRA_FULL_ERROR"))


def _run(
    main: Callable[[DictConfig], Any],
    config_name: str,
    rewrite: Callable[[list[str]], list[str]] | None,
    check: Callable[[DictConfig, Path], None] | None,
) -> int:
    debug = debugging()
    reported: list[BaseException] = []
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Text that this terminal cannot show must not end the command.
        sys.stdout.reconfigure(errors="backslashreplace")
    if threading.current_thread() is threading.main_thread():
        # A polite kill ends like Ctrl-C: what is half done is cleaned up.
        signal.signal(signal.SIGTERM, _interrupt)
    spin_briefly()
    try:
        register_resolvers()
        sys.argv[1:] = [quoted(at_home(text)) for text in sys.argv[1:]]
        typed = sys.argv[1:]
        if rewrite is not None:
            # Other processes of a distributed run are started from sys.argv, so it is set for good.
            sys.argv[1:] = rewrite(typed)
        multirun, checked = _check_command(main, config_name, check, typed)
        _run_hydra(main, config_name, multirun, checked, debug, reported)
    except KeyboardInterrupt:
        return _interrupted()
    except SystemExit as stop:
        # Lightning turns an interrupt into sys.exit(1).
        return _interrupted() if isinstance(stop.__context__, KeyboardInterrupt) else _status(stop)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`), which is not an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        if error in reported:
            return 1
        # Composing a configuration may turn an interrupt into an error of its own.
        if _is_of_an_interrupt(error):
            return _interrupted()
        report(error)
        return 1
    return 0


def _run_hydra(
    main: Callable[[DictConfig], Any],
    config_name: str,
    multirun: bool,
    checked: DictConfig | None,
    debug: bool,
    reported: list[BaseException],
) -> None:
    import hydra

    before = os.environ.get("HYDRA_FULL_ERROR")

    @functools.wraps(main)
    def task(cfg: DictConfig) -> Any:
        # The environment is as the user set it while `main` and the processes it starts run.
        with _environment("HYDRA_FULL_ERROR", before):
            try:
                prepare()
                return main(cfg)
            except Exception as error:
                if debug or isinstance(error, BrokenPipeError):
                    raise
                report(error, _job() if multirun else "")
                if multirun:  # The other jobs continue; Hydra raises the first error at the end.
                    reported.append(error)
                    raise
                raise SystemExit(1) from error

    # Hydra would print its errors and exit; with this set it raises them.
    with _environment("HYDRA_FULL_ERROR", "1"):
        run = hydra.main(str(conf_folder()), config_name=config_name, version_base=VERSION_BASE)
        try:
            if checked is None:
                run(task)()
            else:
                _run_composed(task, checked)
        except ValueError as error:
            if debug or error in reported:
                raise
            # `task` lets none through, so flags that do not go together have met Hydra.
            raise UserError(f"{' '.join(str(error).split())}.") from error


def _run_composed(task: Callable[[DictConfig], Any], config: DictConfig) -> None:
    """Run `task` as Hydra's `main` does, which would compose the configuration twice again."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.utils import configure_log
    from omegaconf import read_write

    def composed(**_: object) -> DictConfig:
        configure_log(config.hydra.hydra_logging)
        return config

    with read_write(config.hydra):
        if config.hydra.mode is None:
            config.hydra.mode = "RUN"
            config.hydra.overrides.hydra.append("hydra.mode=RUN")
    sources = config.hydra.runtime.config_sources
    own = [each.path for each in sources if each.provider == "command-line"]
    with _hydra_ready(own[0] if own else None, config.hydra.job.name):
        # The global one stays as it is: resuming composes what the run began with.
        hydra: Any = copy.copy(GlobalHydra.instance().hydra)
        hydra.compose_config = composed
        folder = Path(config.hydra.run.dir).absolute()
        missing = [parent for parent in folder.parents if not parent.exists()]
        try:
            hydra.run(config.hydra.job.config_name, task, overrides=[])
        finally:
            # A task that refuses removes its own folder.
            with contextlib.suppress(OSError):
                for parent in missing:
                    parent.rmdir()


def _check_command(
    main: Callable[[DictConfig], Any],
    config_name: str,
    check: Callable[[DictConfig, Path], None] | None,
    typed: Sequence[str],
) -> tuple[bool, DictConfig | None]:
    """Check the command line, as typed and as rewritten.

    Returns:
        Whether it is a multirun, and the configuration of a single run; None where Hydra has to
        do something else.
    """
    from hydra._internal import utils

    for text in sys.argv[1:]:
        if text != text.encode(errors="replace").decode():
            raise UserError(
                f"{text.encode(errors='backslashreplace').decode()!r} is not valid UTF-8; rename "
                "the file or folder that it names."
            )
    # Hydra offers no public way to see its flags before it acts on them.
    parser = utils.get_args_parser()
    parser.error = _refuse_flags  # type: ignore[assignment, method-assign]
    args, unknown = parser.parse_known_args()
    if unknown:
        raise UserError(
            f"{unknown[0]!r} is not understood; options are typed key=value, together in one "
            "place, and --help lists them."
        )
    elsewhere = args.config_path or args.experimental_rerun
    if elsewhere or args.shell_completion or args.hydra_help:
        return bool(args.multirun), None
    if args.config_dir is not None and not Path(args.config_dir).is_dir():
        raise UserError(f"--config-dir {args.config_dir}: there is no such folder.")

    from imagegen.cli.override_checks import check_overrides, check_values, refuse_without_effect
    from imagegen.core.files import ensure_writable

    file, module = utils.detect_calling_file_or_module_from_task_function(main)
    job = utils.detect_task_name(file or (None if module else __file__), module)
    with _hydra_ready(args.config_dir, job):
        multirun = bool(args.multirun) or "hydra.mode=MULTIRUN" in args.overrides
        config_name = args.config_name or config_name
        configs = check_overrides(config_name, args.overrides, multirun)
        # A preset may ask for a multirun as well.
        sweeps = multirun or str(configs[0].hydra.mode).endswith("MULTIRUN")
        if is_first_process():
            refuse_without_effect([text for text in args.overrides if text in typed], sweeps)
        shows = args.help or args.cfg or args.info
        if not shows:
            for config in configs:
                check_values(config)
            if is_first_process() and not multirun:
                folder = Path(configs[0].hydra.run.dir).absolute()
                if not folder.exists():
                    ensure_writable(folder)
                if check is not None:
                    check(configs[0], folder)
    # Hydra also refuses flags that do not go together, and tells all it knows when it is verbose.
    if sweeps or shows or args.resolve or configs[0].hydra.verbose:
        return multirun, None
    return multirun, configs[0]


def _refuse_flags(message: str) -> None:
    raise UserError(f"{message}; --hydra-help lists the flags.")


@contextlib.contextmanager
def _hydra_ready(config_dir: str | None = None, job: str = "app") -> Iterator[None]:
    from hydra import initialize_config_dir
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.global_hydra import GlobalHydra

    register_resolvers()
    with initialize_config_dir(str(conf_folder()), job_name=job, version_base=VERSION_BASE):
        if config_dir is not None:
            # As Hydra does for its flag --config-dir, which its functions do not take.
            loader: Any = GlobalHydra.instance().config_loader()
            loader.config_search_path.prepend(
                provider="command-line",
                path=f"file://{Path(config_dir).absolute()}",
                anchor=SearchPathQuery(provider="schema"),
            )
            loader.repository.initialize_sources(loader.config_search_path)
        yield


def conf_folder() -> Path:
    """The folder of the configuration: conf/ of the clone, or that in the installed package.

    Raises:
        UserError: where it is missing.
    """
    conf = (PROJECT_ROOT if IN_CLONE else PACKAGE) / "conf"
    if not conf.is_dir():
        raise UserError(
            f"the folder {conf} is missing, so this installation is incomplete; install imagegen "
            "again, from a clone of its repository."
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


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _is_of_an_interrupt(error: BaseException | None) -> bool:
    """Whether an interrupt is what the error arose from."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _interrupted() -> int:
    if is_first_process():
        print("\ninterrupted", file=sys.stderr)
    return 128 + 2


def _status(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1

"""The server of the page: what is checked before it starts, and what it lets out and in."""

from __future__ import annotations

import hmac
import os
import socket
import sys
import time
import webbrowser
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from threading import Thread
from typing import Any

from imagegen.commands.page.page_options import PageOptions
from imagegen.commands.page.studio import Desk, Studio
from imagegen.core import values as opt
from imagegen.core.errors import UserError
from imagegen.core.installation import pip_install

PACKAGES = "'gradio>=6.31,<7' matplotlib"

# Read when Gradio and the hub's client are imported.
_NO_TELEMETRY = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "GRADIO_SHARE": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
}


def run(config: Mapping[str, Any]) -> None:
    """Do what `conf/page.yaml` and the command line ask, until Ctrl-C.

    Raises:
        UserError: for options that cannot be, without Gradio, for a port that is taken, and where
            the checkpoint cannot be read.
    """
    options = PageOptions.from_config(opt.plain(config))
    if find_spec("gradio") is None:
        raise UserError(
            f"the page needs Gradio, which is not installed; {pip_install('page', PACKAGES)}"
        )
    _check_free(options.host, options.port)
    studios = studios_of(options)
    page = start(studios, options)
    if options.open and has_screen():
        webbrowser.open(page.local_url)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        print("closing the page, which takes seconds while a browser shows it", flush=True)
    finally:
        for studio in studios:
            studio.close()
        page.close(verbose=False)


def has_screen() -> bool:
    """Whether windows can be opened: elsewhere a browser would take the terminal."""
    others = sys.platform in ("darwin", "win32")
    return others or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def studios_of(options: PageOptions) -> list[Studio]:
    """One for each model; together they draw one thing at a time.

    Raises:
        UserError: for a checkpoint that cannot be read.
    """
    desk = Desk()
    places = (options.device, options.runs, options.dataset, desk)
    return [Studio(ckpt, *places) for ckpt in options.ckpts]


def start(studios: Sequence[Studio], options: PageOptions) -> Any:
    """Serve the page in threads of its own, and print its address; returns Gradio's page.

    Raises:
        UserError: for a port that is taken.
    """
    os.environ.update(_NO_TELEMETRY)
    from imagegen.commands.page.app import CSS, build, theme
    from imagegen.commands.page.controls import MOST_WAITING

    page = build(studios)
    page.queue(max_size=MOST_WAITING, api_open=False)
    password = options.password
    try:
        page.launch(
            server_name=options.host,
            server_port=options.port,
            auth=None if password is None else _door(password),
            auth_message="Any user name will do.",
            prevent_thread_lock=True,
            quiet=True,
            share=False,
            inbrowser=False,
            show_error=False,
            ssr_mode=False,
            enable_monitoring=False,
            max_file_size="32mb",
            footer_links=[],
            theme=theme(),
            css=CSS,
        )
    except OSError as error:  # another program has taken the port since it was looked at
        raise _cannot_listen(options.host, options.port, error) from error
    shown = f"[{options.host}]" if ":" in options.host else options.host
    Thread(target=_get_ready, args=[studios], daemon=True).start()
    print(f"the page of {', '.join(options.ckpts)} is at http://{shown}:{options.port}", flush=True)
    return page


def _get_ready(studios: Sequence[Studio]) -> None:
    # The first one's model is kept in memory.
    for studio in reversed(studios):
        studio.get_ready()


def _door(password: str) -> Any:
    def opens(_: str, given: str) -> bool:
        return hmac.compare_digest(given.encode(), password.encode())

    return opens


def _check_free(host: str, port: int) -> None:
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> UserError:
    why = error.strerror or "another program uses it"
    return UserError(
        f"the page cannot listen at host={host} port={port}: {why}; choose another host or port."
    )

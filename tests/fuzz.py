"""Commands made of random mistakes, run as the shell would run them, in this process."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from jaxtyping import config as jaxtyping_config
from omegaconf import OmegaConf
from PIL import Image

from imagegen.cli.entry import compose
from imagegen.core.override_syntax import quote

SECONDS = 4
"""A command that does what it was asked to for longer is interrupted, as a user would."""

WORDS = (
    *("", "null", "true", "false", "0", "1", "2", "3", "-1", "7.5", "0.5", "1.0", "-0.1"),
    *("nan", "inf", "-inf", "1e400", "-1e-400", "1e9", "1000000000", "99999999999999999999999"),
    *("1e-30", "0x10", "1_000", "1:2", "half", "auto", "latest", "all", "~", ".", "..", "/proc"),
    *("[]", "[0]", "[1,2]", "[-1,0]", "[[0,-1]]", "[[1,1]]", "[[0,0]]", "[nan]", "['']", "[null]"),
    *("{}", "{a:1}", "{_target_:x}", "{_target_:imagegen.cli.entry.compose}", "???", "'???'", "''"),
    *("${seed}", "${nowhere}", "${oc.env:NOWHERE}", "${", "é", "'日本 语'", "'a b'", "a/b", "a,b"),
    *("imagegen.heads.categorical.Categorical", "collections.OrderedDict", "nowhere.Nothing"),
    *(
        "range(3)",
        "choice(1,2)",
        "'\\u202e'",
        "/dev/null",
        "/dev/null/x",
        "/proc/self/mem",
        "x" * 300,
    ),
)
"""What is typed for an option by mistake, as it is typed."""

# Nothing that a command could write outside the working directory.
TEXT = st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), max_size=12)
NUMBERS = st.one_of(
    st.integers(-3, 70), st.integers(), st.floats(allow_nan=True, allow_infinity=True)
)
VALUES = st.one_of(
    st.sampled_from(WORDS),
    st.sampled_from(WORDS),
    NUMBERS.map(str),
    st.lists(st.one_of(NUMBERS.map(str), st.sampled_from(WORDS[:20])), max_size=3).map(
        lambda items: f"[{','.join(items)}]"
    ),
    TEXT.map(quote),
    TEXT,
)


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: int
    out: str
    err: str


def leaves(config_name: str, overrides: Sequence[str] = ()) -> list[str]:
    """Dotted names of all options of a configuration, sections left out."""

    def walk(node: Any, prefix: str) -> Iterator[str]:
        for key, value in node.items_ex(resolve=False):
            if OmegaConf.is_dict(value) and not value._is_none():
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}"

    return list(walk(compose(config_name, overrides), ""))


def entries(folder: Path) -> set[str]:
    """All that is below a folder, hidden files too."""
    return {
        os.path.relpath(os.path.join(at, name), folder)
        for at, folders, files in os.walk(folder)
        for name in [*folders, *files]
    }


@contextlib.contextmanager
def as_users_run_it() -> Iterator[None]:
    """Annotations are not checked, as they are not outside the tests."""
    jaxtyping_config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping_config.update("jaxtyping_disable", False)


def run_command(entry: Callable[[], Any], argv: Sequence[str], seconds: float = SECONDS) -> Outcome:
    """Run an entry point with these arguments; nothing of the process is changed afterwards.

    Interrupted after so many seconds.
    """
    out, err = (
        io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace")
    )
    status: Any = 0
    known = {number: signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(sys, "argv", ["command", *argv])
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(as_users_run_it())
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        # Again and again, for an interrupt within the garbage collector is lost.
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
        try:
            entry()
        except SystemExit as stop:
            status = stop.code
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in known.items():
                signal.signal(number, handler)
    written = []
    for stream in (out, err):
        stream.flush()
        written.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return Outcome(int(status or 0), *written)


def check(outcome: Outcome, argv: Sequence[str]) -> bool:
    """Whether the command was refused; if so, as every command is refused.

    With one sentence on stderr and a status of its own, without a traceback.
    """
    if outcome.status in (0, 130):
        assert "Traceback" not in outcome.err, f"{argv}\n{outcome.err}"
        return False
    assert outcome.status == 1, argv
    assert outcome.err.startswith("error: "), f"{argv}\n{outcome.err[-3000:]}"
    assert outcome.err.count("\n") == 1, f"{argv}\n{outcome.err}"
    assert len(outcome.err) < 1500, f"{argv}\n{outcome.err}"
    return True


MODES = "1 L LA P PA RGB RGBA RGBX CMYK YCbCr LAB HSV I;16 I F".split()
FORMATS = {
    "PNG": ".png",
    "JPEG": ".jpg",
    "GIF": ".gif",
    "WEBP": ".webp",
    "BMP": ".bmp",
    "TIFF": ".tif",
    "PPM": ".png",
    "ICO": ".png",
}
SIDES = st.one_of(st.sampled_from([1, 2, 3, 4, 6, 97]), st.integers(1, 97))


@dataclass(frozen=True)
class Picture:
    """The bytes of an image file, or of what claims to be one; None is a folder.

    `size` is that of the image as it is to be looked at, where the file is whole.
    """

    name: str
    content: bytes | None
    size: tuple[int, int] | None


@st.composite
def pictures(draw: st.DrawFn) -> Picture:
    """Image files of all kinds, whole, animated, turned, truncated and altered; and other files."""
    kind = draw(st.sampled_from(["image"] * 8 + ["text", "nothing", "folder", "bytes"]))
    if kind != "image":
        junk = draw(st.binary(max_size=60))
        start = draw(st.sampled_from([b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"II*\0"]))
        contents = {"text": b"not an image\n", "nothing": b"", "bytes": start + junk}
        return Picture("x.png", contents.get(kind), None)
    name = draw(st.sampled_from(sorted(FORMATS)))
    size = draw(SIDES), draw(SIDES)
    mode = draw(st.sampled_from(MODES))
    seed = draw(st.integers(0, 9))
    frames = []
    for frame in range(draw(st.sampled_from([1, 1, 2, 3]))):
        random = np.random.default_rng([seed, frame])
        noise = Image.fromarray(random.integers(0, 256, size[::-1], dtype=np.uint8))
        if mode == "I;16":
            frames.append(noise.convert("I").convert("I;16"))
        else:
            frames.append(noise.convert("RGB").convert("RGBA" if "A" in mode else "RGB"))
            with contextlib.suppress(ValueError):
                frames[-1] = frames[-1].convert(mode)
    exif = Image.Exif()
    orientation = draw(st.sampled_from([None, 1, 2, 3, 5, 6, 8, 0, 9, 65535]))
    if orientation is not None:
        exif[0x0112] = orientation
    options: dict[str, Any] = {"exif": exif} if orientation is not None else {}
    if len(frames) > 1 and name in ("PNG", "GIF", "WEBP", "TIFF"):
        options |= {"save_all": True, "append_images": frames[1:], "duration": 40}
    if mode in ("P", "L") and draw(st.booleans()):
        options["transparency"] = 3
    buffer = io.BytesIO()
    try:
        with warnings.catch_warnings():
            # Pillow 12 warns of frames of 16 bits, which it saves all the same.
            warnings.filterwarnings("ignore", "Saving I mode images", DeprecationWarning)
            frames[0].save(buffer, name, **options)
    except (OSError, ValueError, KeyError, TypeError):  # Pillow writes no such file.
        noise.save(buffer, "PNG")
        orientation, name = None, "PNG"
    content = buffer.getvalue()
    damage = draw(st.sampled_from(["none", "none", "cut", "altered", "longer"]))
    if damage == "cut":
        content = content[: int(len(content) * draw(st.floats(0, 0.999)))]
    elif damage == "altered":
        altered = bytearray(content)
        for _ in range(draw(st.integers(1, 4))):
            place = min(len(altered) - 1, draw(st.integers(0, 80)) * draw(st.integers(1, 40)))
            altered[place] = draw(st.integers(0, 255))
        content = bytes(altered)
    elif damage == "longer":
        content += draw(st.binary(min_size=1, max_size=20))
    whole = damage == "none" and name in ("PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP", "PPM")
    turned = orientation in (5, 6, 8) and name in ("PNG", "JPEG", "WEBP", "TIFF")
    return Picture(
        f"x{FORMATS[name]}", content, (size[::-1] if turned else size) if whole else None
    )

"""Values of a wrong kind are named before anything is built of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from imagegen.core.build import check_options
from imagegen.core.errors import UserError
from imagegen.data.digits import Digits
from imagegen.training.model_options import model_options
from tests.helpers import TINY_MODEL


def options(
    size: int = 1,
    share: float | None = None,
    pair: Sequence[int] | None = None,
    pairs: Sequence[Sequence[int]] = (),
    section: Mapping[str, Any] | None = None,
    anything: Any = None,
    word: str = "",
) -> None: ...


@pytest.mark.parametrize(
    "given",
    [
        {"size": 3, "share": 1, "pair": [1, 2], "pairs": ((1, 2), [3]), "section": {"a": 1}},
        {"share": None, "pair": None, "pairs": [], "anything": object(), "word": "é"},
        {"unknown": object()},
    ],
)
def test_kinds_that_fit(given: dict[str, Any]) -> None:
    check_options("it", options, given)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"size": True}, "it takes size as a whole number, not True"),
        ({"size": 1.5}, "size as a whole number, not 1.5"),
        ({"size": [1]}, r"size as a whole number, not \[1\]"),
        ({"share": "half"}, "share as a number or null, not 'half'"),
        ({"pair": [1, "a"]}, r"pair as a list of whole numbers or null, not \[1, 'a'\]"),
        ({"pair": "12"}, "pair as a list of whole numbers or null, not '12'"),
        ({"pairs": [1, 2]}, r"pairs as a list of lists of whole numbers, not \[1, 2\]"),
        ({"pairs": [["a"]]}, "lists of whole numbers"),
        ({"section": "a"}, "section as a section of options or null, not 'a'"),
        ({"word": None}, "word as a word, not None"),
    ],
)
def test_kinds_that_do_not_fit(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_options("it", options, given)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tokens": []}, r"model takes tokens as a word, not \[\]"),
        ({"embedding": None}, "model takes embedding as a section of options, not None"),
        ({"convolution": "x"}, "model takes convolution as a list of whole numbers or null"),
        ({"conditional": "yes"}, "model.conditional=yes, but it must be true or false"),
        ({"foo": 1}, "there is no option model.foo"),
    ],
)
def test_model_options(changes: dict[str, Any], sentence: str) -> None:
    model = {**TINY_MODEL, "conditional": False}
    config = {name: model.pop(name) for name in ("attention", "head")}
    assert model_options({"model": model, **config}, Digits())["n_layers"] == 1
    with pytest.raises(UserError, match=sentence):
        model_options({"model": {**model, **changes}, **config}, Digits())


@pytest.mark.parametrize("name", ["n_layers", "embedding"])
def test_a_model_that_lacks_an_option(name: str) -> None:
    config = {part: TINY_MODEL[part] for part in ("attention", "head")}
    model = {key: value for key, value in TINY_MODEL.items() if key not in (*config, name)}
    with pytest.raises(UserError, match=f"model.{name} is not set; set it, or begin a model of"):
        model_options({"model": model, **config}, Digits())

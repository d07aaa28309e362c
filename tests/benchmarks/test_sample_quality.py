from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import sample_quality
from benchmarks.sample_quality import deviation, frechet_distance, main, taken_for
from tests.helpers import save_tiny_checkpoint


def test_distance_is_that_of_the_means_and_covariances() -> None:
    features = torch.randn(500, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert frechet_distance(features, features) == pytest.approx(0, abs=1e-9)
    shift, scale = torch.arange(6.0, dtype=torch.float64), 3.0
    # Covariances C and 9 C: their distance is trace(C + 9 C - 2 * 3 C).
    closed = float((shift + (scale - 1) * features.mean(dim=0)).square().sum())
    closed += (scale - 1) ** 2 * float(features.T.cov().trace())
    assert frechet_distance(scale * features + shift, features) == pytest.approx(closed)


def test_deviation_is_that_of_new_draws() -> None:
    """Of a mean that is shifted by 2: the distance is about its square, 2 * 2 / sqrt(n) apart."""
    numbers = torch.randn(2, 2000, 1, dtype=torch.float64, generator=torch.manual_seed(0))
    assert deviation(numbers[0] + 2, numbers[1]) == pytest.approx(4 / 2000**0.5, rel=0.3)


def test_labels_asked_for_in_turn() -> None:
    probabilities = torch.eye(3)[[0, 1, 2, 0, 0]]
    assert taken_for(probabilities, np.arange(3)).tolist() == [True, True, True, True, False]


def test_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_quality, "BATCH", 32)
    monkeypatch.setattr(sample_quality, "RESAMPLES", 2)
    plain = save_tiny_checkpoint(tmp_path / "plain.ckpt")
    labelled = save_tiny_checkpoint(tmp_path / "labelled.ckpt", n_classes=10)
    kept, out = tmp_path / "classifiers", tmp_path / "new" / "table.md"
    words = [f"plain={plain}", f"labelled={labelled}", "--n=20", "--guidance", "1", "2"]
    words += ["--temperature", "1", f"--classifiers={kept}", f"--out={out}"]
    main(words)
    first, (file,) = out.read_text(), kept.iterdir()
    table = [line.split(" | ") for line in first.splitlines() if line.startswith("| ")][2:]
    assert [row[:3] for row in table] == [
        ["| 20 training images", "–", "–"],
        ["| 20 validation images", "–", "–"],
        ["| plain", "–", "1"],
        ["| labelled", "1", "1"],
        ["| labelled", "2", "1"],
    ]
    assert [row[4] == "–" for row in table] == [False, False, True, False, False]
    assert float(table[0][4].split()[0]) > 80  # else the classifier has not learned
    stamp = file.stat().st_mtime_ns
    main(words)
    assert (file.stat().st_mtime_ns, out.read_text()) == (stamp, first)


@pytest.mark.parametrize("run", ["name=/nowhere", "name="])
def test_mistakes_are_one_sentence(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([run])
    assert stopped.value.code not in (0, None)
    told = f"{stopped.value.code}{capsys.readouterr().err}"
    assert "Traceback" not in told
    assert ("does not exist" if run == "name=/nowhere" else "NAME=RUN") in told

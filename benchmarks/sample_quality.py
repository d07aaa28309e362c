"""How good generated images are, as a small classifier sees them; nothing is downloaded.

    python benchmarks/sample_quality.py NAME=RUN [NAME=RUN ...] [--guidance 1 1.5]
        [--temperature 0.8 0.9 1] [--n 2000] [--root FOLDER] [--out FILE.md]

RUN is a run folder or a checkpoint. The classifier is trained on the training images of the run's
data set, which must have labels, and kept in build/sample-quality/ for the next call. FILE.md gets
a table for each data set:

- the Frechet distance (Heusel et al., 2017) between its penultimate features of the drawn images
  and of all test images. It is not FID: features and units are those of this classifier;
- for models that know labels, which are drawn in turn: how many images it takes for what was asked;
- of how many images it is confident.
"""

from __future__ import annotations

import argparse
import hashlib
import shlex
import sys
import textwrap
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance
from torchvision.transforms import RandomCrop

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from imagegen import Controls, generate  # noqa: E402
from imagegen.checkpoint.provenance import load_source  # noqa: E402
from imagegen.checkpoint.training_data import class_numbers, dataset_of  # noqa: E402
from imagegen.commands.benchmark.common import heading  # noqa: E402
from imagegen.commands.benchmark.tables import digits, rows, where  # noqa: E402
from imagegen.core.errors import UserError  # noqa: E402
from imagegen.core.spec import ImageSpec  # noqa: E402
from imagegen.data.base import ImageDataset  # noqa: E402

FEATURES, EPOCHS, BATCH, LEARNING_RATE = 64, 8, 128, 0.01
CONFIDENT = 0.9
"""Probability of its class from which on the classifier is confident."""
RESAMPLES = 100
CPU = torch.device("cpu")
HEAD = ["images", "guidance", "temperature", "Frechet distance", "as asked, %", "confident, %"]


class Classifier(nn.Module):
    """Logits "b k" of images "b h w c" of levels, at least 8x8 pixels."""

    def __init__(self, spec: ImageSpec, classes: int) -> None:
        super().__init__()
        self.top = spec.levels - 1
        layers: list[nn.Module] = []
        for before, after in pairwise((spec.channels, 16, 32, 64)):
            convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        size = 64 * (spec.height // 8) * (spec.width // 8)
        layers += [nn.Flatten(), nn.Linear(size, FEATURES), nn.BatchNorm1d(FEATURES), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.logits = nn.Linear(FEATURES, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.logits(self.features(self.prepared(images)))

    def prepared(self, images: Tensor) -> Tensor:
        """Images "b h w c" as "b c h w" from 0 to 1."""
        return images.movedim(-1, 1) / self.top

    @torch.inference_mode()
    def seen(self, images: np.ndarray) -> tuple[Tensor, Tensor]:
        """Features "n f", float64, and probabilities "n k" of images "n h w c"."""
        self.eval()
        parts = [self.features(self.prepared(b)) for b in torch.from_numpy(images).split(500)]
        features = torch.cat(parts)
        return features.double(), self.logits(features).softmax(dim=-1)


def trained(dataset: ImageDataset) -> Classifier:
    """A classifier of the training images, moved by up to two pixels."""
    train = dataset.split("train")
    images, labels = torch.tensor(train.images), torch.tensor(train.labels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Classifier(dataset.spec, len(dataset.class_names or ()))
        steps = len(images) // BATCH * EPOCHS
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
        move = RandomCrop((dataset.spec.height, dataset.spec.width), padding=2)
        for _ in range(EPOCHS):
            order = torch.randperm(len(images))
            for chosen in order[: len(order) // BATCH * BATCH].split(BATCH):
                moved = move(images[chosen].movedim(-1, 1)).movedim(1, -1)
                loss = nn.functional.cross_entropy(model(moved), labels[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return model


def classifier_of(dataset: ImageDataset, file: Path) -> tuple[Classifier, float, float]:
    """The classifier that `file` keeps, or a new one; its test accuracy; seconds of training."""
    if file.exists():
        kept = torch.load(file, weights_only=True)
        model = Classifier(dataset.spec, len(dataset.class_names or ()))
        model.load_state_dict(kept["weights"])
    else:
        print(f"training a classifier of {dataset.name}", flush=True)
        started = time.perf_counter()
        model = trained(dataset)
        kept = {"weights": model.state_dict(), "seconds": time.perf_counter() - started}
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(kept, file)
    test = dataset.split("test")
    accuracy = float(taken_for(model.seen(test.images)[1], test.labels).mean())
    return model, accuracy, kept["seconds"]


def taken_for(probabilities: Tensor, labels: np.ndarray) -> np.ndarray:
    """Of each image, whether its most probable class "n k" is that of labels[i % len(labels)]."""
    return probabilities.argmax(dim=-1).numpy() == np.resize(labels, len(probabilities))


def frechet_distance(features: Tensor, others: Tensor) -> float:
    """Between normal distributions of the means and covariances of "n f" and "m f", float64."""
    metric = FrechetInceptionDistance(nn.Identity(), input_img_size=(features.shape[1],))
    metric.update(features, real=False)
    metric.update(others, real=True)
    return float(metric.compute())


def deviation(features: Tensor, others: Tensor) -> float:
    """Standard deviation of the distance when the images of `features` are drawn again."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(RESAMPLES):
        again = torch.from_numpy(random.integers(len(features), size=len(features)))
        found.append(frechet_distance(features[again], others))
    return float(np.std(found, ddof=1))


def cells(
    classifier: Classifier, images: np.ndarray, labels: np.ndarray | None, test: Tensor
) -> list[str]:
    """The last three columns, with standard errors."""
    features, probabilities = classifier.seen(images)
    distance, error = frechet_distance(features, test), deviation(features, test)
    asked = "–" if labels is None else _share(taken_for(probabilities, labels))
    confident = probabilities.amax(dim=-1).numpy() >= CONFIDENT
    return [f"{digits(distance)} ± {digits(error)}", asked, _share(confident)]


def _share(found: np.ndarray) -> str:
    share = found.mean()
    return f"{100 * share:.1f} ± {100 * (share * (1 - share) / len(found)) ** 0.5:.1f}"


def floor(classifier: Classifier, dataset: ImageDataset, n: int, test: Tensor) -> list[list[str]]:
    """Rows of `n` real images at most: of those that the classifier was trained on, and others."""
    found = []
    for which, words in (("train", "training images"), ("val", "validation images")):
        split = dataset.split(which)
        chosen = np.random.default_rng(0).permutation(len(split))[:n]
        numbers = cells(classifier, split.images[chosen], split.labels[chosen], test)
        found.append([f"{len(chosen):,} {words}", "–", "–", *numbers])
    return found


def of_model(
    name: str, loaded: Any, dataset: ImageDataset, classifier: Classifier, test: Tensor, given: Any
) -> list[list[str]]:
    """Rows of a model: one for each temperature and, if it knows labels, guidance."""
    labelled, found = loaded.model.n_classes is not None, []
    asked = class_numbers(loaded.metadata, dataset).tolist() if labelled else None
    for guidance in given.guidance if labelled else [1.0]:
        for temperature in given.temperature:
            started = time.perf_counter()
            controls = Controls(temperature=temperature, guidance=guidance)
            batches = generate(
                loaded.model, given.n, seed=given.seed, controls=controls, labels=asked
            )
            images = np.concatenate(list(batches))
            labels = np.arange(len(asked)) if asked else None
            how = [f"{guidance:g}" if labelled else "–", f"{temperature:g}"]
            found.append([name, *how, *cells(classifier, images, labels, test)])
            seconds = time.perf_counter() - started
            print(f"{' | '.join(found[-1])} ({seconds:.0f} s)", flush=True)
    return found


def key_of(dataset: ImageDataset) -> str:
    """A name for what a classifier was trained on."""
    digest = hashlib.sha256(dataset.digests("train").tobytes()).hexdigest()
    return f"{dataset.name}-{digest[:12]}"


def measured(given: Any, command: str) -> str:
    """The document."""
    head = heading("sample-quality", CPU, torch.get_num_threads())
    sources = {name: load_source(run, CPU) for name, run in given.runs}
    datasets: dict[str, ImageDataset] = {}
    members: dict[str, list[str]] = {}
    for name, source in sources.items():
        spec = source.loaded.model.spec
        dataset = dataset_of(source.loaded.metadata, {"root": given.root}, spec)
        if dataset.class_names is None:
            raise UserError(f"{name} is a model of images without labels to train a classifier on.")
        key = key_of(dataset)
        datasets[key] = dataset
        members.setdefault(key, []).append(name)
    said = (
        f"Each row is {given.n:,} images of seed {given.seed}, with the labels in turn where the "
        "model knows some. The distance is the **Frechet distance on the features of a small "
        "classifier, not FID**, to all test images: FID's formula on another network's features, "
        "in units that only rows of the same table share. Rows of real images are its floor, which "
        "is above 0 and falls as the number of images grows. Its ± is the standard deviation over "
        f"{RESAMPLES} bootstrap resamples of the row's images (near the floor about twice what new "
        "images differ by), that of a share its standard error. As asked: the classifier takes the "
        "image for the label that was asked for (of a real image, for its own). Confident: it "
        f"gives the class that it takes it for {CONFIDENT} or more."
    )
    lines = ["# How good generated images are", "", where(head), "", f"```\n{command}\n```", ""]
    lines += textwrap.wrap(said, 128)
    for key, dataset in datasets.items():
        classifier, accuracy, seconds = classifier_of(dataset, given.classifiers / f"{key}.pt")
        told = (
            f"The classifier recognises {100 * accuracy:.2f} % of the test images; its training "
            f"took {seconds:.0f} s."
        )
        test = classifier.seen(dataset.split("test").images)[0]
        table = [HEAD, *floor(classifier, dataset, given.n, test)]
        print("\n".join([told, *(" | ".join(row) for row in table)]), flush=True)
        for name in members[key]:
            table += of_model(name, sources[name].loaded, dataset, classifier, test, given)
        lines += ["", f"## {dataset.name}", "", told, "", *rows(table)]
    lines += ["", "Checkpoints by the first digits of their SHA-256:", ""]
    lines += [f"- {name}: {source.sha256[:12]}" for name, source in sources.items()]
    return "\n".join(lines) + "\n"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("runs", nargs="+", type=_named, metavar="NAME=RUN")
    parser.add_argument("--n", type=int, default=2000, help="images of each row")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.8, 0.9, 1.0])
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", help="folder of the data, if not that of the training")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--classifiers", type=Path, default=ROOT / "build/sample-quality")
    words = sys.argv[1:] if words is None else words
    given = parser.parse_args(words)
    if given.n < 2:
        parser.error("--n must be at least 2: a covariance needs two images.")
    try:
        text = measured(given, shlex.join(["python", "benchmarks/sample_quality.py", *words]))
    except UserError as error:
        sys.exit(str(error))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text)


def _named(text: str) -> tuple[str, str]:
    name, _, run = text.partition("=")
    if not name or not run:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=RUN: a name for the table, a run.")
    return name, run


if __name__ == "__main__":
    main()

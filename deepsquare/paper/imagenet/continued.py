"""Trained networks continued with a technique, by the start of its modules: what is lost, and what is gained?

Fixed before the runs: the networks, the recipes, the seeds and the margin. Of each network there is one trained base,
from which every run continues, on imagenette-small (10 classes, 6,000 images; a proxy). No run has dropout, so runs
differ in the technique and its start alone. Each is compared with the plain network, continued alike and paired by
seed: is it worse by less than ``MARGIN`` points? Holm's procedure corrects for the number of comparisons.

A base on another machine has other bits, so its name has a hash of its weights, and a seed has all its rows from one.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deepsquare.checkpoint import RunInfo, save
from deepsquare.data.folders import open_source
from deepsquare.models import create_model
from deepsquare.paper.grid.backend import LOCAL, Workers
from deepsquare.paper.grid.runner import TrainingRun, run_grid
from deepsquare.paper.imagenet.pretrained import MODEL, SHA256, WeightsFile, imagenet_classes, load_pretrained
from deepsquare.paper.imagenet.proxy import BATCH_SIZE, ImageFolderTraining, model_path, recipe_of
from deepsquare.paper.options import OUT, ImageFolders, OutputFolders, Rows, check_selection
from deepsquare.preprocessing import preprocessing_of
from deepsquare.results import Row, Store
from deepsquare.surgery import INITS, Init
from deepsquare.training import ImageNetRecipe
from deepsquare.training.run import setup_training

EXPERIMENT = "continued"
MARGIN = 1.0  # points of accuracy by which a network may be worse
CLASSES, IMAGES = 10, 2000  # of imagenette-small, for testing
SPECS = ("pooling", "softmin", "encoding", "pooling+excitation")
SHUFFLENET = "shufflenet_v2_x0_5"
LR = 0.0025  # a tenth of what the proxy of ShuffleNetV2 is trained with


@dataclass(frozen=True)
class Continued:
    """A trained network, and how it is continued."""

    model: str
    title: str
    recipe: ImageNetRecipe
    seeds: int

    def runs(self, data: str, base: str, seed: int) -> list[TrainingRun]:
        """The plain network and every spec with every start, from the base of that name."""
        starts: list[tuple[str, Init]] = [("", "paper"), *((spec, init) for spec in SPECS for init in INITS)]
        runs = []
        for spec, init in starts:
            recipe = replace(self.recipe, model=self.model, spec=spec, init=init)
            schedule = f"{data}, {recipe.size} px"
            runs.append(
                TrainingRun(EXPERIMENT, row_of(self.model, spec, init), seed, self.model, spec, schedule, recipe, base)
            )
        return runs


SHORT = replace(recipe_of(SHUFFLENET), warmup=0.0, lr=LR, batch_size=BATCH_SIZE)
LITE0 = replace(SHORT, epochs=1, size=224, eval_size=224, eval_resize=224)
NETWORKS = {
    SHUFFLENET: Continued(SHUFFLENET, "ShuffleNetV2-0.5×, trained on the same images", replace(SHORT, epochs=10), 5),
    MODEL: Continued(MODEL, "EfficientNet-Lite0 with ImageNet weights", LITE0, 3),
}


def row_of(model: str, spec: str = "", init: Init = "paper") -> str:
    """The label of a row, as in ``shufflenet_v2_x0_5+pooling@identity``."""
    return "+".join(filter(None, (model.rpartition("/")[2], spec))) + (f"@{init}" if spec else "")


def run_continued(
    *,
    data: ImageFolders,
    weights: WeightsFile = None,
    rows: Rows = (),
    workers: Workers = LOCAL,
    output: OutputFolders = OUT,
) -> None:
    """Continue trained networks with each technique from each start of its modules.

    Args:
        rows: Only these networks, shufflenet_v2_x0_5 or timm/tf_efficientnet_lite0.
    """
    check_selection(1, rows, NETWORKS)
    store = Store(output.results / "continued.jsonl")
    for network in (NETWORKS[name] for name in rows or NETWORKS):
        setup_training(replace(network.recipe, model=network.model), data)  # fail early
        pending = sorted(set(range(network.seeds)) - complete_seeds(network, store.rows()))
        if not pending:
            continue
        base = _shufflenet(data, store, workers) if network.model == SHUFFLENET else _lite0(data, store, weights)
        name = f"{row_of(network.model)}, weights {hashlib.sha256(base.read_bytes()).hexdigest()[:12]}"
        for seed in pending:
            run_grid(network.runs(data.resolve().name, name, seed), ImageFolderTraining(data, base), store, workers)


def complete_seeds(network: Continued, rows: Sequence[Row]) -> set[int]:
    """The seeds of which every row has run from one base."""
    labels = {run.row for run in network.runs("", "", 0)}
    done: dict[tuple[int, str], set[str]] = {}
    for row in rows:
        if row.experiment == EXPERIMENT and "init_from" in row.recipe:
            done.setdefault((row.seed, str(row.recipe["init_from"])), set()).add(row.row)
    return {seed for (seed, _), present in done.items() if labels <= present}


def _shufflenet(data: Path, store: Store, workers: Workers) -> Path:
    """The base network trained by the recipe of the proxies; a new one, with the next seed, on another machine."""
    label, recipe = row_of(SHUFFLENET), recipe_of(SHUFFLENET)
    bases = [
        row
        for row in store.rows()
        if row.experiment == EXPERIMENT and row.row == label and "init_from" not in row.recipe
    ]
    folder = store.path.parent / ".runs"
    for row in bases:
        if (path := model_path(folder, label, row.seed)).exists():
            return path
    run = TrainingRun(EXPERIMENT, label, len(bases), SHUFFLENET, "", f"{recipe.size} px", recipe)
    run_grid([run], ImageFolderTraining(data), store, workers)
    return model_path(folder, label, run.seed)


def _lite0(data: Path, store: Store, weights: Path | None) -> Path:
    """EfficientNet-Lite0 with those outputs of ImageNet that belong to the classes of the data."""
    path = store.path.parent / ".runs" / f"{row_of(MODEL)}-{SHA256[:12]}.safetensors"
    if not path.exists():
        source, names = load_pretrained(weights=weights).state_dict(), open_source(data, "val").classes
        classes = imagenet_classes(names)
        model = create_model(MODEL, num_classes=len(classes))
        state = {key: value[classes] if key.startswith("classifier.") else value for key, value in source.items()}
        model.load_state_dict(state)
        path.parent.mkdir(parents=True, exist_ok=True)
        save(model, path, preprocessing_of(model, 224, 224, names), run=RunInfo(row_of(MODEL), 0))
    return path

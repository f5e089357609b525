"""The paper's tables as data: a row is a label, a model, a spec and the paper's accuracies.

NOTE not in paper: the scale of Square-Softmin is per channel on CIFAR-10, as Equation (24) has it, and shared on
ImageNet, as Section 5 says; DeepSquare6 and DeepSquare8 use the scaled, negative form of DeepSquare5s-.
"""

from dataclasses import dataclass

from deepsquare.training.recipe import LONGER, RECIPES


@dataclass(frozen=True)
class PaperRow:
    """A row of a table. ``top1`` is None if the paper reports divergence."""

    label: str
    spec: str
    top1: float | None
    top5: float | None = None
    detail: str = ""
    model: str = "vanilla_cnn"
    epochs: int | None = None  # if not those of the table's other rows
    recipe: str = ""  # the name of the library's recipe that trains it


@dataclass(frozen=True)
class PaperTable:
    """A table; each row is compared with the unmodified model of the same architecture."""

    number: int  # 0 if it is not in the paper
    title: str
    entries: tuple[PaperRow, ...]
    data: str = "CIFAR-10"
    detail: str = ""  # the heading of the rows' detail column
    note: str = ""  # what else the table says, or how it has to be read


_SQUARE_1, _SQUARE_2 = "square(after='layer1')", "square(after='layer2')"
_SOFTMIN = "softmin(scale='channel')"

TABLE_2 = PaperTable(
    2,
    "Ways to put squares into the vanilla CNN",
    (
        PaperRow("Original", "", 81.71, detail="None"),
        PaperRow("DeepSquare1", _SQUARE_1, 80.32, detail="1_2"),
        PaperRow("DeepSquare2", _SQUARE_2, 81.69, detail="2_3"),
        PaperRow("DeepSquare3", "pooling", 82.77, detail="3_4"),
        PaperRow("DeepSquare4", "square(after='pool')", 81.39, detail="4_5"),
        PaperRow("DeepSquare5+", "softmin(scale='none', sign=1)", 76.88, detail="5_"),
        PaperRow("DeepSquare5-", "softmin(scale='none')", 82.24, detail="5_"),
        PaperRow("DeepSquare5s+", "softmin(scale='channel', sign=1)", 81.93, detail="5_"),
        PaperRow("DeepSquare5s-", _SOFTMIN, 82.76, detail="5_"),
        PaperRow("DeepSquare6", f"{_SQUARE_1}+{_SQUARE_2}+pooling+{_SOFTMIN}", None, detail="1_2_3_4, 5_"),
        PaperRow("DeepSquare7", f"{_SQUARE_1}+{_SQUARE_2}+pooling", 79.75, detail="1_2_3_4"),
        PaperRow("DeepSquare8", f"pooling+{_SOFTMIN}", 82.68, detail="3_4, 5_"),
    ),
    detail="Position of EleSquare",
)

TABLE_3 = PaperTable(
    3,
    "Square-Pooling, GeM and higher moments",
    (
        PaperRow("Original", "", 81.71, detail="1"),
        PaperRow("GeM (p=2)", "gem(p=2, learnable=False)", 82.51, detail="–"),
        PaperRow("Square-Pooling", "pooling", 82.77, detail="2"),
        PaperRow("Variant1", "moment3", 82.23, detail="3"),
        PaperRow("Variant2", "moment4", 78.84, detail="4"),
        PaperRow("Variant3", "moment5", 80.34, detail="5"),
        PaperRow("Variant4", "moment6", 73.00, detail="6"),
    ),
    detail="Order of moments",
)


def _imagenet(recipe: str, label: str, top1: float, top5: float, detail: str = "") -> PaperRow:
    """A row that a recipe of the library trains."""
    named = RECIPES[recipe]
    epochs = named.epochs if recipe == f"{LONGER[0]}@{LONGER[1]}" else None
    return PaperRow(label, named.spec, top1, top5, detail, named.model, epochs, recipe)


TABLE_4 = PaperTable(
    4,
    "DeepSquare on ResNet18",
    (
        _imagenet("resnet18", "ResNet18", 70.98, 89.92),
        _imagenet("resnet18+pooling", "Square-Pooling (SP)", 71.41, 90.02),
        _imagenet("resnet18+softmin", "Square-Softmin (SS)", 71.21, 90.22),
        _imagenet("resnet18+softmin@200", "Square-Softmin (200 epochs)", 71.92, 90.39),
        _imagenet("resnet18+excitation", "Square-Excitation (SEx)", 71.38, 90.12),
        _imagenet("resnet18+encoding", "Square-Encoding (SEn)", 71.56, 90.25),
        _imagenet("resnet18+pooling+excitation", "SP & SEx", 71.60, 90.17),
        _imagenet("resnet18+pooling+encoding", "SP & SEn", 70.40, 89.52),
        _imagenet("resnet18+pooling+excitation+encoding", "SP & SEx & SEn", 70.74, 89.60),
    ),
    "ImageNet",
)

TABLE_5 = PaperTable(
    5,
    "DeepSquare on ResNet50",
    (
        _imagenet("resnet50", "ResNet50", 77.06, 93.34),
        _imagenet("resnet50+pooling", "Square-Pooling (SP)", 77.39, 93.55),
        _imagenet("resnet50+softmin", "Square-Softmin (SS)", 77.25, 93.32),
        _imagenet("resnet50+encoding", "Square-Encoding (SEn)", 77.35, 93.55),
        _imagenet("resnet50+pooling+excitation", "SP & SEx", 78.14, 94.05),
    ),
    "ImageNet",
)

TABLE_6 = PaperTable(
    6,
    "SP & SEx and the baselines on ResNet50",
    (
        _imagenet("resnet50+pooling+excitation", "SP & SEx", 78.14, 94.05, "0%"),
        PaperRow("MPN-COV", "mpn_cov", 77.26, 93.46, "120%", "resnet50"),
        PaperRow("iSQRT-COV", "isqrt_cov", 77.86, 93.78, "120%", "resnet50"),
        PaperRow("GSoP-Net1", "gsop1", 77.68, 93.98, "10%", "resnet50"),
        PaperRow("GSoP-Net2", "gsop2", 78.81, 94.36, "130%", "resnet50"),
        PaperRow("SE", "se", 76.71, 93.38, "10%", "resnet50"),
        PaperRow("GE-θ", "ge_theta", 78.00, 94.13, "22%", "resnet50"),
    ),
    "ImageNet",
    detail="+Parameters",
    note="The methods other than SP & SEx are as their own papers state them, each trained by its own recipe: SE’s "
    "76.71 lies below the paper’s plain ResNet50, 77.06. So the column compares recipes as well as methods.",
)

TABLE_7 = PaperTable(
    7,
    "DeepSquare on ShuffleNetV2",
    (
        _imagenet("shufflenet_v2_x1_0", "ShuffleNetV2", 68.89, 88.58),
        _imagenet("shufflenet_v2_x1_0+pooling", "Square-Pooling (SP)", 70.53, 89.49),
        _imagenet("shufflenet_v2_x1_0+softmin", "Square-Softmin (SS)", 69.78, 89.04),
        _imagenet("shufflenet_v2_x1_0+encoding", "Square-Encoding (SEn)", 69.58, 89.01),
        _imagenet("shufflenet_v2_x1_0+pooling+excitation", "SP & SEx", 70.76, 89.63),
        _imagenet("shufflenet_v2_x0_5", "ShuffleNetV2-0.5×", 59.94, 81.82),
        _imagenet("shufflenet_v2_x0_5+pooling", "ShuffleNetV2-0.5× with SP", 61.39, 82.98),
    ),
    "ImageNet",
    note="The table also has the top-1 accuracies of ShuffleNetV2’s authors: 69.4 for 1× and 60.3 for 0.5×.",
)


def _after_each_layer(term: str) -> str:
    return "+".join(f"{term}(after='{layer}')" for layer in ("layer1", "layer2", "layer3"))


# NOTE not in paper: the baselines in the vanilla CNN. It has no blocks, so channel attention follows each layer.
BASELINES_TABLE = PaperTable(
    0,
    "The baselines in the vanilla CNN",
    (
        PaperRow("Original", "", None, detail="–"),
        PaperRow("Square-Pooling", "pooling", None, detail="pooling"),
        PaperRow("DeepSquare5s-", _SOFTMIN, None, detail="logits"),
        PaperRow("SE", _after_each_layer("se"), None, detail="each layer"),
        PaperRow("GE-θ⁻", _after_each_layer("ge_theta_minus"), None, detail="each layer"),
        PaperRow("Bilinear (C=32)", "bilinear(size=32)", None, detail="pooling"),
        PaperRow("iSQRT-COV (C=64)", "isqrt_cov(size=64)", None, detail="pooling, last layer at stride 1"),
        PaperRow("iSQRT-COV (C=64), stride 2", "isqrt_cov(size=64, dense=False)", None, detail="pooling"),
    ),
    detail="Position",
)


def stored_labels() -> dict[str, str]:
    """The labels under which networks on CIFAR-10 are stored, by spec: one in several tables has that of the first."""
    labels: dict[str, str] = {}
    for entry in (*TABLE_2.entries, *TABLE_3.entries, *BASELINES_TABLE.entries):
        labels.setdefault(entry.spec, entry.label)
    return labels


TABLES = (TABLE_2, TABLE_3, TABLE_4, TABLE_5, TABLE_6, TABLE_7)

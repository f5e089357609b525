"""The claims that rows of Tables 2 to 5 and 7 make: this network is better or worse than the plain one, by so much."""

from __future__ import annotations

from deepsquare.paper.claim_types import Accuracy, Claim, NotTested
from deepsquare.paper.regimes import (
    DEEPSQUARE6,
    LONG,
    SHORT,
    SHORT_SUFFIX,
    TINY,
    TINY_RESNET,
    TINY_SQUARES,
    TINY_VANILLA,
)
from deepsquare.paper.tables import TABLE_2, TABLE_3, TABLE_4, TABLE_5, TABLE_7, PaperRow, PaperTable, stored_labels
from deepsquare.paper.verdict import Differs, Diverges, Hypothesis, NoDifference

NO_DIFFERENCE = 0.1  # points: a claim below it is a claim of no difference
IMAGENET_RUNS = (
    "ImageNet and 8 GPUs for the paper's 120 to 400 epochs (deepsquare train), several seeds of each network"
)
ORIGINAL, SHUFFLENET = "Original", "ShuffleNetV2-0.5×"
SP, SP_TINY = "DeepSquare3", "Square-Pooling (SP)"


def _sized(label: str, base: str, size: float) -> Hypothesis:
    if abs(size) < NO_DIFFERENCE:
        return NoDifference.between(label, base)
    return Differs.between(label, base, size)


def direction(label: str, base: str, sign: int = 1) -> Hypothesis:
    """A row is better than another, or worse with ``sign`` -1."""
    return Differs({label: 1.0, base: -1.0}, float(sign), sized=False)


def grows(label: str) -> Hypothesis:
    """The improvement of a row is larger than under the short schedule."""
    short = {f"{label}{SHORT_SUFFIX}": -1.0, f"{ORIGINAL}{SHORT_SUFFIX}": 1.0}
    return Differs({label: 1.0, ORIGINAL: -1.0} | short, 1.0, sized=False)


def signed(points: float) -> str:
    """A difference in points as the page writes it."""
    return f"{points:+.2f}".replace("-", "−")


def in_both(*hypotheses: Hypothesis) -> tuple[Accuracy, ...]:
    """Tested at 60 epochs, or else at 10."""
    return Accuracy(LONG, hypotheses), Accuracy(SHORT, hypotheses)


_TINY_VANILLA_LABELS = {
    SP: "Square-Pooling",
    "GeM (p=2)": "GeM (p=2)",
    "DeepSquare5s-": "Square-Softmin",
    "DeepSquare8": "DeepSquare8",
    "Variant1": "Third moment",
}


_MODULES = {
    "DeepSquare3": "Square-Pooling",
    "DeepSquare5s-": "Square-Softmin",
    "DeepSquare8": "Square-Pooling with Square-Softmin",
}


def _row(table: PaperTable, entry: PaperRow, label: str) -> Claim:
    """That a row of Table 2 or 3 differs from Original as the paper states."""
    key, place = f"T{table.number}-{entry.label}", f"Table {table.number}"
    name, details = (
        _MODULES.get(entry.label, entry.label),
        (
            entry.label if entry.label in _MODULES else None,
            f"EleSquare at {entry.detail}" if table is TABLE_2 else None,
            f"moment of order {entry.detail}" if table is TABLE_3 and entry.detail != "–" else None,
        ),
    )
    what = f"{name} ({', '.join(filter(None, details))})" if any(details) else name
    if entry.top1 is None:
        forms = tuple(Diverges({form: 1.0}) for form in (label, *(f"{label}, {form}" for form in ("5s+", "5-", "5+"))))
        regimes = (DEEPSQUARE6, f"{DEEPSQUARE6}, lr × 1/4", f"{DEEPSQUARE6}, lr × 4")
        tests = [Accuracy(regime, forms, any=True) for regime in regimes]
        evidence = "more than half of seven runs, in one of the four forms that it may have"
        return Claim(key, place, f"{what} diverges", evidence, tuple(tests), "divergence")
    size = round(entry.top1 - (table.entries[0].top1 or 0.0), 2)
    proxy = _TINY_VANILLA_LABELS.get(label)
    proxies = (Accuracy(TINY_VANILLA, (direction(proxy, ORIGINAL, 1 if size > 0 else -1),)),) if proxy else ()
    if abs(size) < NO_DIFFERENCE:
        statement, evidence = f"{what} makes no difference", "a difference within ±0.5 points"
    else:
        statement = f"{what} {'improves' if size > 0 else 'harms'} the vanilla CNN"
        evidence = "the sign of the difference to the original network, and its size"
    return Claim(key, place, statement, evidence, in_both(_sized(label, ORIGINAL, size)), signed(size), proxies)


def cifar_rows() -> list[Claim]:
    """The claims of Tables 2 and 3; a network that stands in both makes one."""
    labels, claims, seen = stored_labels(), [], {""}
    for table in (TABLE_2, TABLE_3):
        for entry in table.entries:
            if entry.spec not in seen:
                claims.append(_row(table, entry, labels[entry.spec]))
            seen.add(entry.spec)
    return claims


_PROXIES = {  # rows on Tiny ImageNet by model and spec: regime, label, base
    ("shufflenet_v2_x0_5", "pooling"): (TINY, SP_TINY, SHUFFLENET),
    ("shufflenet_v2_x1_0", "pooling"): (TINY, SP_TINY, SHUFFLENET),
    ("shufflenet_v2_x1_0", "softmin"): (TINY_SQUARES, "Square-Softmin (SS)", SHUFFLENET),
    ("shufflenet_v2_x1_0", "encoding"): (TINY_SQUARES, "Square-Encoding (SEn)", SHUFFLENET),
    ("shufflenet_v2_x1_0", "pooling+excitation"): (TINY_SQUARES, "SP & SEx", SHUFFLENET),
    ("resnet18", "pooling"): (TINY_RESNET, "ResNet10, SP", "ResNet10"),
    ("resnet18", "softmin"): (TINY_RESNET, "ResNet10, SS", "ResNet10"),
    ("resnet18", "excitation"): (TINY_RESNET, "ResNet10, SEx", "ResNet10"),
    ("resnet18", "encoding"): (TINY_RESNET, "ResNet10, SEn", "ResNet10"),
    ("resnet18", "pooling+excitation"): (TINY_RESNET, "ResNet10, SP & SEx", "ResNet10"),
    ("resnet18", "pooling+encoding"): (TINY_RESNET, "ResNet10, SP & SEn", "ResNet10"),
    ("resnet18", "pooling+excitation+encoding"): (TINY_RESNET, "ResNet10, SP & SEx & SEn", "ResNet10"),
}


def imagenet_rows() -> list[Claim]:
    """The claims of Tables 4, 5 and 7, with what comparable networks do on Tiny ImageNet."""
    claims = []
    for table in (TABLE_4, TABLE_5, TABLE_7):
        for entry in table.entries:
            base = next(other for other in table.entries if (other.model, other.spec) == (entry.model, ""))
            if entry is base or entry.top1 is None or base.top1 is None:
                continue
            size = round(entry.top1 - base.top1, 2)
            proxy = None if entry.epochs else _PROXIES.get((entry.model, entry.spec))
            proxies = (Accuracy(proxy[0], (direction(proxy[1], proxy[2], 1 if size > 0 else -1),)),) if proxy else ()
            claims.append(
                Claim(
                    f"T{table.number}-{entry.label}",
                    f"Table {table.number}",
                    f"{base.label}: {entry.label} is {'better' if size > 0 else 'worse'} on ImageNet",
                    "several seeds of both networks on ImageNet",
                    (NotTested(IMAGENET_RUNS),),
                    signed(size),
                    proxies,
                )
            )
    return claims

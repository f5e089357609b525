"""The claims of the paper as data: where it makes each, what would count as evidence, and how that is judged.

A claim is judged by the first of its tests that has reached a planned look; the others are shown beside it.
"""

from __future__ import annotations

from dataclasses import replace

from deepsquare.paper.claim_types import (
    Accuracy,
    ActivationCost,
    CheckedBy,
    Claim,
    GemCost,
    LeastTime,
    NotTested,
    Overhead,
    Parameters,
    Probe,
    Regions,
    SignShares,
    SpiralRegimes,
    Spirals,
)
from deepsquare.paper.regimes import (
    ACTIVATIONS,
    LONG,
    LONG_BASELINES,
    LONGEST,
    SHORT,
    SHORT_SUFFIX,
    SOFTMIN_START,
    TINY,
    TINY_BASELINES,
    TINY_DROPOUT,
    TINY_RESNET,
    TINY_VANILLA,
)
from deepsquare.paper.table_claims import (
    IMAGENET_RUNS,
    ORIGINAL,
    SHUFFLENET,
    SP,
    SP_TINY,
    cifar_rows,
    direction,
    grows,
    imagenet_rows,
    in_both,
)
from deepsquare.paper.tables import TABLE_6
from deepsquare.paper.verdict import Hypothesis, NotWorse

HEADLINES = (
    "abstract-SP", "T2-DeepSquare3", "T2-DeepSquare5s-", "S4.2-GeM", "S4.2-variants", "abstract-comparable",
    "T6-overhead", "S3.1-squares", "F3", "F4", "F6-accuracy",
)  # fmt: skip
_VARIANTS = ("Variant1", "Variant2", "Variant3", "Variant4")
RIVALS = ("SE", "GE-θ⁻", "Bilinear (C=32)")
_TABLE_6 = {entry.spec: float(entry.detail.rstrip("%")) for entry in TABLE_6.entries}

_ALL: tuple[Claim, ...] = (
    Claim(
        "abstract-SP", "Abstract",
        "Square-Pooling alone improves ShuffleNetV2-0.5× on 200 ImageNet classes (the paper: on 1,000)",
        "the sign of the difference at the plain network’s learning rate; its size is that of other data",
        (Accuracy(TINY, (direction(SP_TINY, SHUFFLENET),)),), "+1.45 on ImageNet",
        (Accuracy(TINY_DROPOUT, (direction(SP_TINY, SHUFFLENET),)),),
    ),
    Claim(
        "abstract-cost", "Abstract", "Square-Pooling adds negligible inference time to ShuffleNetV2-0.5×",
        "the interval of the relative time of one image lies below 1.02",
        (Overhead("shufflenet_v2_x0_5", "pooling", 1.02),),
    ),
    Claim(
        "abstract-parameters", "Abstract", "Square-Pooling adds no parameter", "the number of parameters",
        (Parameters("shufflenet_v2_x0_5", {"pooling": 0.0}),), "0%",
    ),
    Claim(
        "abstract-comparable", "Abstract", "the modules are comparable to bilinear pooling, SE and GE in accuracy",
        "Square-Pooling is at most 0.5 points worse than each of them, where each is better than the plain network",
        tuple(
            Accuracy(
                regime,
                tuple(NotWorse.between(sp, rival) for rival in RIVALS),
                given=tuple(direction(rival, plain) for rival in RIVALS),
            )
            for regime, sp, plain in (
                (TINY_BASELINES, SP_TINY, SHUFFLENET), (LONG_BASELINES, SP, ORIGINAL), (SHORT, SP, ORIGINAL),
            )
        ),
    ),
    Claim(
        "T6-iSQRT", "Table 6", "the modules are competitive with iSQRT-COV in accuracy",
        "Square-Pooling is at most 0.5 points worse than iSQRT-COV, at either stride of the last stage",
        (
            Accuracy(TINY_BASELINES, (NotWorse.between(SP_TINY, "iSQRT-COV (C=64)"),)),
            *(
                Accuracy(
                    regime,
                    tuple(NotWorse.between(SP, rival) for rival in ("iSQRT-COV (C=64)", "iSQRT-COV (C=64), stride 2")),
                )
                for regime in (LONG_BASELINES, SHORT)
            ),
        ),
    ),
    Claim(
        "abstract-mobile", "Abstract", "the modules suit mobile networks in particular",
        "a larger gain for ShuffleNetV2 than for ResNets, on the same data",
        (NotTested("the study's rows of ResNet10 beside those of ShuffleNetV2-0.5×, and ShuffleNetV2-1×"),),
    ),
    Claim(
        "S3.1-squares", "Section 3.1, Figure 2", "two hidden units with squares can split a decision region in two",
        "an exact count over random networks that meet the paper's conditions", (Regions(True),),
    ),
    Claim(
        "S3.1-ReLU", "Section 3.1, Figure 2", "two hidden units with ReLU cannot",
        "an exact count over random networks", (Regions(False),),
    ),
    Claim(
        "S3.1-hard", "Sections 1 and 3.1", "a deep network with EleSquare as the only activation is very hard to train",
        "with 7 layers, the deepest here, it is more than 3 points worse than with ReLU",
        (Accuracy(ACTIVATIONS, (NotWorse.between("ReLU, 7 layers", "EleSquare, 7 layers", -3.0),)),),
    ),
    Claim(
        "F3", "Figure 3", "ReLU-Square fits the one-arm spiral more smoothly than ReLU",
        "the roughness of the regressed path", (Spirals(3, "roughness"),),
    ),
    Claim(
        "F4", "Figure 4", "ReLU-Square has the lower test loss on the one-arm spiral",
        "both activations tuned alike in each kind of training, fresh seeds",
        (SpiralRegimes("one-arm", "loss"),),
    ),
    Claim(
        "F5", "Figure 5", "ReLU-Square has smoother decision boundaries on the three-arm spiral",
        "the sharpest turn of the boundaries", (Spirals(5, "sharpest_turn"),),
    ),
    Claim(
        "F6-loss", "Figure 6", "ReLU-Square has the lower test loss on the three-arm spiral",
        "both activations tuned alike in each kind of training, fresh seeds",
        (SpiralRegimes("three-arm", "loss"),),
    ),
    Claim(
        "F6-accuracy", "Figure 6", "ReLU-Square has the higher test accuracy on the three-arm spiral",
        "both activations tuned alike in each kind of training, fresh seeds",
        (SpiralRegimes("three-arm", "accuracy"),),
    ),
    Claim(
        "S3.2-cost", "Section 3.2", "softplus, tanh and sigmoid cost much more than ReLU-Square, forward",
        "the time of each relative to ReLU-Square",
        (ActivationCost("plain operations", backward=False), ActivationCost("fused kernel", backward=False)),
    ),
    Claim(
        "S3.2-cost-backward", "Section 3.2",
        "softplus, tanh and sigmoid cost much more than ReLU-Square, with backward",
        "the time of each relative to ReLU-Square",
        (ActivationCost("plain operations", backward=True), ActivationCost("fused kernel", backward=True)),
    ),
    *cifar_rows(),
    Claim(
        "S4.1-few", "Section 4.1", "few of the placements that Table 2 does not list improve accuracy",
        "networks with squares at other positions and in other combinations",
        (NotTested("a search over placements beyond Table 2"),),
    ),
    Claim(
        "S4.2-GeM", "Section 4.2", "Square-Pooling is as good as GeM (p = 2) or better",
        "it is at most 0.5 points worse", in_both(NotWorse.between(SP, "GeM (p=2)")), "+0.26",
        (Accuracy(TINY_VANILLA, (NotWorse.between("Square-Pooling", "GeM (p=2)"),)),),
    ),
    Claim(
        "S4.2-GeM-cost", "Section 4.2", "Square-Pooling takes less time than GeM (p = 2)",
        "GeM takes longer on feature maps of every size, forward, both in plain operations", (GemCost(),),
    ),
    Claim(
        "S4.2-variants", "Section 4.2", "moments of a higher order are inferior to Square-Pooling",
        "each of the four is worse than Square-Pooling", in_both(*(direction(label, SP, -1) for label in _VARIANTS)),
        "−0.54 to −9.77", (Accuracy(TINY_VANILLA, (direction("Third moment", "Square-Pooling", -1),)),),
    ),
    Claim(
        "S4.2-discriminative", "Section 4.2, Equation 21",
        "Square-Pooling gives a more discriminative feature vector than GAP",
        "a linear classifier on frozen features", (Probe(),),
    ),
    Claim(
        "S4.2-merge", "Section 4.2", "the scales of Square-Softmin can be merged into the last FC layer",
        "equal outputs", (CheckedBy("tests/surgery/test_fold.py"),),
    ),
    Claim(
        "S4.2-symmetric", "Section 4.2", "decision regions with Square-Softmin are more symmetrical",
        "more than half of the networks have a class on both sides of x = 0", (SignShares(),),
    ),
    Claim(
        "S4.2-shared", "Section 5", "a scale shared by all classes reduces overfitting", "networks that overfit",
        (NotTested("a network whose training accuracy is far above its test accuracy"),), "",
        (Accuracy(SOFTMIN_START, (direction("DeepSquare5s-, shared", "DeepSquare5s-"),)),),
    ),
    *imagenet_rows(),
    Claim(
        "S5-longer", "Section 5", "the modules gain more where training is longer",
        "Square-Softmin after 200 epochs on ImageNet, against the plain network after as many",
        (NotTested(IMAGENET_RUNS),), "",
        (Accuracy(LONGEST, (grows(SP), grows("DeepSquare5s-"))), Accuracy(LONG, (grows(SP),))),
    ),
    Claim(
        "S5-combination", "Section 5", "SP & SEx is better than Square-Pooling and than Square-Excitation",
        "the sign of both differences, on ImageNet", (NotTested(IMAGENET_RUNS),), "+0.19, +0.22",
        (
            Accuracy(
                TINY_RESNET,
                (direction("ResNet10, SP & SEx", "ResNet10, SP"), direction("ResNet10, SP & SEx", "ResNet10, SEx")),
            ),
        ),
    ),
    Claim(
        "S5-competitive", "Table 6", "SP & SEx is competitive with the state of the art in accuracy",
        "networks trained by one recipe; those of Table 6 come from papers with different ones",
        (NotTested(IMAGENET_RUNS),),
    ),
    Claim(
        "T6-parameters", "Table 6", "SP & SEx adds 0% parameters, the others 10 to 130%", "the number of parameters",
        (Parameters("resnet50", _TABLE_6),), "0%, 10–130%",
    ),
    Claim(
        "T6-overhead", "Section 5", "SP & SEx has the smallest overhead in inference time on ResNet50 (fused kernels)",
        "every other method of Table 6 takes longer for one image, in one run", (LeastTime(kernels=True),),
    ),
    Claim(
        "T6-overhead-plain", "Section 5",
        "SP & SEx has the smallest overhead in inference time on ResNet50 (plain PyTorch)",
        "every other method of Table 6 takes longer for one image, in one run", (LeastTime(kernels=False),),
    ),
    Claim(
        "S2-GE", "Section 2", "GE is not lightweight for mobile networks",
        "the interval of the relative time of one image lies above 1.02",
        (Overhead("shufflenet_v2_x1_0", "ge_theta_minus", 1.02, reverse=True),),
    ),
    Claim(
        "S2-GE-exponentials", "Section 2", "GE is slow in mobile networks because of its exponentials",
        "its time with the sigmoid replaced by an operation without exponentials",
        (NotTested("GE with and without its sigmoid in bench models"),),
    ),
    Claim(
        "S2-bilinear", "Section 2", "bilinear pooling and its compact form are not lightweight in parameters",
        "each adds more than 10% to ResNet50",
        (Parameters("resnet50", {"bilinear": None, "compact_bilinear": None}, more_than=10.0),),
    ),
    Claim(
        "S2-bilinear-time", "Section 2", "bilinear pooling is not lightweight in time",
        "the interval of the relative time of one image lies above 1.02",
        (Overhead("resnet50", "bilinear", 1.02, reverse=True),),
    ),
    *(
        Claim(
            f"abstract-cost-{spec}", "Abstract", f"{name} adds negligible inference time to ShuffleNetV2",
            "the interval of the relative time of one image lies below 1.02",
            (Overhead("shufflenet_v2_x1_0", spec, 1.02),),
        )
        for spec, name in (
            ("softmin", "Square-Softmin"),
            ("excitation", "Square-Excitation"),
            ("encoding", "Square-Encoding"),
            ("pooling+excitation", "SP & SEx"),
        )
    ),
)  # fmt: skip
CLAIMS = tuple(replace(claim, headline=claim.key in HEADLINES) for claim in _ALL)
"""Every claim of the paper that can be tested, and those that would need ImageNet."""


def hypotheses_of(regime: str) -> list[Hypothesis]:
    """The hypotheses that are judged in a regime, each once: its family."""
    tests = [test for claim in CLAIMS for test in (*claim.tests, *claim.proxies)]
    accuracies = [test for test in tests if isinstance(test, Accuracy) and test.regime == regime]
    return list(dict.fromkeys(hypothesis for test in accuracies for hypothesis in (*test.hypotheses, *test.given)))


def describe(hypothesis: Hypothesis) -> str:
    """A hypothesis by its rows: ``DeepSquare1``, or ``Variant1 against DeepSquare3``."""
    first, *others = hypothesis.coefficients
    against = [other for other in others if not other.startswith((ORIGINAL, SHUFFLENET)) and SHORT_SUFFIX not in other]
    return " against ".join([first, *against])

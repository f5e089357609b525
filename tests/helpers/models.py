"""What the tests of the surgery share: small inputs, small networks, and the equations in plain torch operations."""

import warnings
from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models as tv

import deepsquare as ds
from deepsquare.surgery import is_spec_key

torch.set_num_threads(1)


def images(batch: int = 2, size: int = 64, seed: int = 0) -> Tensor:
    return torch.randn((batch, 3, size, size), generator=torch.Generator().manual_seed(seed))


def create(name: str, **arguments: Any) -> nn.Module:
    """A model of torchvision, of timm (``timm/NAME``) or of this file, with the same weights at every call."""
    torch.manual_seed(0)
    if name in OWN:
        return OWN[name](**arguments)
    if name.startswith("timm/"):
        model: nn.Module = timm.create_model(name.removeprefix("timm/"), **arguments)
        return model
    if name in ("googlenet", "inception_v3"):
        arguments.setdefault("init_weights", False)
    made: nn.Module = tv.get_model(name, **arguments)
    return made


def equip_quietly(model: nn.Module, spec: str, **arguments: Any) -> nn.Module:
    """``equip`` where the warning about γ = 0 that was reset is expected and not what the test is about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*γ = 0")
        return ds.equip(model, spec, **arguments)


def tuned(model: nn.Module) -> nn.Module:
    """``model`` with every parameter of DeepSquare away from its start, each one elsewhere."""
    with torch.no_grad():
        for i, (name, parameter) in enumerate(model.named_parameters()):
            if "deepsquare_" in name:
                parameter.mul_(0.5 + 0.07 * (i % 9)).add_(torch.linspace(0, 0.3, parameter.numel()).view_as(parameter))
    return model


def own_keys(model: nn.Module) -> set[str]:
    return {key for key in model.state_dict() if "deepsquare_" in key and not is_spec_key(key)}


def same_state(model: nn.Module, state: dict[str, Tensor]) -> bool:
    """Whether keys, their order and values are those of ``state``, bit for bit."""
    now = model.state_dict()
    return list(now) == list(state) and all(torch.equal(now[key], value) for key, value in state.items())


def copied_state(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def attached(model: nn.Module) -> int:
    """How many modules act inside others, and how many hooks there are."""
    inserted = sum(len(m.__dict__.get("deepsquare_inserted", ())) for m in model.modules())
    return inserted + sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The gradients of one training step with a cross-entropy loss."""
    model.train().zero_grad()
    logits = model(x)
    loss = F.cross_entropy(logits, torch.arange(len(x)) % logits.shape[1])
    torch.autograd.backward(loss)
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert not missing, f"no gradient at all: {missing}"
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def dead(gradients: dict[str, Tensor]) -> list[str]:
    """The parameters without a gradient, or with one that is not finite."""
    return [name for name, g in gradients.items() if not g.any() or not torch.isfinite(g).all()]


# The equations, in plain torch operations.


def excited(x: Tensor, alpha: Tensor | float, spatial: tuple[int, ...] = (2, 3)) -> Tensor:
    g = (x**2).mean(spatial, keepdim=True)
    return x * (g / (g + alpha**2))


def square_pooled(x: Tensor) -> Tensor:
    return (x**2).flatten(2).mean(2)


# Forward passes by hand, on a base model whose modules they call one by one.

Inner = dict[str, Tensor]  # DeepSquare's own parameters by key, as leaves of the reference's graph
Forward = Callable[[Any, Tensor, str, Inner], Tensor]


def residual(block: Any, x: Tensor, spec: str, own: Inner, name: str) -> Tensor:
    """torchvision's BasicBlock and Bottleneck."""
    out = F.relu(block.bn1(block.conv1(x)))
    if "encoding" in spec:
        out = out**2
    out, end = block.bn2(block.conv2(out)), "bn2"
    if hasattr(block, "conv3"):
        out, end = block.bn3(block.conv3(F.relu(out))), "bn3"
    if "excitation" in spec:
        out = excited(out, own[f"{name}.{end}.deepsquare_excitation.alpha"])
    shortcut = x if block.downsample is None else block.downsample(x)
    return F.relu(out + shortcut)


def resnet(model: Any, x: Tensor, spec: str, own: Inner) -> Tensor:
    x = F.max_pool2d(F.relu(model.bn1(model.conv1(x))), 3, 2, 1)
    for stage in ("layer1", "layer2", "layer3", "layer4"):
        for i, block in enumerate(getattr(model, stage)):
            x = residual(block, x, spec, own, f"{stage}.{i}")
    logits: Tensor = model.fc(square_pooled(x) if "pooling" in spec else x.mean((2, 3)))
    if "softmin" in spec:
        logits = -((own["fc.deepsquare_softmin.root_scale"] * logits) ** 2)
    return logits


def shuffle_unit(unit: Any, x: Tensor, spec: str, alpha: Tensor | None) -> Tensor:
    """torchvision's InvertedResidual, with its channel shuffle."""
    left, right = x.chunk(2, 1) if unit.stride == 1 else (unit.branch1(x), x)
    conv1, bn1, _, depthwise, bn2, conv2, bn3, _ = unit.branch2
    right = F.relu(bn1(conv1(right)))
    if "encoding" in spec:
        right = right**2
    right = F.relu(bn3(conv2(bn2(depthwise(right)))))
    if alpha is not None:
        right = excited(right, alpha)
    out = torch.cat([left, right], 1)
    n, c, h, w = out.shape
    return out.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def shufflenet(model: Any, x: Tensor, spec: str, own: Inner) -> Tensor:
    x = model.maxpool(model.conv1(x))
    for stage in ("stage2", "stage3", "stage4"):
        for i, unit in enumerate(getattr(model, stage)):
            x = shuffle_unit(unit, x, spec, own.get(f"{stage}.{i}.branch2.7.deepsquare_excitation.alpha"))
    x = model.conv5(x)
    logits: Tensor = model.fc(square_pooled(x) if "pooling" in spec else x.mean((2, 3)))
    return -((own["fc.deepsquare_softmin.root_scale"] * logits) ** 2) if "softmin" in spec else logits


def densenet(model: Any, x: Tensor, spec: str, own: Inner) -> Tensor:
    assert spec == "pooling"
    logits: Tensor = model.classifier(square_pooled(F.relu(model.features(x))))
    return logits


def cifar(model: Any, x: Tensor, spec: str, own: Inner) -> Tensor:
    x = F.relu(model.bn1(model.conv1(x)))
    for name in ("layer1.0", "layer1.1", "layer2.0", "layer2.1"):
        block = model.get_submodule(name)
        branch = block.bn2(block.conv2(F.relu(block.bn1(block.conv1(x)))))
        if "excitation" in spec:
            branch = excited(branch, own[f"{name}.bn2.deepsquare_excitation.alpha"])
        x = F.relu(branch + block.shortcut(x))
    logits: Tensor = model.linear(square_pooled(x) if "pooling" in spec else x.mean((2, 3)))
    return logits


def signal_or_volume(model: Any, x: Tensor, spec: str, own: Inner) -> Tensor:
    for name in ("block1", "block2"):
        block = model.get_submodule(name)
        branch = F.relu(block.bn1(block.conv1(x)))
        branch = block.bn2(block.conv2(branch**2 if "encoding" in spec else branch))
        if "excitation" in spec:
            spatial = tuple(range(2, x.ndim))
            branch = excited(branch, own[f"{name}.bn2.deepsquare_excitation.alpha"], spatial)
        x = F.relu(branch + block.shortcut(x))
    logits: Tensor = model.fc(square_pooled(x) if "pooling" in spec else x.flatten(2).mean(2))
    return logits


# Networks of a user's own.


class Block(nn.Module):
    """A residual block of any rank whose in-place ReLU stands in two places."""

    def __init__(self, channels: int, out: int, stride: int, rank: int = 2) -> None:
        super().__init__()
        conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[rank]
        norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[rank]
        self.conv1 = conv(channels, out, 3, stride, 1, bias=False)
        self.bn1 = norm(out)
        self.conv2 = conv(out, out, 3, 1, 1, bias=False)
        self.bn2 = norm(out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = conv(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.shortcut(x)
        result: Tensor = self.relu(out)
        return result


class FunctionalBlock(Block):
    """The same with functional ReLUs."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        out += self.shortcut(x)
        return F.relu(out)


class CifarResNet(nn.Module):
    """In the style of many CIFAR repositories: functional pooling with a fixed window of 4."""

    def __init__(self, block: type[Block] = FunctionalBlock) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(block(8, 8, 1), block(8, 16, 2))
        self.layer2 = nn.Sequential(block(16, 16, 2), block(16, 32, 2))
        self.linear = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x)))))
        out = F.avg_pool2d(out, 4)
        logits: Tensor = self.linear(out.view(out.size(0), -1))
        return logits


class RankCNN(nn.Module):
    """A residual CNN for signals (rank 1) or volumes (rank 3)."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.block1 = Block(2, 6, 1, rank)
        self.block2 = Block(6, 8, 2, rank)
        self.pool = {1: nn.AdaptiveAvgPool1d, 3: nn.AdaptiveAvgPool3d}[rank](1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.pool(self.block2(self.block1(x))).flatten(1))
        return logits


class Inline(nn.Module):
    """A block written out in the model's own forward; its last γ starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 3)
        nn.init.zeros_(self.bn2.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


OWN: dict[str, Callable[..., nn.Module]] = {
    "cifar": CifarResNet,
    "signal": lambda: RankCNN(1),
    "volume": lambda: RankCNN(3),
    "inline": Inline,
    "vanilla_cnn": ds.vanilla_cnn,
}
SHAPES: dict[str, tuple[int, ...]] = {"cifar": (3, 32, 32), "signal": (2, 40), "volume": (2, 4, 6, 8)}
"""The inputs of those that do not run on the guessed size (``cifar``), or would be slow on it."""

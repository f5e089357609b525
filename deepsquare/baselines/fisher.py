"""The Fisher vector (Perronnin et al., 2010) as a layer, over a mixture of Gaussians fitted by scikit-learn."""

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from deepsquare.baselines.second_order import SecondOrderPooling, in_fp32, signed_root

fx.wrap("normalized_fisher_vector")  # as in :mod:`deepsquare.functional`

Model = TypeVar("Model", bound=nn.Module)
PER_IMAGE = 16  # positions per image that the mixture is fitted to


def fisher_vector(x: Tensor, weights: Tensor, means: Tensor, variances: Tensor) -> Tensor:
    """The gradients of the log-likelihood by the means and by the deviations, Equations (1) and (2).

    They are computed from the sums b_k, M_k and S_k of Equations (3) to (5), which are matrix products. The descriptors
    ``x`` are (B, N, D); of the K components the ``weights``, with sum 1, are (K,), the ``means`` and the diagonals of
    the covariances, ``variances``, (K, D). Returns (B, 2·K·D): first the means' part, then the deviations'.
    """
    precisions = 1 / variances
    linear = 2 * x @ (means * precisions).transpose(0, 1)
    distance = x.square() @ precisions.transpose(0, 1) - linear + (means.square() * precisions).sum(1)
    # γ_t(k), the probability that descriptor x_t comes from component k: (B, K, N)
    gamma = (weights.log() - 0.5 * (distance + variances.log().sum(1))).softmax(-1).transpose(1, 2)
    b = gamma.sum(2, keepdim=True)
    m = gamma @ x  # (B, K, D)
    s = gamma @ x.square()
    first = (m - means * b) / variances.sqrt()
    second = (s - 2 * means * m + (means.square() - variances) * b) / variances
    positions, weights = x.shape[1], weights[:, None]
    parts = (first / (positions * weights.sqrt()), second / (positions * (2 * weights).sqrt()))
    return torch.cat([part.flatten(1) for part in parts], 1)


@in_fp32
def normalized_fisher_vector(x: Tensor, weights: Tensor, means: Tensor, variances: Tensor) -> Tensor:
    """:func:`fisher_vector` of a map's positions, with signed square root and L2 normalization: (B, 2·K·D)."""
    # In float64, as the sums of squares cancel; a small weight of a component underflows in half precision.
    weights, variances = (values.double().clamp(min=1e-10) for values in (weights, variances))
    vector = fisher_vector(x.flatten(2).transpose(1, 2).double(), weights, means.double(), variances)
    return F.normalize(signed_root(vector)).to(x.dtype)


class FisherVector(SecondOrderPooling):
    """The Fisher vector of the map's positions, with signed square root and L2 normalization.

    The channels are reduced to ``size``, which gives 2·components·size values. The mixture is a buffer, not a
    parameter: it is fitted once, by :func:`fit_fisher`.
    """

    weights: Tensor
    means: Tensor
    variances: Tensor

    def __init__(self, channels: int, components: int = 16, size: int = 64) -> None:
        if size > channels:
            raise ValueError(f"size is {size}; expected at most the map's {channels} channels, which are reduced to it")
        super().__init__(nn.Conv2d(channels, size, 1), 2 * components * size)
        self.register_buffer("weights", torch.full((components,), 1 / components))
        self.register_buffer("means", torch.zeros(components, size))
        self.register_buffer("variances", torch.ones(components, size))
        self.fitted = False

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, out_channels, 1, 1)."""
        if self.training and not self.fitted and not x.is_meta:
            raise RuntimeError(
                "the mixture of this Fisher vector is not fitted yet; before training call "
                "deepsquare.baselines.fit_fisher(model, loader)"
            )
        return super().forward(x)

    def values(self, x: Tensor) -> Tensor:
        return normalized_fisher_vector(x, self.weights, self.means, self.variances)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        means = state_dict.get(f"{prefix}means")
        self.fitted |= means is not None and not means.is_meta and bool(means.any())


def fit_fisher(model: Model, loader: Iterable[Any], *, descriptors: int = 50_000, seed: int = 0) -> Model:
    """Fit the mixture of the model's :class:`FisherVector` to the features of ``loader``, in place.

    The reduction is set to the principal components of the features, and the mixture is fitted to its output.

    Args:
        model: equipped with ``fisher``.
        loader: batches of images, or tuples whose first element is such a batch.
        descriptors: maximum number of positions, 16 per image; reading stops when they are reached.
        seed: of the choice of positions and of the fit.
    """
    layers = [module for module in model.modules() if isinstance(module, FisherVector)]
    if len(layers) != 1:
        raise ValueError(f"the model has {len(layers)} Fisher vectors; expected 1: equip(model, 'fisher')")
    (layer,) = layers
    features = _features(model, layer, loader, descriptors, seed)
    components, size = layer.means.shape
    minimum = max(components, size)
    if len(features) < minimum:
        raise ValueError(f"the loader gave {len(features)} positions; expected at least {minimum}, better many more")
    try:
        from sklearn.decomposition import PCA
        from sklearn.mixture import GaussianMixture
    except ImportError as error:
        raise ImportError("fit_fisher needs scikit-learn: pip install 'deepsquare[fisher]'") from error
    pca = PCA(size, random_state=seed).fit(features)
    reduced = pca.transform(features)
    mixture = GaussianMixture(components, covariance_type="diag", random_state=seed).fit(reduced)
    state = {
        "reduce.weight": pca.components_[..., None, None],
        "reduce.bias": -pca.components_ @ pca.mean_,
        "weights": mixture.weights_,
        "means": mixture.means_,
        "variances": mixture.covariances_,
    }
    layer.load_state_dict({key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in state.items()})
    layer.fitted = True
    return model


def _features(
    model: nn.Module, layer: FisherVector, loader: Iterable[Any], descriptors: int, seed: int
) -> np.ndarray[Any, Any]:
    """Input features of the layer at random positions: (at most ``descriptors``, C)."""
    chunks: list[Tensor] = []
    generator = torch.Generator().manual_seed(seed)
    anchor = next(model.parameters())

    def collect(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        maps = inputs[0].detach().flatten(2)
        chosen = torch.randperm(maps.shape[2], generator=generator)[:PER_IMAGE]
        chunks.append(maps[:, :, chosen.to(maps.device)].float().mT.flatten(0, 1).cpu())

    training = {module: module.training for module in model.modules()}
    handle = layer.register_forward_pre_hook(collect)
    try:
        model.eval()
        with torch.no_grad():
            for batch in loader:
                images = batch[0] if isinstance(batch, (tuple, list)) else batch
                if not isinstance(images, Tensor) or images.ndim != 4:
                    received = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
                    raise TypeError(
                        f"the loader gave {received}; expected images (N, C, H, W), or a tuple that starts with them"
                    )
                model(images.to(anchor.device, anchor.dtype))
                if sum(map(len, chunks)) >= descriptors:
                    break
    finally:
        handle.remove()
        for module, before in training.items():
            module.training = before
    if not chunks:
        raise ValueError("the loader is empty; expected batches of images")
    features = torch.cat(chunks)[:descriptors]
    if not bool(features.isfinite().all()):
        raise ValueError("the features are not finite; has the model diverged?")
    if not bool(features.var(0).any()):
        raise ValueError("the features are the same at every position; expected images that differ")
    values: np.ndarray[Any, Any] = features.numpy()
    return values

"""Batches in memory: every image once, and the augmentation against torch's own operations."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deepsquare.data.in_memory import CIFAR10_PREPROCESSING, InMemoryBatches, LabeledImages, eval_batches
from deepsquare.preprocessing import CIFAR10_MEAN, CIFAR10_STD


def images(count: int, size: int = 8, seed: int = 0) -> LabeledImages:
    rng = np.random.default_rng(seed)
    pixels = torch.from_numpy(rng.integers(0, 256, (count, 3, size, size), dtype=np.uint8))
    return LabeledImages(pixels, torch.arange(count))  # the label identifies the image


def normalized(pixels: Tensor) -> Tensor:
    """By the definition, one channel after the other."""
    channels = [
        (pixels[:, c].double() / 255 - mean) / std
        for c, (mean, std) in enumerate(zip(CIFAR10_MEAN, CIFAR10_STD, strict=True))
    ]
    return torch.stack(channels, 1)


@pytest.mark.parametrize("pad", [0, 1, 3])
@pytest.mark.parametrize("flip", [False, True])
def test_every_image_is_a_crop_of_its_reflected_self(pad: int, flip: bool) -> None:
    data = images(24)
    padded = F.pad(data.images.float(), (pad,) * 4, mode="reflect").to(torch.uint8)
    shifts, flips = set(), set()
    for batch, labels in InMemoryBatches(data, 8, pad=pad, flip=flip, seed=1).epoch(0):
        assert batch.shape == (8, 3, 8, 8)
        assert batch.is_contiguous(memory_format=torch.channels_last)
        for image, label in zip(batch, labels.tolist(), strict=True):
            positions = [(y, x, m) for y in range(2 * pad + 1) for x in range(2 * pad + 1) for m in (False, True)]
            close = []
            for y, x, mirrored in positions:
                crop = padded[label, :, y : y + 8, x : x + 8]
                expected = normalized((crop.flip(-1) if mirrored else crop)[None])[0].float()
                if torch.allclose(expected, image, atol=1e-5):
                    close.append((y, x, mirrored))
            assert len(close) == 1
            shifts.add(close[0][:2])
            flips.add(close[0][2])
    assert flips == ({False, True} if flip else {False})
    assert len(shifts) > (10 if pad == 3 else 3 if pad else 0)


def test_an_epoch_takes_every_image_once_and_depends_on_seed_and_number_alone() -> None:
    data = images(40)

    def labels(seed: int, number: int, start: int = 0) -> list[int]:
        return torch.cat([y for _, y in InMemoryBatches(data, 10, seed=seed).epoch(number, start)]).tolist()

    assert sorted(labels(0, 0)) == list(range(40))
    assert labels(0, 0) == labels(0, 0)
    assert labels(0, 0) != labels(0, 1)
    assert labels(0, 0) != labels(1, 0)
    assert labels(0, 0, start=3) == labels(0, 0)[30:]
    rest = [list(InMemoryBatches(data, 10, seed=0).epoch(5, start))[-1][0] for start in (0, 3)]
    assert torch.equal(*rest)
    assert len(InMemoryBatches(data, 16)) == 2  # the last, smaller batch is left out
    assert len(list(InMemoryBatches(data, 16).epoch(0))) == 2


def test_eval_batches_are_the_images_in_order() -> None:
    data = images(25)
    parts = list(eval_batches(data, 10))
    assert [len(labels) for _, labels in parts] == [10, 10, 5]
    torch.testing.assert_close(torch.cat([x for x, _ in parts]), normalized(data.images).float())
    assert torch.cat([labels for _, labels in parts]).tolist() == list(range(25))


def test_split_is_disjoint_and_complete() -> None:
    first, second = images(30).split(7)
    assert len(second) == 7
    assert sorted(first.labels.tolist() + second.labels.tolist()) == list(range(30))
    assert torch.equal(second.images[0], images(30).images[second.labels[0]])
    assert torch.equal(images(30).split(7)[1].labels, second.labels)


def test_bad_input() -> None:
    data = images(4)
    with pytest.raises(ValueError, match=r"images are \(4, 3, 8, 8\) torch.float32; expected \(N, 3, H, W\)"):
        LabeledImages(data.images.float(), data.labels)
    with pytest.raises(ValueError, match=r"labels are \(3,\) torch.int64; expected \(4,\)"):
        LabeledImages(data.images, data.labels[:3])
    with pytest.raises(ValueError, match="batch_size is 5; expected between 1 and the 4 images"):
        InMemoryBatches(data, 5)
    with pytest.raises(ValueError, match="pad is 8; a reflected border needs 0 ≤ pad < 8"):
        InMemoryBatches(data, 2, pad=8)
    with pytest.raises(ValueError, match="held_out is 4; expected between 1 and 3"):
        data.split(4)


def test_rows_of_pixels_are_normalized_to_the_same_bits() -> None:
    pixels = torch.randint(0, 256, (2, 5, 7, 4), dtype=torch.uint8)[..., :3]  # as gathered: with padding
    expected = CIFAR10_PREPROCESSING.normalize(pixels.permute(0, 3, 1, 2))
    assert torch.equal(CIFAR10_PREPROCESSING.normalize(pixels, channel_dim=-1).permute(0, 3, 1, 2), expected)

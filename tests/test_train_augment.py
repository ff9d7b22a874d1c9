"""Augmentations by the batch: the statistics of torchvision's by the image, and its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from hpo import Run
from hpo.errors import InputError
from hpo.train import (
    AdamW,
    AlternatingFlip,
    ColorJitter,
    Cutout,
    RandAugment,
    RandomCrop,
    RandomFlip,
    Recipe,
    tensors,
)
from hpo.train.augment import coins, cut_gather, cut_rows, jittered
from hpo.train.loop import Trainer
from hpo.train.randaugment import OPERATIONS, operate


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def picture(n: int, channels: int = 3, size: int = 32, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (n, channels, size, size), dtype=torch.uint8,
                         generator=seeded(seed))


def counted(images: Tensor) -> np.ndarray:
    """Return how often each (row offset, column offset, flipped) stands in crops of one image.

    The image's pixels are numbers of their own, so that the corner tells where it was cut.
    """
    # Pixel (i, j) is 8 i + j + 1 in an 8 x 8 image; the padding of 2 is 0.
    whole = pad(torch.arange(1, 65, dtype=torch.uint8).view(8, 8), (2, 2, 2, 2))
    windows = torch.stack([window.flip(-1) if flipped else window for i in range(5)
                           for j in range(5) for flipped in (False, True)
                           for window in [whole[i:i + 8, j:j + 8]]]).flatten(1)
    found = (images.view(len(images), 1, 64) == windows).all(-1)
    assert bool((found.sum(1) == 1).all())
    return found.sum(0).numpy()


def test_crops_and_flips_have_the_statistics_of_torchvision_s():
    """50 outcomes, all alike in both: a chi-squared of 49 degrees exceeds 85 once in 1,000."""
    n = 10_000
    image = torch.arange(1, 65, dtype=torch.uint8).view(1, 1, 8, 8)
    generator = seeded(3)
    ours = counted(RandomFlip()(RandomCrop(2)(image.expand(n, 1, 8, 8), generator), generator))
    torch.manual_seed(4)
    per_image = v2.Compose([v2.RandomCrop(8, padding=2), v2.RandomHorizontalFlip()])
    theirs = counted(torch.stack([per_image(image[0]) for _ in range(n)]))
    for counts in (ours, theirs):
        assert ((counts - n / 50) ** 2 / (n / 50)).sum() < 85
    assert ((ours - theirs) ** 2 / (ours + theirs)).sum() < 85


@pytest.mark.parametrize("shape", [(64, 3, 32, 32), (5, 1, 7, 9), (1, 2, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_both_ways_to_cut_give_the_windows_of_a_loop_over_the_images(shape, dtype):
    images = torch.randint(0, 256, shape, generator=seeded()).to(dtype)
    border, (n, _, height, width) = 3, shape
    top, left = torch.randint(0, 2 * border + 1, (2, n), generator=seeded(1))
    padded = pad(images, (border,) * 4)
    expected = torch.stack([padded[k, :, i:i + height, j:j + width] for k, (i, j) in enumerate(
        zip(top.tolist(), left.tolist(), strict=True))])
    for cut in (cut_gather, cut_rows):
        assert torch.equal(cut(padded, top, left, height, width), expected)


@pytest.mark.parametrize("shape", [(64, 3, 32, 32), (50, 1, 7, 4), (8, 2, 4, 4)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_mirrored_border_is_torchvision_s_and_a_crop_draws_as_with_a_black_one(shape, dtype):
    images = torch.randint(1, 256, shape, generator=seeded()).to(dtype)
    n, _, height, width = shape
    top, left = torch.randint(0, 7, (2, n), generator=seeded(1))
    padded = tv.pad(images, [3, 3, 3, 3], padding_mode="reflect")
    expected = torch.stack([padded[k, :, i:i + height, j:j + width] for k, (i, j) in enumerate(
        zip(top.tolist(), left.tolist(), strict=True))])
    cut = RandomCrop(3, fill="reflect")(images, seeded(1))
    black = RandomCrop(3)(images, seeded(1))
    assert torch.equal(cut, expected) and cut.dtype == dtype
    assert torch.equal(torch.where(black == 0, 0, cut), black) and bool((black == 0).any())


def test_an_alternating_flip_shows_each_image_both_ways_in_two_epochs():
    images, rows = picture(2_000, 1, 4), torch.randperm(2_000, generator=seeded(5))
    first, second = (AlternatingFlip().of_rows(images, rows, epoch, 7) for epoch in (0, 1))
    turned = (first == images.flip(-1)).flatten(1).all(1)
    assert torch.equal(torch.where(turned.view(-1, 1, 1, 1), images.flip(-1), images), first)
    assert torch.equal(first.flip(-1), second)
    assert torch.equal(AlternatingFlip().of_rows(images, rows, 2, 7), first)
    # Half of 2,000 has a deviation of 22.
    assert 890 < int(turned.sum()) < 1_110


def test_the_coins_of_rows_are_fair_and_those_of_two_seeds_are_strangers():
    """The mixer itself is that of SplitMix64, computed here with Python's whole numbers."""
    rows = torch.arange(20_000)
    one, other = coins(rows, 3), coins(rows, 4)
    assert 9_700 < int(one.sum()) < 10_300
    assert 9_700 < int((one == other).sum()) < 10_300
    assert 9_700 < int((one[1:] == one[:-1]).sum()) < 10_300
    for row in (0, 1, 12_345):
        mixed = ((row + 1) * 0x9E3779B97F4A7C15 + 3 * 0xD1B54A32D192ED03) % 2**64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        assert int(one[row]) == (mixed ^ mixed >> 31) & 1


def test_a_trial_flips_each_of_its_rows_in_every_other_epoch():
    """Of all rows, found again by their first pixels; the order of rows is another each epoch."""
    x = torch.zeros(40, 1, 2, 2, dtype=torch.uint8)
    x[:, 0, 0, 0], x[:, 0, 0, 1], x[:, 0, 1] = torch.arange(40), 100, 7
    y = torch.arange(40) % 2
    seen: list[dict[int, bool]] = []

    class Looking(nn.Linear):
        """Notes what it is given to train on."""

        def forward(self, input: Tensor) -> Tensor:
            if self.training:
                for left, right in input[:, 0, 0].mul(255).round().int().tolist():
                    seen[-1][min(left, right)] = left == 100
            return super().forward(input.flatten(1))

    recipe = Recipe(data=tensors(x, y, val=(x, y), normalise=False), model=lambda: Looking(4, 2),
                    optimizer=AdamW(), batch_size=16, augment=(AlternatingFlip(),))
    epochs = Trainer(recipe, Run(epochs=4, seed=1, device="cpu", dir=Path("."))).epochs()
    for _ in range(4):
        seen.append({})
        next(epochs)
    assert all(len(turned) == 40 for turned in seen)
    assert seen[0] == seen[2] and seen[1] == seen[3]
    assert all(seen[0][row] != seen[1][row] for row in range(40))
    assert 8 < sum(seen[0].values()) < 32


@pytest.mark.parametrize("size", [1, 4, 5, 40])
def test_cutout_paints_one_black_square_a_picture_with_its_middle_anywhere(size):
    n, side = 3_000, 10
    holes = Cutout(size)(torch.full((n, 3, side, side), 9, dtype=torch.uint8), seeded()) == 0
    assert torch.equal(holes[:, 0], holes[:, 1]) and torch.equal(holes[:, 0], holes[:, 2])
    found: dict[tuple[int, ...], int] = {}
    for hole in holes[:, 0]:
        rows, columns = hole.any(1).nonzero().view(-1), hole.any(0).nonzero().view(-1)
        assert int(hole.sum()) == len(rows) * len(columns)
        box = int(rows[0]), int(rows[-1]), int(columns[0]), int(columns[-1])
        found[box] = found.get(box, 0) + 1
    edges = [(max(0, k - size // 2), min(side, k - size // 2 + size) - 1) for k in range(side)]
    expected = [(*one, *other) for one in edges for other in edges]
    assert set(found) <= set(expected)
    # How many of the 100 middles give this box; its count has a deviation of its root.
    for box in set(expected):
        mean = n * expected.count(box) / 100
        assert abs(found.get(box, 0) - mean) < 5.5 * mean ** 0.5


@pytest.mark.parametrize("channels", [1, 3])
def test_the_colours_of_each_image_are_those_of_torchvision_with_its_own_factors(channels):
    images = picture(12, channels, 8)
    brightness, contrast, saturation = torch.rand(3, 12, generator=seeded(2)) * 1.6 + 0.2
    got = jittered(images, *(one.view(-1, 1, 1, 1) for one in (brightness, contrast, saturation)))
    assert got.dtype == torch.uint8
    for k in range(12):
        one = tv.adjust_brightness(images[k].double() / 255, float(brightness[k]))
        one = tv.adjust_contrast(one, float(contrast[k]))
        one = tv.adjust_saturation(one, float(saturation[k])) if channels == 3 else one
        assert float((got[k].double() - one * 255).abs().max()) < 0.51


def test_a_jitter_of_nothing_changes_nothing_and_factors_are_drawn_for_each_image():
    images = picture(50, 3, 6)
    assert torch.equal(ColorJitter()(images, seeded()), images)
    grey = torch.full((4_000, 3, 2, 2), 100, dtype=torch.uint8)
    factors = ColorJitter(brightness=0.4)(grey, seeded())[:, 0, 0, 0].double() / 100
    assert 0.6 <= float(factors.min()) < 0.61 and 1.39 < float(factors.max()) <= 1.4
    # Even draws: their deviation is 0.8 / sqrt(12).
    assert float(factors.mean()) == pytest.approx(1.0, abs=0.015)
    assert float(factors.std()) == pytest.approx(0.231, abs=0.01)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("channels", [1, 3])
def test_each_operation_of_randaugment_is_torchvision_s_at_every_strength(name, channels):
    images = picture(4, channels, 32)
    theirs: Any = v2.RandAugment()
    strengths, signed = theirs._AUGMENTATION_SPACE[name]
    scale = strengths(31, 32, 32)
    for magnitude in range(0, 31, 3):
        value = 0.0 if scale is None else float(scale[magnitude])
        for sign in (1.0, -1.0):
            expected = torch.stack([theirs._apply_image_or_video_transform(
                image, name, sign * value if signed else value, theirs.interpolation, theirs._fill)
                for image in images])
            assert torch.equal(operate(name, images, magnitude, sign), expected)


def test_randaugment_draws_one_of_all_operations_and_signs_for_each_image():
    assert list(OPERATIONS) == list(v2.RandAugment._AUGMENTATION_SPACE)
    image, n = picture(1, 3, 12), 2_800
    got = RandAugment(n_ops=1, magnitude=20)(image.expand(n, 3, 12, 12), seeded())
    known = {}
    for name in OPERATIONS:
        for sign in (1.0, -1.0):
            outcome = operate(name, image, 20, sign).numpy().tobytes()
            known[outcome] = known.get(outcome, 0) + 1
    counts: dict[bytes, int] = {}
    for one in got:
        key = one[None].contiguous().numpy().tobytes()
        counts[key] = counts.get(key, 0) + 1
    assert set(counts) == set(known)
    for key, ways in known.items():
        mean = n * ways / 28
        assert abs(counts[key] - mean) < 5 * mean ** 0.5


@pytest.mark.parametrize("augment", [
    RandomCrop(1), RandomCrop(2, fill="reflect"), RandomFlip(), Cutout(2), RandAugment(2, 15),
    ColorJitter(0.4, 0.4, 0.4)],
    ids=lambda one: type(one).__name__)
def test_an_augmentation_repeats_by_its_generator_and_leaves_its_input(augment):
    images = picture(30, 3, 8)
    before = images.clone()
    first, again, other = (augment(images, seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(images, before) and first.dtype == images.dtype
    assert first.shape == images.shape


WRONG: Any = "big"


@pytest.mark.parametrize("make,told", [
    (lambda: Cutout(size=0), "Cutout.size"), (lambda: Cutout(size=WRONG), "Cutout.size"),
    (lambda: ColorJitter(brightness=-0.1), "ColorJitter.brightness"),
    (lambda: ColorJitter(saturation=WRONG), "ColorJitter.saturation"),
    (lambda: RandomCrop(fill="mirror"), "RandomCrop.fill: must be one of black, reflect, got"),
    (lambda: RandomCrop(4, fill="reflect")(picture(2, 1, 4), seeded()),
     "RandomCrop.padding: images of 4x4 can be mirrored by less than their sides, got 4"),
    (lambda: RandAugment(n_ops=0), "RandAugment.n_ops"),
    (lambda: RandAugment(magnitude=31), "RandAugment.magnitude: must be at most 30"),
    (lambda: RandAugment()(torch.zeros(2, 3, 4, 4), seeded()), "uint8"),
    (lambda: RandAugment()(picture(2, 2, 4), seeded()), "[2, 4, 4]"),
    (lambda: AlternatingFlip()(picture(2), seeded()), "RandomFlip()"),
])
def test_a_fault_of_an_augmentation_is_one_line_that_names_it(make, told):
    with pytest.raises(InputError) as caught:
        make()
    assert told in str(caught.value) and "\n" not in str(caught.value)

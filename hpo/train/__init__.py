"""What a recipe is made of: data, models, optimizers, schedules, augmentation.

Loads no torch: a study's module is read in an instant, and torch when a trial starts.
"""

from hpo.train.augment import AlternatingFlip, ColorJitter, Cutout, RandomCrop, RandomFlip
from hpo.train.losses import CrossEntropy
from hpo.train.models import MLP, SimpleCNN
from hpo.train.optim import SGD, AdamW
from hpo.train.randaugment import RandAugment
from hpo.train.recipe import Recipe
from hpo.train.regularize import EMA, CutMix, EarlyStopping, MixUp
from hpo.train.schedules import Constant, OneCycle, WarmupCosine
from hpo.train.sources import (
    cifar10,
    datasets,
    digits,
    fashion_mnist,
    image_folder,
    tensors,
)

__all__ = [
    "EMA", "MLP", "SGD", "AdamW", "AlternatingFlip", "ColorJitter", "Constant", "CrossEntropy",
    "CutMix", "Cutout", "EarlyStopping", "MixUp", "OneCycle", "RandAugment", "RandomCrop",
    "RandomFlip", "Recipe", "SimpleCNN", "WarmupCosine", "cifar10", "datasets", "digits",
    "fashion_mnist", "image_folder", "tensors",
]

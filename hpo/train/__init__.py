"""What a recipe is made of: data, models, optimizers, schedules, augmentation.

Loads no torch: a study's module is read in an instant, and torch when a trial starts.
"""

from hpo.train.augment import AlternatingFlip, ColorJitter, Cutout, RandomCrop, RandomFlip
from hpo.train.inits import initialise
from hpo.train.losses import CrossEntropy
from hpo.train.models import MLP, CifarResNet18, ResNet9, SimpleCNN, SpeedNet, ViT
from hpo.train.named_models import TimmModel, TorchvisionModel, model
from hpo.train.optim import (
    LAMB,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    Muon,
    RMSprop,
    optimizer,
)
from hpo.train.randaugment import RandAugment
from hpo.train.recipe import Recipe
from hpo.train.regularize import EMA, CutMix, EarlyStopping, MixUp
from hpo.train.schedules import (
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    Linear,
    MultiStep,
    OneCycle,
    Plateau,
    Step,
    WarmupCosine,
    schedule,
)
from hpo.train.sources import (
    cifar10,
    datasets,
    digits,
    fashion_mnist,
    image_folder,
    tensors,
)

__all__ = [
    "EMA", "LAMB", "MLP", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "AlternatingFlip",
    "CifarResNet18", "ColorJitter", "Constant", "Cosine", "CosineRestarts", "CrossEntropy",
    "CutMix", "Cutout", "EarlyStopping", "Exponential", "Linear", "MixUp", "MultiStep", "Muon",
    "OneCycle", "Plateau", "RMSprop", "RandAugment", "RandomCrop", "RandomFlip", "Recipe",
    "ResNet9", "SimpleCNN", "SpeedNet", "Step", "TimmModel", "TorchvisionModel", "ViT",
    "WarmupCosine", "cifar10", "datasets", "digits", "fashion_mnist", "image_folder",
    "initialise", "model", "optimizer", "schedule", "tensors",
]

"""The data sets a recipe can name: plain values now, arrays when a trial starts.

A value says what to read and where; nothing is read, decoded or downloaded before it is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hpo.errors import DataError, InputError
from hpo.train.checks import number, whole

if TYPE_CHECKING:
    from hpo.spec import Run
    from hpo.train.arrays import Arrays


class Source(Protocol):
    """What the loop asks of a data set's description."""

    @property
    def name(self) -> str:
        """The name that messages use."""
        ...

    @property
    def val_fraction(self) -> float:
        """The part of the training rows that validates."""
        ...

    def open(self) -> Arrays | Datasets:
        """Return the data, read from its files or its cache."""
        ...


@dataclass(frozen=True)
class Digits:
    """scikit-learn's 1,797 grey 8x8 digits, with a fixed stratified test split of a fifth."""

    name: str = "digits"
    val_fraction: float = 0.2

    def open(self) -> Arrays:
        """Return the arrays."""
        from hpo.train.published import digits_arrays

        return digits_arrays()


@dataclass(frozen=True)
class Cifar10:
    """torchvision's CIFAR-10, in or downloaded into `folder` (None: the user's cache folder)."""

    folder: Path | None = None
    name: str = "cifar10"
    val_fraction: float = 0.1

    def open(self) -> Arrays:
        """Return the arrays."""
        from hpo.train.published import cifar10_arrays

        return cifar10_arrays(self.folder)


@dataclass(frozen=True)
class FashionMnist:
    """Fashion-MNIST, in or downloaded into `folder` (None: the user's cache folder)."""

    folder: Path | None = None
    name: str = "fashion_mnist"
    val_fraction: float = 0.1

    def open(self) -> Arrays:
        """Return the arrays."""
        from hpo.train.published import fashion_arrays

        return fashion_arrays(self.folder)


@dataclass(frozen=True)
class ImageFolder:
    """Images in a folder for each class, all brought to one size and mode."""

    folder: Path
    size: int = 32
    mode: str = "RGB"
    name: str = "image_folder"
    val_fraction: float = 0.1

    def __post_init__(self) -> None:
        whole("image_folder size", self.size, low=1)
        if self.mode not in ("RGB", "L"):
            raise InputError(f"image_folder mode: must be 'RGB' or 'L', got {self.mode!r}")

    def open(self) -> Arrays:
        """Return the arrays."""
        from hpo.train.images import folder_arrays

        return folder_arrays(self.folder, self.size, self.mode)


@dataclass(frozen=True, eq=False)
class Tensors:
    """A data set the user holds in memory."""

    x: Any
    y: Any
    val: tuple[Any, Any] | None = None
    test: tuple[Any, Any] | None = None
    n_classes: int | None = None
    normalise: bool | None = None
    name: str = "tensors"
    val_fraction: float = 0.1

    def open(self) -> Arrays:
        """Return the arrays, checked."""
        from hpo.train.given import given_arrays

        return given_arrays(self)

    def describe(self) -> dict[str, Any]:
        """Return what identifies it in a recipe's description."""
        return {"type": "Tensors", "name": self.name, "shape": list(getattr(self.x, "shape", []))}


@dataclass(frozen=True, eq=False)
class Datasets:
    """A user's own torch datasets, read through a DataLoader."""

    train: Any
    val: Any = None
    test: Any = None
    n_classes: int | None = None
    name: str = "datasets"
    val_fraction: float = 0.1

    def open(self) -> Datasets:
        """Return itself: rows are read by the loader's workers, as the loop asks for them."""
        return self

    def describe(self) -> dict[str, Any]:
        """Return what identifies it in a recipe's description."""
        return {"type": "Datasets", "name": self.name, "dataset": type(self.train).__name__}


def digits(run: Run) -> Digits:
    """Return scikit-learn's digits: 8x8 grey images, nothing to download."""
    return Digits()


def cifar10(run: Run) -> Cifar10 | ImageFolder:
    """Return CIFAR-10: the image folder in --data-dir if it is one, else torchvision's."""
    if run.data_dir is not None and (Path(run.data_dir) / "train").is_dir():
        return ImageFolder(Path(run.data_dir), size=32, name="cifar10")
    return Cifar10(Path(run.data_dir) if run.data_dir is not None else None)


def fashion_mnist(run: Run) -> FashionMnist:
    """Return Fashion-MNIST: its idx files (also .gz) in --data-dir, else torchvision's."""
    return FashionMnist(Path(run.data_dir) if run.data_dir is not None else None)


def image_folder(run: Run, size: int = 32, mode: str = "RGB") -> ImageFolder:
    """Return the images in --data-dir: `train/<class>/` and `test/<class>/`, or `<class>/` alone.

    Without a test folder a fixed stratified fifth is the test split. Each image is cut to a square
    about its middle and scaled to `size`. Transparent parts become white. 16-bit grey is scaled to
    8 bits by its full range.

    Raises:
        DataError: without a data folder.
    """
    if run.data_dir is None:
        raise DataError("image_folder: no folder given; say where the images are with "
                        "--data-dir DIR (train/<class>/ and test/<class>/, or <class>/ alone)")
    return ImageFolder(Path(run.data_dir), size=size, mode=mode)


def tensors(x: Any, y: Any, *, val: Sequence[Any] | None = None, test: Sequence[Any] | None = None,
            n_classes: int | None = None, val_fraction: float = 0.1,
            normalise: bool | None = None, name: str = "tensors") -> Tensors:
    """Return a data set held in memory: torch tensors, numpy arrays or lists.

    `val` and `test` are pairs (x, y); without `val` a stratified `val_fraction` of the rows is
    taken. `normalise` None normalises uint8 inputs and leaves floats as they are.

    Shapes: x [n, ...] (images [n, channels, height, width]), y [n] whole numbers from 0.
    """
    _check_fraction(val_fraction)
    return Tensors(x, y, _pair("val", val), _pair("test", test), n_classes, normalise, name,
                   val_fraction)


def datasets(train: Any, test: Any = None, *, val: Any = None, n_classes: int | None = None,
             val_fraction: float = 0.1, name: str = "datasets") -> Datasets:
    """Return a data set read through a DataLoader: torch datasets of (input, label) items.

    Without `val` a `val_fraction` of the training rows is taken, by class where the dataset
    tells its labels (`targets`, `labels` or a TensorDataset), else evenly at random. `n_classes`
    is needed where it does not. Inputs are used as they come, uint8 ones divided by 255.
    """
    _check_fraction(val_fraction)
    for part, given in (("train", train), ("test", test), ("val", val)):
        missing = given is None and part != "train"
        if not missing and not (hasattr(given, "__len__") and hasattr(given, "__getitem__")):
            raise InputError(f"datasets {part}: must be a torch dataset with a length and items, "
                             f"got {type(given).__name__}")
    return Datasets(train, val, test, n_classes, name, val_fraction)


def _check_fraction(value: float) -> None:
    number("val_fraction", value, low=0.0, high=1.0, open_low=True, open_high=True)


def _pair(part: str, given: Sequence[Any] | None) -> tuple[Any, Any] | None:
    if given is None:
        return None
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise InputError(f"tensors {part}: must be a pair (x, y), got {type(given).__name__}")
    return given[0], given[1]

"""The published data sets: scikit-learn's digits, CIFAR-10 and Fashion-MNIST.

Each is read with its own library once and then from hpo's cache, so that a worker need not import
scikit-learn or torchvision (2 to 6 s) to start.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.metadata
import io
import logging
import pickle
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpo.errors import DataError
from hpo.train.arrays import Arrays, cache_folder, cached, fingerprint
from hpo.train.split import TEST_FRACTION, TEST_SEED, stratified

LOG = logging.getLogger("hpo.train")

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship",
                   "truck")
FASHION_CLASSES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt",
                   "Sneaker", "Bag", "Ankle boot")
# Where Debian's package dataset-fashion-mnist puts the four files.
DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")
# torchvision sets no timeout: on a network that swallows packets it would wait without end.
DOWNLOAD_TIMEOUT_S = 30.0


def digits_arrays() -> Arrays:
    """Return scikit-learn's digits, from the cache where there can be one."""
    version = importlib.metadata.version("scikit-learn")
    try:
        return cached("digits", f"digits|{version}|{TEST_SEED}|{TEST_FRACTION}", _write_digits)
    except DataError:
        # They are small: a read-only home folder is no reason to refuse them.
        x, y, test_x, test_y = _split_digits()
        mark = fingerprint(x, y, test_x, test_y)
        return Arrays(x, y, 10, mark, tuple("0123456789"), test_x=test_x, test_y=test_y)


def _split_digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = images.astype(np.uint8).reshape(-1, 1, 8, 8)
    y = labels.astype(np.int64)
    stay, out = stratified(y, TEST_FRACTION, TEST_SEED)
    return x[stay], y[stay], x[out], y[out]


def _write_digits(folder: Path) -> tuple[str, ...]:
    save(folder, *_split_digits())
    return tuple("0123456789")


def save(folder: Path, x: np.ndarray, y: np.ndarray, test_x: np.ndarray | None = None,
         test_y: np.ndarray | None = None) -> None:
    """Write arrays under the names that the cache reads."""
    for part, array in (("x", x), ("y", y), ("test_x", test_x), ("test_y", test_y)):
        if array is not None:
            np.save(folder / f"{part}.npy", array)


def _stamp(paths: Sequence[Path]) -> str:
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return repr(facts)


@contextlib.contextmanager
def _fetching(name: str, folder: Path) -> Iterator[None]:
    """Turn whatever a download raises into one line that says how to go on."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT_S)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, RuntimeError, EOFError) as error:
        raise DataError(
            f"{name}: not found in {folder} and could not be downloaded there "
            f"({type(error).__name__}: {error}); give a folder that holds it with --data-dir DIR, "
            f"or try `hpo run --study digits`, which needs no download") from error
    finally:
        socket.setdefaulttimeout(before)




def cifar10_arrays(given: Path | None) -> Arrays:
    """Return CIFAR-10 from torchvision's files, downloaded by torchvision if there are none.

    Raises:
        DataError: if the files are neither there nor to be had, or cannot be read.
    """
    root = given if given is not None else cache_folder() / "cifar10"
    paths = _cifar10_paths(root)
    if not paths:
        with _fetching("CIFAR-10", root):
            from torchvision.datasets import CIFAR10

            CIFAR10(str(root), download=True)
        paths = _cifar10_paths(root)
    return cached("cifar10", f"cifar10|{_stamp(paths)}", lambda to: _write_cifar10(paths, to))


def _cifar10_paths(root: Path) -> list[Path]:
    """Return the six batch files, train first, or nothing if one is missing."""
    names = [f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]
    for folder in (root / "cifar-10-batches-py", root):
        paths = [folder / name for name in names]
        if all(path.is_file() for path in paths):
            return paths
    return []


def _write_cifar10(paths: Sequence[Path], folder: Path) -> tuple[str, ...]:
    _warn_if_not_published(paths)
    batches = [_read_cifar_batch(path) for path in paths]
    x = np.concatenate([images for images, _ in batches[:-1]])
    y = np.concatenate([labels for _, labels in batches[:-1]])
    save(folder, x, y, *batches[-1])
    return CIFAR10_CLASSES


def _warn_if_not_published(paths: Sequence[Path]) -> None:
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import check_integrity

    known = {name: md5 for name, md5 in CIFAR10.train_list + CIFAR10.test_list}
    other = [path.name for path in paths if not check_integrity(str(path), known[path.name])]
    if other:
        LOG.warning("CIFAR-10 in %s: %s differ from the published files (by md5); "
                    "they are used as they are", paths[0].parent, ", ".join(other))


class _ArraysOnly(pickle.Unpickler):
    """Unpickles numpy arrays and plain values: a batch file can then not run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return numpy's own constructors and refuse everything else."""
        home = module.replace("numpy.core", "numpy._core")
        if (home, name) in {("numpy._core.multiarray", "_reconstruct"), ("numpy", "ndarray"),
                            ("numpy", "dtype"), ("_codecs", "encode")}:
            return super().find_class(home, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _read_cifar_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        entry = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="latin1").load()
        x = np.asarray(entry["data"], np.uint8).reshape(-1, 3, 32, 32)
        y = np.asarray(entry["labels"], np.int64)
    except (OSError, KeyError, TypeError, ValueError, EOFError, pickle.UnpicklingError,
            AttributeError) as error:
        raise DataError(f"{path}: is no batch of CIFAR-10 ({type(error).__name__}: {error}); "
                        f"delete the folder {path.parent}, it is downloaded again") from error
    if len(x) != len(y) or (len(y) and not 0 <= y.min() <= y.max() <= 9):
        raise DataError(f"{path}: {len(x)} images with {len(y)} labels; each image needs a label "
                        f"in 0..9")
    return x, y




def fashion_arrays(given: Path | None) -> Arrays:
    """Return Fashion-MNIST from idx files, downloaded by torchvision if there are none.

    They are looked for in the given folder and in its `FashionMNIST/raw`; without a given folder
    also where Debian's package puts them.

    Raises:
        DataError: if the files are neither there nor to be had, or cannot be read.
    """
    root = given if given is not None else cache_folder() / "fashion_mnist"
    places = [root, root / "FashionMNIST" / "raw", *([DEBIAN_FASHION] if given is None else [])]
    paths = next(filter(None, map(_fashion_paths, places)), [])
    if not paths:
        with _fetching("Fashion-MNIST", root):
            from torchvision.datasets import FashionMNIST

            FashionMNIST(str(root), download=True)
        paths = _fashion_paths(root / "FashionMNIST" / "raw")
    return cached("fashion", f"fashion|{_stamp(paths)}", lambda to: _write_fashion(paths, to))


def _fashion_paths(folder: Path) -> list[Path]:
    """Return the files of x, y, test_x, test_y, or nothing if one is missing."""
    found = []
    for stem in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte",
                 "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        both = [folder / stem, folder / f"{stem}.gz"]
        found += [path for path in both if path.is_file()][:1]
    return found if len(found) == 4 else []


def _write_fashion(paths: Sequence[Path], folder: Path) -> tuple[str, ...]:
    x, y, test_x, test_y = map(read_idx, paths)
    for images, labels, path in ((x, y, paths[1]), (test_x, test_y, paths[3])):
        if len(images) != len(labels):
            raise DataError(f"{path}: {len(labels)} labels for {len(images)} images")
    save(folder, x[:, None], y.astype(np.int64), test_x[:, None], test_y.astype(np.int64))
    return FASHION_CLASSES


def read_idx(path: Path) -> np.ndarray:
    """Return the bytes of an idx file, plain or gzipped, in its own shape.

    Raises:
        DataError: if the file is broken or of another kind.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zeros, kind, n_axes = struct.unpack(">HBB", raw[:4])
        shape = struct.unpack(f">{n_axes}I", raw[4:4 + 4 * n_axes])
        if zeros or kind != 8:
            raise ValueError("no idx file of bytes")
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * n_axes).reshape(shape)
    except (OSError, EOFError, ValueError, struct.error) as error:
        raise DataError(f"{path}: cannot be read as an idx file ({error}); "
                        f"delete it, it is downloaded again") from error

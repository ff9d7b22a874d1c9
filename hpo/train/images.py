"""A folder of image files as one array of bytes: found, checked, decoded once and cached.

Real folders mix modes and sizes and hold broken files; all of them are told at once, by path.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpo.errors import DataError
from hpo.train.arrays import Arrays, cached
from hpo.train.split import TEST_FRACTION, TEST_SEED, stratified

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".pnm", ".ppm", ".tif",
                      ".tiff", ".webp"})
# Files decoded by one task of the thread pool: small enough to keep the threads even.
CHUNK = 256


@dataclass(frozen=True)
class _Found:
    """The image files of one split, in order of class and name."""

    paths: tuple[str, ...]
    labels: np.ndarray
    stamp: str


def folder_arrays(folder: Path, size: int, mode: str) -> Arrays:
    """Return the images of a folder, all of one size and mode, with a test split.

    Raises:
        DataError: listing every empty class and every unreadable file by its path.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise DataError(f"image folder {folder}: no such folder; give one with --data-dir that "
                        f"holds train/<class>/ and test/<class>/, or <class>/ alone; "
                        f"`hpo run --study digits` needs no data")
    split = (folder / "train").is_dir()
    classes, train = _find(folder / "train" if split else folder)
    test = _find_test(folder / "test", classes) if split and (folder / "test").is_dir() else None
    key = f"images|{folder.resolve()}|{size}|{mode}|{train.stamp}|{test and test.stamp}"

    def write(to: Path) -> tuple[str, ...]:
        if test is None:
            stay, out = stratified(train.labels, TEST_FRACTION, TEST_SEED)
            parts = [(_pick(train, stay), "x", "y"), (_pick(train, out), "test_x", "test_y")]
        else:
            parts = [(train, "x", "y"), (test, "test_x", "test_y")]
        faults = [fault for found, x, y in parts
                  for fault in _decode_all(found, to / f"{x}.npy", to / f"{y}.npy", size, mode)]
        if faults:
            raise DataError(_told(f"image folder {folder}: {len(faults)} of "
                                  f"{sum(len(part[0].paths) for part in parts)} files cannot be "
                                  f"read; repair or remove them", faults))
        return classes

    return cached("images", key, write)


def _told(head: str, faults: Sequence[str]) -> str:
    return "\n".join([f"{head}:", *(f"  {fault}" for fault in faults)])


def _find(folder: Path) -> tuple[tuple[str, ...], _Found]:
    """Return the class names of a folder, sorted, and their image files."""
    classes = sorted(entry.name for entry in os.scandir(folder)
                     if entry.is_dir() and not entry.name.startswith("."))
    if len(classes) < 2:
        raise DataError(f"image folder {folder}: needs a folder for each of two or more classes, "
                        f"found {', '.join(classes) if classes else 'none'}")
    paths, labels, facts, empty = [], [], [], []
    for label, name in enumerate(classes):
        found = list(_image_files(folder / name))
        if not found:
            empty.append(str(folder / name))
        paths += [path for path, _ in found]
        facts += [fact for _, fact in found]
        labels += [label] * len(found)
    if empty:
        raise DataError(_told(f"image folder {folder}: {len(empty)} of {len(classes)} classes "
                              f"hold no image ({', '.join(sorted(SUFFIXES))})", empty))
    return tuple(classes), _Found(tuple(paths), np.array(labels, np.int64), "".join(facts))


def _find_test(folder: Path, classes: tuple[str, ...]) -> _Found:
    names, found = _find(folder)
    if names != classes:
        odd = sorted(set(names) ^ set(classes))
        raise DataError(_told(f"image folder {folder}: its classes are not those of train", [
            f"{name} is only in {'test' if name in names else 'train'}" for name in odd]))
    return found


def _image_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield path and stamp (path, size, time) of each image file below a folder, by name."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _image_files(Path(entry.path))
        elif os.path.splitext(entry.name)[1].lower() in SUFFIXES:
            facts = entry.stat()
            yield entry.path, f"{entry.path}|{facts.st_size}|{facts.st_mtime_ns}\n"


def _pick(found: _Found, rows: np.ndarray) -> _Found:
    return _Found(tuple(found.paths[row] for row in rows), found.labels[rows], "")


def _decode_all(found: _Found, x_path: Path, y_path: Path, size: int, mode: str) -> list[str]:
    """Decode files into a new .npy file, in threads, and return what could not be read."""
    channels = 3 if mode == "RGB" else 1
    images = np.lib.format.open_memmap(x_path, "w+", np.uint8,
                                       (len(found.paths), channels, size, size))
    np.save(y_path, found.labels)

    def fill(start: int) -> list[str]:
        faults = []
        for row, path in enumerate(found.paths[start:start + CHUNK], start):
            try:
                images[row] = decode(path, size, mode)
            except Exception as error:  # Pillow's plugins raise of every kind for a broken file
                faults.append(f"{path} ({type(error).__name__}: {error})")
        return faults

    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        faults = [fault for part in pool.map(fill, range(0, len(found.paths), CHUNK))
                  for fault in part]
    images.flush()
    return faults


def decode(path: str | Path, size: int, mode: str) -> np.ndarray:
    """Return one image file as bytes: turned upright, made opaque, cut to a square, scaled.

    Transparent parts become white, as a viewer shows them; 16-bit grey is scaled by its full
    range, 0..65535; a float image must be in 0..1.

    Shapes: [3, size, size] for mode RGB, [1, size, size] for L.
    """
    from PIL import Image, ImageOps

    with Image.open(path) as image:
        image.load()
        upright = ImageOps.exif_transpose(image) if image.getexif() else image
        plain = _opaque(_eight_bits(upright)).convert(mode)
    if plain.size != (size, size):
        plain = ImageOps.fit(plain, (size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(plain, np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _eight_bits(image: Image) -> Image:
    """Return grey images of 16 bits, or of floats, as 8-bit grey; others as they are."""
    from PIL import Image as pillow

    if not image.mode.startswith(("I", "F")):
        return image
    values = np.asarray(image).astype(np.float64)
    top = 1.0 if image.mode == "F" else 65535.0
    if not np.isfinite(values).all() or values.min() < 0 or values.max() > top:
        raise ValueError(f"mode {image.mode} values {values.min():g}..{values.max():g} are "
                         f"outside 0..{top:g}")
    return pillow.fromarray(np.rint(values * (255.0 / top)).astype(np.uint8))


def _opaque(image: Image) -> Image:
    """Return an image with its alpha channel or transparent colour laid over white."""
    from PIL import Image as pillow

    if not image.has_transparency_data:
        return image
    layered = image.convert("RGBA")
    white = pillow.new("RGBA", layered.size, (255, 255, 255, 255))
    return pillow.alpha_composite(white, layered).convert("RGB")

"""Image folders and the published data sets' files: read right, or refused by path."""

from __future__ import annotations

import gzip
import multiprocessing
import pickle
import socket
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import search, states, trials, write_text
from PIL import Image

from hpo import Run
from hpo.errors import DataError, InputError
from hpo.train import AdamW, Recipe, SimpleCNN, cifar10, digits, fashion_mnist, image_folder
from hpo.train.arrays import cached
from hpo.train.images import decode
from hpo.train.loaded import load
from hpo.train.sources import ImageFolder
from hpo.train.trying import prepare


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_run(folder: Path | None, **fields) -> Run:
    return Run(**{"epochs": 1, "seed": 0, "device": "cpu", "dir": Path("."), "data_dir": folder,
                  **fields})


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """C60's folder: grey, colour, alpha, palette, 16 bits, CMYK and one pixel."""
    rng = np.random.default_rng(0)
    root = tmp_path / "mixed"
    for name in "ab":
        (root / name).mkdir(parents=True)

    def save(path, mode, width, height, suffix="png"):
        bands = len(Image.new(mode, (1, 1)).getbands())
        shape = (height, width) if bands == 1 else (height, width, bands)
        pixels = rng.integers(0, 256, shape, dtype=np.uint8)
        Image.fromarray(pixels, mode=None if mode != "CMYK" else mode).save(
            root / f"{path}.{suffix}")

    save("a/grey", "L", 8, 8)
    save("a/wide", "RGB", 10, 6)
    save("a/alpha", "RGBA", 8, 8)
    palette = Image.fromarray(rng.integers(0, 4, (8, 8), dtype=np.uint8)).convert("P")
    palette.save(root / "b/palette.png", transparency=0)
    Image.fromarray((np.arange(81, dtype=np.uint16) * 800).reshape(9, 9)).save(root / "b/deep.png")
    Image.new("CMYK", (8, 8), (10, 200, 30, 40)).save(root / "b/print.jpg")
    save("b/one", "RGB", 1, 1)
    return root


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def fed(run: Run) -> np.ndarray:
    """Return all images of a folder as a trial feeds them, but for mean and deviation: 0..1."""
    recipe = Recipe(data=image_folder(run, size=8), model=SimpleCNN(), optimizer=AdamW())
    data = load(recipe, run, torch.device("cpu"))
    assert data.test is not None and data.mean is not None and data.std is not None
    images = [data.normalised(images, ready=feed.ready)
              for feed in (data.train, data.val, data.test)
              for images, _ in feed.batches(None, 7, 1)]
    assert {(one.dtype, one.shape[1:]) for one in images} == {(torch.float32, (3, 8, 8))}
    return ((torch.cat(images) * data.std + data.mean) / 255).numpy()


def test_every_mode_and_size_becomes_floats_of_one_shape(mixed):
    """C60.1: 7 tensors [3, 8, 8] in 0..1, and 16-bit grey keeps its range, not cut at white."""
    images = fed(make_run(mixed))
    assert images.shape == (7, 3, 8, 8)
    assert -1e-6 < images.min() and images.max() < 1 + 1e-6
    # The fed images are the files' own, each of them once; the ramp of 16 bits rises in all rows.
    rows = {path.stem: [k for k, image in enumerate(images) if np.allclose(
        image, decode(path, 8, "RGB") / 255.0, atol=1e-5)] for path in files(mixed)}
    assert sorted(k for found in rows.values() for k in found) == list(range(7))
    deep = images[rows["deep"][0]]
    assert deep.min() < 0.1 and 0.9 < deep.max() < 1.0 and (np.diff(deep, axis=1) > 0).all()


def test_the_helper_gives_all_images(mixed):
    arrays: Any = image_folder(make_run(mixed), size=8).open()
    assert len(arrays.x) + len(arrays.test_x) == 7 and arrays.classes == ("a", "b")


FOLDER_STUDY = """
    from hpo import Float, StudySpec
    from hpo.train import AdamW, Recipe, SimpleCNN, image_folder

    def build(run, *, lr):
        return Recipe(data=image_folder(run, size=8), model=SimpleCNN(hidden=4),
                      optimizer=AdamW(lr=lr), batch_size=7)

    STUDY = StudySpec(space={"lr": Float(1e-4, 1e-1, log=True)}, build=build,
                      maximize="val_accuracy", epochs=1)
    """
# Rows of the odd shape are few, so that the check before the first trial meets none, or all.
MIXED_STUDY = """
    import torch
    from hpo import Float, StudySpec
    from hpo.train import MLP, AdamW, Recipe, datasets

    class Mixed(torch.utils.data.Dataset):
        targets = [0, 1] * 200

        def __len__(self):
            return 400

        def __getitem__(self, row):
            width = 9 if row % {every} == {every} - 1 else 8
            return torch.zeros(3, 8, width), self.targets[row]

    def build(run, *, lr):
        return Recipe(data=datasets(Mixed()), model=MLP(hidden=4), optimizer=AdamW(lr=lr),
                      batch_size=400)

    STUDY = StudySpec(space={{"lr": Float(1e-4, 1e-1, log=True)}}, build=build,
                      maximize="val_accuracy", epochs=1)
    """


def test_a_trial_of_the_mixed_folder_is_complete(mixed, tmp_path, cache):
    """C60.2: one epoch, batches of 7."""
    write_text(tmp_path, "folder", FOLDER_STUDY)
    search(tmp_path, "folder", "--n-trials", 1, "--data-dir", mixed, "--devices", "cpu",
           env={"HPO_CACHE_DIR": str(cache)})
    assert states(trials(tmp_path, "folder")) == ["COMPLETE"]


def test_a_trial_whose_dataset_mixes_shapes_fails_with_both_as_its_reason(tmp_path):
    """C60.4: the stored reason and the command's output."""
    write_text(tmp_path, "mixes", MIXED_STUDY.format(every=400))
    done = search(tmp_path, "mixes", "--n-trials", 1, "--devices", "cpu", code=3)
    [trial] = trials(tmp_path, "mixes")
    assert trial.state.name == "FAIL"
    for said in (trial.user_attrs["reason"], done.stdout):
        assert "[3, 8, 8]" in said and "[3, 8, 9]" in said


def test_shapes_that_the_first_batch_mixes_end_the_run_before_a_trial(tmp_path):
    """C60.4 where the check before the first trial meets it: exit 2, both shapes, no study."""
    write_text(tmp_path, "mixes", MIXED_STUDY.format(every=2))
    done = search(tmp_path, "mixes", "--n-trials", 1, "--devices", "cpu", code=2)
    assert "[3, 8, 8]" in done.stderr and "[3, 8, 9]" in done.stderr
    assert not (tmp_path / "hpo-runs" / "hpo.db").exists()


def test_grey_mode_gives_one_channel(mixed):
    """C60.3."""
    assert image_folder(make_run(mixed), size=8, mode="L").open().x.shape[1:] == (1, 8, 8)


def test_transparent_parts_become_white(tmp_path):
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[:2, :, 3] = 255
    Image.fromarray(pixels).save(tmp_path / "half.png")
    image = decode(tmp_path / "half.png", 4, "RGB")
    assert image[:, :2].max() == 0 and image[:, 2:].min() == 255


def test_a_palette_s_transparent_colour_becomes_white(tmp_path):
    image = Image.fromarray(np.tile(np.array([0, 1], np.uint8), (4, 2))).convert("P")
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.save(tmp_path / "p.png", transparency=0)
    got = decode(tmp_path / "p.png", 4, "RGB")
    assert got[:, 0, 0].tolist() == [255, 255, 255] and got[:, 0, 1].tolist() == [40, 50, 60]


def test_a_wide_image_is_cut_about_its_middle(tmp_path):
    pixels = np.zeros((4, 12, 3), np.uint8)
    pixels[:, 4:8] = 200
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    assert decode(tmp_path / "wide.png", 4, "RGB").min() == 200


def test_a_photo_is_turned_upright(tmp_path):
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[:4] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by half
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    assert decode(tmp_path / "turned.png", 8, "L")[0, 0, 0] == 0


def test_every_unreadable_file_is_named(mixed):
    (mixed / "a" / "broken.jpg").write_bytes(b"no image")
    whole = (mixed / "b" / "print.jpg").read_bytes()
    (mixed / "b" / "short.jpg").write_bytes(whole[:len(whole) // 2])
    with pytest.raises(DataError) as told:
        image_folder(make_run(mixed), size=8).open()
    text = str(told.value)
    assert "2 of 9 files" in text
    assert str(mixed / "a" / "broken.jpg") in text and str(mixed / "b" / "short.jpg") in text


def test_every_empty_class_is_named(mixed):
    (mixed / "c").mkdir()
    (mixed / "d").mkdir()
    (mixed / "d" / "notes.txt").write_text("not an image")
    with pytest.raises(DataError) as told:
        image_folder(make_run(mixed), size=8).open()
    assert "2 of 4 classes" in str(told.value)
    assert str(mixed / "c") in str(told.value) and str(mixed / "d") in str(told.value)


def test_a_missing_folder_says_how_to_give_one(tmp_path):
    with pytest.raises(DataError, match="--data-dir"):
        image_folder(make_run(None), size=8)
    with pytest.raises(DataError, match="nowhere.*--data-dir"):
        ImageFolder(tmp_path / "nowhere").open()
    with pytest.raises(DataError, match="two or more classes"):
        ImageFolder(tmp_path).open()
    with pytest.raises(InputError, match="'CMYK'"):
        ImageFolder(tmp_path, mode="CMYK")


def paint(folder: Path, n: int, level: int) -> None:
    folder.mkdir(parents=True)
    for i in range(n):
        Image.new("RGB", (4, 4), (level, i, 0)).save(folder / f"{i:02}.png")


def test_train_and_test_folders_are_the_splits(tmp_path):
    for name, level in (("cat", 10), ("dog", 200)):
        paint(tmp_path / "train" / name, 10, level)
        paint(tmp_path / "test" / name, 3, level)
    run = make_run(tmp_path)
    arrays: Any = cifar10(run).open()
    assert arrays.x.shape == (20, 3, 32, 32) and arrays.test_y.tolist() == [0] * 3 + [1] * 3
    assert arrays.x[arrays.y == 1, 0].min() == 200
    recipe = Recipe(data=cifar10(run), model=SimpleCNN(hidden=4), optimizer=AdamW())
    known = prepare(recipe, run)
    assert (known["n_train"], known["n_val"], known["n_test"]) == (18, 2, 6)


def test_a_class_that_only_one_split_has_is_named(tmp_path):
    for name in ("cat", "dog"):
        paint(tmp_path / "train" / name, 2, 0)
    for name in ("cat", "cow"):
        paint(tmp_path / "test" / name, 2, 0)
    with pytest.raises(DataError, match="(?s)cow is only in test.*dog is only in train"):
        cifar10(make_run(tmp_path)).open()


def test_images_are_decoded_once_until_a_file_changes(tmp_path, cache):
    for name, level in (("cat", 10), ("dog", 200)):
        paint(tmp_path / "pets" / name, 4, level)
    source = ImageFolder(tmp_path / "pets", size=4)
    first = source.open()
    (meta,) = cache.glob("data/*/meta.json")
    written = meta.stat().st_mtime_ns
    assert source.open().fingerprint == first.fingerprint
    assert meta.stat().st_mtime_ns == written
    Image.new("RGB", (4, 4), (77, 0, 0)).save(tmp_path / "pets" / "cat" / "00.png")
    assert source.open().fingerprint != first.fingerprint


def _open_counting(folder: Path, log: Path, results) -> None:
    def write(to: Path) -> tuple[str, ...]:
        with open(log, "a") as handle:
            handle.write("decoded\n")
        np.save(to / "x.npy", np.zeros((4, 2), np.float32))
        np.save(to / "y.npy", np.zeros(4, np.int64))
        return ("a",)
    results.put(cached("counted", "key", write).fingerprint)


def test_workers_that_start_together_decode_once(tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    workers = [context.Process(target=_open_counting, args=(tmp_path, tmp_path / "log", results))
               for _ in range(4)]
    for worker in workers:
        worker.start()
    marks = {results.get(timeout=30) for _ in workers}
    for worker in workers:
        worker.join()
    assert len(marks) == 1 and (tmp_path / "log").read_text() == "decoded\n"


def test_a_cache_that_cannot_be_written_says_what_to_set(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HPO_CACHE_DIR", str(tmp_path / "file"))
    paint(tmp_path / "pets" / "cat", 2, 0)
    paint(tmp_path / "pets" / "dog", 2, 0)
    with pytest.raises(DataError, match="HPO_CACHE_DIR"):
        ImageFolder(tmp_path / "pets", size=4).open()
    assert len(digits(make_run(None)).open().x) == 1438


@pytest.fixture
def cifar_files(tmp_path: Path) -> Path:
    """Six small batch files in CIFAR-10's own format."""
    folder = tmp_path / "given" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for k, name in enumerate([f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]):
        data = np.full((20, 3072), k, np.uint8)
        data[:, :1024] = 100 + k
        entry = {b"data": data, b"labels": [i % 10 for i in range(20)]}
        plain = {key.decode(): value for key, value in entry.items()}
        (folder / name).write_bytes(pickle.dumps(plain, protocol=2))
    return tmp_path / "given"


def test_cifar10_files_are_read_in_their_own_format(cifar_files, caplog):
    arrays: Any = cifar10(make_run(cifar_files)).open()
    assert arrays.x.shape == (100, 3, 32, 32) and arrays.test_x.shape == (20, 3, 32, 32)
    assert arrays.x[40, 0].min() == 102 and arrays.x[40, 2].max() == 2
    assert arrays.y[:12].tolist() == [*range(10), 0, 1] and arrays.classes[3] == "cat"
    assert "differ from the published files" in caplog.text


def test_a_cifar10_file_cannot_run_code(cifar_files, tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "trapped",))
    batch = cifar_files / "cifar-10-batches-py" / "data_batch_3"
    batch.write_bytes(pickle.dumps({"data": Trap(), "labels": []}, protocol=2))
    with pytest.raises(DataError, match="data_batch_3"):
        cifar10(make_run(cifar_files)).open()
    assert not (tmp_path / "trapped").exists()


def test_a_cut_cifar10_file_is_named(cifar_files):
    batch = cifar_files / "cifar-10-batches-py" / "data_batch_2"
    batch.write_bytes(batch.read_bytes()[:500])
    with pytest.raises(DataError, match="data_batch_2"):
        cifar10(make_run(cifar_files)).open()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args, **kwargs):
        raise OSError("no network in this test")
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("helper", [cifar10, fashion_mnist])
def test_data_that_cannot_be_fetched_say_where_they_were_looked_for(helper, tmp_path, offline):
    with pytest.raises(DataError) as told:
        helper(make_run(tmp_path / "empty")).open()
    text = str(told.value)
    assert str(tmp_path / "empty") in text and "--data-dir" in text and "digits" in text


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.mark.parametrize("place,zipped", [("", False), ("", True), ("FashionMNIST/raw", True)])
def test_fashion_mnist_files_are_read_plain_and_zipped(tmp_path, place, zipped):
    folder = tmp_path / "given" / place
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    stored = {"train-images-idx3-ubyte": rng.integers(0, 256, (30, 28, 28), dtype=np.uint8),
              "train-labels-idx1-ubyte": (np.arange(30) % 10).astype(np.uint8),
              "t10k-images-idx3-ubyte": rng.integers(0, 256, (10, 28, 28), dtype=np.uint8),
              "t10k-labels-idx1-ubyte": np.arange(10).astype(np.uint8)}
    for name, array in stored.items():
        path = folder / (f"{name}.gz" if zipped else name)
        path.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
    arrays: Any = fashion_mnist(make_run(tmp_path / "given")).open()
    assert np.array_equal(arrays.x[:, 0], stored["train-images-idx3-ubyte"])
    assert np.array_equal(arrays.test_y, stored["t10k-labels-idx1-ubyte"])


def test_a_broken_fashion_mnist_file_is_named(tmp_path):
    for stem in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte",
                 "t10k-labels-idx1-ubyte"):
        (tmp_path / stem).write_bytes(b"\0\0\x08\x01\0\0")
    with pytest.raises(DataError, match="train-images-idx3-ubyte"):
        fashion_mnist(make_run(tmp_path)).open()

"""Devices: which GPUs may be used, and which worker gets which."""

from __future__ import annotations

import pytest

from hpo.devices import KEEP_MEMORY, Slot, gpus, n_cores, slots
from hpo.errors import InputError

FOUR_FIVE = {"CUDA_VISIBLE_DEVICES": "4,5"}
NONE = {"CUDA_VISIBLE_DEVICES": ""}


def visible(found: list[Slot]) -> list[str]:
    return [slot.visible for slot in found]


def test_a_mask_from_outside_is_believed() -> None:
    """C40.5: the workers see 4 and 5."""
    assert visible(slots("0,1", None, FOUR_FIVE)) == ["4", "5"]
    assert visible(slots("auto", None, FOUR_FIVE)) == ["4", "5"]
    assert visible(slots("1", None, FOUR_FIVE)) == ["5"]


@pytest.mark.parametrize(("mask", "ids"), [
    ("", []), ("-1", []), ("0,-1,1", ["0"]), ("GPU-8f2a, GPU-77", ["GPU-8f2a", "GPU-77"]),
])
def test_a_mask_is_read_as_cuda_reads_it(mask: str, ids: list[str]) -> None:
    assert gpus({"CUDA_VISIBLE_DEVICES": mask}) == ids


def test_without_a_gpu_auto_is_the_cpu_with_no_gpu_visible() -> None:
    found = slots("auto", 2, NONE)
    assert [slot.device for slot in found] == ["cpu", "cpu"]
    assert visible(found) == ["", ""]
    assert [slot.label for slot in found] == ["cpu", "cpu"]


def test_the_cpu_is_used_when_asked_for_though_there_are_gpus() -> None:
    """C40.4: `--devices cpu` runs on any machine."""
    assert slots("cpu", 1, FOUR_FIVE)[0].environment()["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("n", [1, 2, 3, 64])
def test_cores_are_shared_out_among_the_workers(n: int) -> None:
    found = slots("cpu", n, NONE)
    assert [slot.index for slot in found] == list(range(n))
    assert {slot.n_threads for slot in found} == {max(1, n_cores() // n)}
    assert found[0].environment()["OMP_NUM_THREADS"] == str(max(1, n_cores() // n))


@pytest.mark.parametrize(("said", "threads"), [
    ("1", 1), ("1,4", 1), ("4096", n_cores()), ("", n_cores()), ("0", n_cores()),
    ("many", n_cores()),
])
def test_a_smaller_number_of_threads_from_outside_is_believed(said: str, threads: int) -> None:
    assert slots("cpu", 1, {**NONE, "OMP_NUM_THREADS": said})[0].n_threads == threads


def test_cpu_workers_keep_freed_memory_unless_the_user_has_set_malloc(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in KEEP_MEMORY:
        monkeypatch.delenv(name, raising=False)
    assert KEEP_MEMORY.items() <= slots("cpu", 1, NONE)[0].environment().items()
    assert not KEEP_MEMORY.keys() & slots("0", 1, FOUR_FIVE)[0].environment().keys()
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert not KEEP_MEMORY.keys() & slots("cpu", 1, NONE)[0].environment().keys()


def test_more_workers_than_devices_are_refused_with_the_way_to_share() -> None:
    """C40.3: `--devices 0,1 --workers 3`."""
    with pytest.raises(InputError, match="--workers 3: there are 2 devices, one worker each; to "
                                         "share them write --devices 0,1,0"):
        slots("0,1", 3, FOUR_FIVE)
    assert visible(slots("0,1,0", 3, FOUR_FIVE)) == ["4", "5", "4"]


def test_fewer_workers_than_devices_take_the_first() -> None:
    assert visible(slots("auto", 1, FOUR_FIVE)) == ["4"]


@pytest.mark.parametrize(("env", "there"), [(NONE, "no GPU"), (FOUR_FIVE, "indices 0 to 1")])
def test_a_device_that_is_not_there_is_refused(env: dict, there: str) -> None:
    """C40.4: `--devices 7` exits 2 and names the CPU as the way out."""
    said = rf"there is no GPU 7 here \({there}\); use --devices cpu"
    with pytest.raises(InputError, match=said):
        slots("7", None, env)


@pytest.mark.parametrize("text", ["", "gpu", "0;1", "-1", "0,,1", "1.5"])
def test_a_device_list_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="accepted are auto, cpu, or indices such as 0,1"):
        slots(text, None, FOUR_FIVE)


def test_a_gpu_s_label_is_the_id_it_is_seen_by() -> None:
    assert [slot.label for slot in slots("auto", None, FOUR_FIVE)] == ["gpu 4", "gpu 5"]


FOUR = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}


def test_trials_of_two_gpus_share_them_out() -> None:
    found = slots("auto", None, FOUR, n_each=2)
    assert visible(found) == ["4,5", "6,7"]
    assert [slot.label for slot in found] == ["gpu 4,5", "gpu 6,7"]
    assert [slot.n_devices for slot in found] == [2, 2]
    assert {slot.n_threads for slot in found} == {max(1, n_cores() // 4)}
    assert visible(slots("2,1", None, FOUR, n_each=2)) == ["6,5"]
    assert visible(slots("auto", 1, FOUR, n_each=2)) == ["4,5"]


def test_trials_of_two_processes_share_the_cores() -> None:
    found = slots("cpu", 1, NONE, n_each=2)
    assert [(slot.label, slot.n_devices) for slot in found] == [("cpu x2", 2)]
    assert found[0].n_threads == max(1, n_cores() // 2)
    assert len(slots("cpu", None, NONE, n_each=64)) == 1


@pytest.mark.parametrize(("devices", "n_workers", "said"), [
    ("0,1,2", None, "--gpus-per-trial 2: 3 GPUs are there; name a multiple of 2 with --devices"),
    ("0", None, "--gpus-per-trial 2: 1 GPU is there; name a multiple"),
    ("0,0", None, "--gpus-per-trial 2: each GPU is one trial's then; name each once"),
    ("auto", 3, "--workers 3: with --gpus-per-trial 2 there are devices for 2"),
])
def test_gpus_that_cannot_be_shared_out_are_refused(
    devices: str, n_workers: int | None, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        slots(devices, n_workers, FOUR, n_each=2)

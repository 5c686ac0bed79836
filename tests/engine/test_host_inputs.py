"""Inputs in host memory or in files give the rows and scores of those on the device, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import CPU, all_clients, compose, engine_on, equal, mlp, split_of

from fedbench.config.check import check
from fedbench.core.settings import config_hash
from fedbench.core.split import Split
from fedbench.data.base import Arrays
from fedbench.data.synthetic import Synthetic
from fedbench.engine import host_inputs
from fedbench.engine.federation import Federation
from fedbench.engine.host_inputs import stay_on_host
from fedbench.engine.training import LocalTraining
from fedbench.simulation import build
from fedbench.simulation.simulator import run

KINDS = ("images", "linear", "questions")


def generated(kind: str) -> tuple[Arrays, Split]:
    arrays = Synthetic(kind, n=200, num_classes=3, shape=None if kind == "linear" else [1, 6, 6]).load()  # type: ignore
    return arrays, split_of((41, 9, 30, 17, 23), (10, 20, 15, 15, 20))


def in_files(arrays: Arrays, folder: Path) -> Arrays:
    """Return the same data set with its inputs in read-only files."""
    parts = {}
    for name, values in arrays.parts().items():
        np.save(folder / f"{name}.npy", values)
        parts[name] = np.load(folder / f"{name}.npy", mmap_mode="r")
    arrays.inputs = parts if isinstance(arrays.inputs, dict) else parts["inputs"]
    return arrays


def same(got: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for name in wanted:
            same(got[name], wanted[name])
    elif isinstance(wanted, tuple):
        for one, other in zip(got, wanted, strict=True):
            same(one, other)
    else:
        equal(got, wanted)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load few steps at a time."""
    monkeypatch.setattr("fedbench.engine.batch.BLOCK_BYTES", 10_000)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", [False, True], ids=["memory", "file"])
def test_batches_equal_those_of_inputs_on_the_device(kind: str, file: bool, tmp_path: Path) -> None:
    arrays, split = generated(kind)
    device = Federation.build(arrays, split, CPU)
    host = Federation.build(in_files(arrays, tmp_path) if file else arrays, split, CPU, on_host=True)
    assert host.on_host and not device.on_host
    assert host.input_shape == device.input_shape and host.sample_bytes == device.sample_bytes
    index = torch.tensor([[0, 3, 199], [7, 7, 0]])
    wanted = device.gather(index)
    same(host.gather(index), wanted)
    same(host.gather(index, fetched=host.fetch(index.numpy())), wanted)
    same(host.gather(index, fetched=host.fetch_ahead(index.numpy())()), wanted)
    same(host.select_clients(np.array([2, 4])).gather(index), wanted)
    host.gather(index)[1].zero_()  # a batch is a copy, not the data
    x = host.gather(index)[0]
    for part in x.values() if isinstance(x, dict) else [x]:
        part.zero_()
    same(host.gather(index)[0], wanted[0])
    assert device.fetch(index.numpy()) is None


@pytest.mark.parametrize("plan", ["loop", "vmap", "threaded pairs"])
@pytest.mark.parametrize("augment", [None, {"flip": True, "crop": 1}])
def test_results_equal_those_of_inputs_on_the_device(
    plan: str, augment: dict | None, tmp_path: Path, small_blocks: None
) -> None:
    """Blocks contain several steps, and the last one is shorter."""
    arrays, split = generated("images")
    found = []
    for on_host, a in ((False, arrays), (True, arrays), (True, in_files(generated("images")[0], tmp_path))):
        e = engine_on(Federation.build(a, split, CPU, True, augment, on_host=on_host), mlp(36), plan=plan, batch_size=4)
        rows = all_clients(e).train(e.model.init_row(), how=LocalTraining(epochs=2)).theta
        shared = torch.cat(all_clients(e).forward(rows[0]))
        found.append((rows, torch.cat(all_clients(e).forward(rows)), shared, all_clients(e).gradient(rows)[0]))
    for other in found[1:]:
        for got, wanted in zip(other, found[0]):
            equal(got, wanted)


def run_in_both(folder: Path, *words: str) -> None:
    """Assert that runs with hardware.data=device and host have the same metrics.csv and clients.csv."""
    plan = ["hardware.device=cpu", "hardware.executor=vmap", "hardware.threads=1", "tracking=disabled"]
    for where in ("device", "host"):
        (folder / where).mkdir()
        run(compose([*words, *plan, "partition=iid", f"hardware.data={where}"]), folder / where)
    for name in ("metrics.csv", "clients.csv"):
        assert (folder / "host" / name).read_bytes() == (folder / "device" / name).read_bytes()


def test_a_run_has_the_same_metrics_with_inputs_on_the_host(tmp_path: Path, small_blocks: None) -> None:
    words = ["dataset=generated", "dataset.n=200", "dataset.shape=[3,8,8]", "partition.num_clients=4"]
    run_in_both(tmp_path, *words, "dataset.augment={flip: true, crop: 1}", "model=mlp", "algorithm=pgfed", "rounds=3")


def test_cifar10_has_the_same_metrics_with_inputs_on_the_host(tmp_path: Path, shared_data: Path) -> None:
    """Uses the first 3,000 images of the file."""
    with np.load(shared_data / "cifar10_jpeg.npz") as file:
        cut = {k: file[k][:3000] for k in ("label", "is_test")} | {"classes": file["classes"]}
        cut["offset"] = file["offset"][:3001]
        cut["jpeg"] = file["jpeg"][: cut["offset"][-1]]
    np.savez(tmp_path / "cut.npz", **cut)
    words = ["dataset=cifar10", f"dataset.path={tmp_path / 'cut.npz'}", f"data_dir={tmp_path}", "dataset.split=merged"]
    run_in_both(tmp_path, *words, "partition.num_clients=10", "model=mlp", "model.hidden=[16]", "algorithm=fedavg",
                "rounds=2", "sample_rate=0.3")  # fmt: skip


# -- host or device ----------------------------------------------------------------------------------------------
def test_auto_depends_on_the_free_memory_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, _ = generated("images")  # 200 images of 36 bytes
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(host_inputs, "free_memory", lambda device: 14_400)
    assert not stay_on_host(arrays, "auto", gpu)  # exactly half
    assert stay_on_host(arrays, "host", gpu) and stay_on_host(arrays, "host", CPU)
    monkeypatch.setattr(host_inputs, "free_memory", lambda device: 14_399)
    assert stay_on_host(arrays, "auto", gpu) and not stay_on_host(arrays, "device", gpu)
    assert not stay_on_host(arrays, "auto", CPU)  # a CPU uses host memory
    assert stay_on_host(in_files(arrays, tmp_path), "auto", CPU)


def test_inputs_of_a_file_are_read_into_memory_with_data_device(tmp_path: Path) -> None:
    arrays, split = generated("linear")
    wanted = Federation.build(arrays, split, CPU)
    read = Federation.build(in_files(arrays, tmp_path), split, CPU)
    equal(read.inputs, wanted.inputs)
    assert isinstance(read.inputs, torch.Tensor)


def test_the_option_does_not_change_the_hash() -> None:
    words = ["dataset=generated", "partition=iid", "model=mlp", "algorithm=local"]
    hashes = set()
    for where in ("auto", "device", "host"):
        cfg = compose([*words, f"hardware.data={where}"])
        check(cfg)
        hashes.add(config_hash(cfg))
        arrays = build.data(cfg)
        assert build.federation(cfg, arrays, build.partition(cfg, arrays), CPU).on_host == (where == "host")
    assert len(hashes) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_receives_the_same_batches(kind: str) -> None:
    arrays, split = generated(kind)
    gpu = torch.device("cuda", 0)
    device, host = (Federation.build(arrays, split, gpu, on_host=on_host) for on_host in (False, True))
    index = torch.tensor([[0, 3, 199], [7, 7, 0]], device=gpu)
    fetched = host.fetch(index.cpu().numpy())
    assert fetched is not None and all(x.is_pinned() for x in fetched.values())
    same(host.gather(index, fetched=fetched), device.gather(index))


MEASURED = """
import sys
from pathlib import Path
from fedbench.commands import main
assert main(sys.argv[1:]) == 0
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print("peak", int(status["VmHWM"].split()[0]) * 1024)  # resident at once, pages of files included
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_six_gigabytes_of_inputs_need_less_than_three_of_memory(tmp_path: Path) -> None:
    """The label is the sign of a sample's first feature.  Batches read the file at random."""
    n, rng = 500_000, np.random.default_rng(0)
    x = np.lib.format.open_memmap(tmp_path / "X.npy", "w+", np.float32, (n, 3000))
    y = np.empty(n, np.int64)
    for at in range(0, n, 10_000):
        part = rng.standard_normal((10_000, 3000), np.float32)
        x[at : at + 10_000], y[at : at + 10_000] = part, part[:, 0] > 0
    x.flush()
    del x
    np.save(tmp_path / "y.npy", y)
    words = ["dataset=npy", f"dataset.path={tmp_path}", "partition=iid", "partition.num_clients=50", "model=logistic",
             "algorithm=fedavg", "rounds=2", "sample_rate=0.2", "local.epochs=1", "local.batch_size=100",
             "optimizer.lr=0.1", "tracking=disabled", "hardware.device=cpu"]  # fmt: skip
    words += [f"{key}={tmp_path / key}" for key in ("data_dir", "output_dir")]
    try:
        done = subprocess.run([sys.executable, "-c", MEASURED, *words], capture_output=True, text=True)
    finally:
        (tmp_path / "X.npy").unlink()
    assert done.returncode == 0, done.stderr
    print(done.stdout, done.stderr)
    assert int(done.stdout.split("peak ")[1]) < 3 << 29  # half of what is asked

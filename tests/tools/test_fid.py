"""The Frechet distance against closed forms and scipy; its networks; the command on generated silos."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from scipy.linalg import sqrtm
from silo_files import make_extra, make_table, overrides
from tiny import SIZES, compose, ragged

from fedbench.config.check import check
from fedbench.core.options import ConfigError
from fedbench.data.base import EXTRA
from fedbench.simulation import simulator
from fedbench.tools import fid
from fedbench.tools.export import open_run

CPU = torch.device("cpu")


def gauss(n: int, d: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + rng.normal(size=d)


def pictures(n: int, channels: int = 1, side: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, channels, side, side), dtype=np.uint8)


# -- the distance ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("n", "d"), [(200, 5), (20, 40), (2, 7)])
def test_a_set_is_at_distance_0_from_itself(n: int, d: int) -> None:
    """Also with fewer samples than features, where the covariance has no inverse."""
    a = gauss(n, d, 0)
    assert fid.frechet(a, a) == pytest.approx(0, abs=1e-9 * float((a**2).sum()))
    assert fid.frechet(a, a[::-1]) == pytest.approx(0, abs=1e-9 * float((a**2).sum()))


@pytest.mark.parametrize(("n", "d"), [(200, 5), (20, 40)])
def test_closed_forms(n: int, d: int) -> None:
    """A shift by s is |s|^2; a scaling by c about the mean is (1 - c)^2 tr S; one feature: (m - m')^2 + (s - s')^2."""
    a, shift = gauss(n, d, 1), np.linspace(-1, 2, d)
    trace = np.cov(a.T).trace()
    assert fid.frechet(a, a + shift) == pytest.approx((shift**2).sum(), rel=1e-8)
    assert fid.frechet(a, a.mean(0) + 3 * (a - a.mean(0))) == pytest.approx(4 * trace, rel=1e-8)
    x, y = gauss(30, 1, 2), gauss(50, 1, 3)
    expected = (x.mean() - y.mean()) ** 2 + (x.std(ddof=1) - y.std(ddof=1)) ** 2
    assert fid.frechet(x, y) == pytest.approx(expected)


def test_it_is_symmetric_and_what_the_formula_says() -> None:
    a, b = gauss(100, 6, 4), gauss(70, 6, 5)
    sa, sb = np.cov(a.T), np.cov(b.T)
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(sa + sb - 2 * sqrtm(sa @ sb).real)
    assert fid.frechet(a, b) == pytest.approx(expected, rel=1e-9) == pytest.approx(fid.frechet(b, a), rel=1e-12)
    few, many = gauss(5, 30, 6), gauss(60, 30, 7)
    assert fid.frechet(few, many) == pytest.approx(fid.frechet(many, few), rel=1e-12)


def test_turning_all_features_changes_nothing() -> None:
    a, b = gauss(40, 8, 8), gauss(50, 8, 9)
    turn, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 8)))
    assert fid.frechet(a @ turn, b @ turn) == pytest.approx(fid.frechet(a, b))


def test_one_sample_has_no_spread() -> None:
    with pytest.raises(ConfigError, match="at least two samples in each set, got 1"):
        fid.frechet(np.zeros((1, 3)), np.zeros((4, 3)))


# -- the networks ----------------------------------------------------------------------------------------
def test_the_random_network_is_always_the_same() -> None:
    x = pictures(70)  # more than one batch
    torch.manual_seed(1)
    a = fid.features_of(fid.random_network(CPU), x, CPU)
    torch.manual_seed(2)
    b = fid.features_of(fid.random_network(CPU), x, CPU)
    np.testing.assert_array_equal(a, b)
    assert a.shape == (70, 128) and (a.std(0) > 0).mean() > 0.8
    grey = fid.features_of(fid.random_network(CPU), x.repeat(3, axis=1), CPU)
    np.testing.assert_allclose(a, grey, rtol=1e-5, atol=1e-6)


def test_worse_pictures_are_farther_away() -> None:
    network, real = fid.random_network(CPU), pictures(60, seed=1)
    same, noisy = pictures(60, seed=2), (pictures(60, seed=3) >> 1)
    a, b, c = (fid.features_of(network, x, CPU) for x in (real, same, noisy))
    assert 0 < fid.frechet(a, b) < fid.frechet(a, c)


def test_inception_reads_its_weights_from_a_file(tmp_path: Path) -> None:
    """Of random weights here; the auxiliary and the last layer of the published file are left out."""
    from torchvision.models import inception_v3

    model = inception_v3(weights=None, init_weights=False, aux_logits=False, transform_input=False).eval()
    published = model.state_dict() | {"AuxLogits.fc.weight": torch.zeros(1), "fc.bias": torch.zeros(7)}
    torch.save(published, tmp_path / fid.WEIGHTS)
    network = fid.make_network("inception", None, str(tmp_path), CPU)
    x = pictures(2, side=20)
    found = fid.features_of(network, x, CPU)
    assert found.shape == (2, 2048) and fid.WEIGHTS in network.name
    large = torch.nn.functional.interpolate(torch.from_numpy(x).repeat(1, 3, 1, 1) / 255, (299, 299), mode="bilinear",
                                            antialias=True)  # fmt: skip
    mean, std = (torch.tensor(v)[:, None, None] for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    model.fc = torch.nn.Identity()
    with torch.no_grad():
        np.testing.assert_allclose(found, model((large - mean) / std).numpy(), rtol=1e-4, atol=1e-5)


def test_missing_networks_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{fid.WEIGHTS} does not exist.*--weights, or choose --network random"):
        fid.make_network("inception", None, str(tmp_path), CPU)
    torch.save({"conv.weight": torch.zeros(2)}, tmp_path / "other.pth")
    (tmp_path / "cut.pth").write_bytes(b"PK\x03\x04 cut off")
    for name in ("other.pth", "cut.pth"):
        with pytest.raises(ConfigError, match="does not contain torchvision's Inception v3 weights") as refusal:
            fid.make_network("inception", str(tmp_path / name), str(tmp_path), CPU)
        assert "\n" not in str(refusal.value)
    with pytest.raises(ConfigError, match="--network nowhere is neither inception nor random"):
        fid.make_network("nowhere", None, str(tmp_path), CPU)


# -- the command -----------------------------------------------------------------------------------------
@pytest.fixture
def silos(tmp_path: Path) -> list[str]:
    """Overrides of three silos, of which A has 6 extra pictures, C one, B none."""
    make_table(tmp_path)
    return overrides(tmp_path, f"dataset.extra={make_extra(tmp_path / 'more', {'A': 6, 'C': 1})}", "hardware=cpu")


def test_the_distance_is_by_client(silos: list[str], tmp_path: Path, capsys) -> None:
    assert fid.main([*silos, "--network", "random", "--out", str(tmp_path / "fid.csv")]) == 0
    shown = capsys.readouterr().out
    assert "random convolutions 3-32-64-128, seed 0" in shown and shown.count("none") == 2
    lines = (tmp_path / "fid.csv").read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), line.split(","))) for line in lines[1:]]
    assert [row["silo"] for row in rows] == ["A", "B", "C"] and [row["extra"] for row in rows] == ["6", "0", "1"]
    found = fid.distances_of(silos, "random")
    assert found[0]["fid"] > 0 and np.isnan([found[1]["fid"], found[2]["fid"]]).all()


def test_the_network_of_a_run(silos: list[str], tmp_path: Path) -> None:
    """What enters the head of its global model, of pictures normalized as in training; another size is refused."""
    short = ["rounds=1", "sample_rate=1.0", "tracking=disabled", "hardware.executor=vmap", "local.epochs=1"]
    cfg = OmegaConf.create(check(compose([*silos, *short, "model=mlp", "algorithm=fedavg"])))
    (tmp_path / "run").mkdir()
    OmegaConf.save(cfg, tmp_path / "run" / "config.yaml")
    simulator.run(cfg, tmp_path / "run")
    rows = fid.distances_of(silos, str(tmp_path / "run"))
    assert rows[0]["fid"] > 0 and rows[0]["network"] == f"mlp of {tmp_path / 'run'} after round 1, up to its head"
    network = fid.run_network(tmp_path / "run")
    x = pictures(3)
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["algorithm"]["w"]
    model = open_run(tmp_path / "run").engine.model
    expected = model.features(saved, (torch.from_numpy(x).float() / 255 - 0.5) / 0.5)
    np.testing.assert_allclose(network.features(torch.from_numpy(x)).numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match=r"needs images of shape \(1, 8, 8\), got \(1, 9, 9\)"):
        network.features(torch.from_numpy(pictures(2, side=9)))


def test_data_without_pictures_to_compare_is_refused(capsys) -> None:
    assert fid.main(["dataset=digits", "--network", "random", "hardware=cpu"]) == 2
    assert "there are no extra images to compare: set dataset.extra" in capsys.readouterr().err
    arrays, split = ragged(SIZES)
    arrays.split[:] = EXTRA
    with pytest.raises(ConfigError, match="does not consist of uint8 images"):
        fid.distances_by_client(arrays, split, fid.random_network(CPU), CPU)


def test_two_channels_are_refused() -> None:
    with pytest.raises(ConfigError, match="images with 2 channels: use images with 1 channel, or with 3 or more"):
        fid.three_channels(torch.zeros(2, 2, 8, 8))
    assert fid.three_channels(torch.zeros(2, 1, 8, 8)).shape == (2, 3, 8, 8)


def test_help_is_light() -> None:
    code = "import sys, fedbench.tools.fid; print({'torch', 'torchvision', 'omegaconf'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

"""CER: the minimized objective, its invariants, both solvers, and the encoding."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from compressors import draws, message, rows, seen
from scipy.optimize import minimize

from fedbench.compression import _total_variation as tv
from fedbench.compression.cer import CER
from fedbench.compression.chain import Chain
from fedbench.compression.stc import STC
from fedbench.core.options import ConfigError


def noise(d: int, seed: int = 0) -> np.ndarray:
    """Steps and noise."""
    g = np.random.default_rng(seed)
    return g.normal(size=d) + np.repeat(g.normal(size=d // 10 + 1), 10)[:d]


def by_the_dual(g: np.ndarray, gamma: float) -> np.ndarray:
    """g - L^T s, s the minimizer of 0.5 ||g - L^T s||^2 within [-gamma, gamma]."""

    def value(s: np.ndarray) -> tuple[float, np.ndarray]:
        rest = g - tv.transposed(s)
        return 0.5 * float(rest @ rest), -tv.differences(rest)

    bounds = [(-gamma, gamma)] * len(g)
    found = minimize(value, np.zeros(len(g)), jac=True, method="L-BFGS-B", bounds=bounds,
                     options={"maxiter": 20000, "maxfun": 10**6, "ftol": 1e-16, "gtol": 1e-11})  # fmt: skip
    return g - tv.transposed(found.x)


def cost(v: np.ndarray, g: np.ndarray, gamma: float) -> float:
    return 0.5 * float(((v - g) ** 2).sum()) + gamma * float(np.abs(tv.differences(v)).sum())


GAMMAS = [0.05, 0.5, 3.0]


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("d", [1, 2, 5, 30, 100])
def test_exact_is_what_a_dual_solver_finds(d: int, gamma: float) -> None:
    g = noise(d, d)
    v, dual = tv.exact(g, gamma), by_the_dual(g, gamma)
    np.testing.assert_allclose(v, dual, atol=2e-5)
    assert cost(v, g, gamma) <= cost(dual, g, gamma) + 1e-12


def test_python_and_machine_code_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    g = noise(300)
    compiled = tv.exact(g, 0.7)
    monkeypatch.setattr(tv, "_compiled_solve", lambda: tv._solve)
    np.testing.assert_array_equal(tv.exact(g, 0.7), compiled)


def test_one_number_is_thresholded_softly() -> None:
    assert [float(tv.exact(np.array([g]), 1.0)[0]) for g in (3.0, -3.0, 0.5)] == [2.0, -2.0, 0.0]


def test_gamma_zero_is_the_identity_and_the_largest_one_gives_zero() -> None:
    for seed in range(5):
        g = noise(80, seed)
        np.testing.assert_array_equal(tv.exact(g, 0.0), g)
        most = tv.largest_gamma(g)
        assert most == np.abs(np.cumsum(g)).max()
        np.testing.assert_allclose(tv.exact(g, most), 0, atol=1e-12)
        assert np.abs(tv.exact(g, 0.99 * most)).max() > 1e-3


def test_invariants() -> None:
    """Odd; as large as what it is given; partial sums within gamma; no expansion; fewer pieces with a larger gamma."""
    g, other = noise(200, 1), noise(200, 2)
    v = tv.exact(g, 1.3)
    np.testing.assert_allclose(tv.exact(-g, 1.3), -v, atol=1e-12)
    np.testing.assert_allclose(tv.exact(5 * g, 1.3), 5 * tv.exact(g, 1.3 / 5), atol=1e-10)
    assert np.abs(np.cumsum(v) - np.cumsum(g)).max() <= 1.3 + 1e-9
    assert np.linalg.norm(v - tv.exact(other, 1.3)) <= np.linalg.norm(g - other)
    pieces = [np.count_nonzero(np.diff(tv.exact(g, gamma))) for gamma in (0.1, 1.0, 5.0)]
    assert pieces[0] > 2 * pieces[1] > 4 * pieces[2]


def test_the_released_smoothing() -> None:
    """20 solutions with I + k L^T L, k = eta gamma, against the dense matrix; no two numbers become equal."""
    g, L = noise(60), np.eye(60) - np.eye(60, k=1)
    inverse = np.linalg.inv(np.eye(60) + 0.05 * L.T @ L)
    expected = (np.linalg.matrix_power(inverse, 20) @ g).clip(g.min(), g.max())
    compressor = CER(gamma=50.0, gamma_rel=None, solver="smoothing")
    np.testing.assert_allclose(compressor.denoised(g), expected, atol=1e-10)
    assert len(set(compressor.denoised(g))) == 60


def test_blocks_are_denoised_by_themselves() -> None:
    g = noise(50)
    found = CER(gamma=0.8, gamma_rel=None, block=20).denoised(g)
    parts = [tv.exact(g[a : a + 20], 0.8) for a in (0, 20, 40)]
    np.testing.assert_array_equal(found, np.concatenate(parts))


def test_what_is_sent_is_pieces() -> None:
    """(3, 3, 1, 1, 1) at gamma 0.6: the first piece goes down by gamma / 2, the second up by gamma / 3 to its neighbour
    and down by as much to the 0 behind.  Two pieces of 32 + 3 bits."""
    result, bits = seen(CER(gamma=0.6, gamma_rel=None), rows([3, 3, 1, 1, 1]))
    torch.testing.assert_close(result, rows([2.7, 2.7, 1, 1, 1]))
    assert bits == [2 * 32 + 3 + 3]


def test_relative_gamma_is_a_share_of_the_largest() -> None:
    g = noise(90)
    found = CER(gamma_rel=0.25).denoised(g)
    np.testing.assert_allclose(found, tv.exact(g, 0.25 * tv.largest_gamma(g)), atol=1e-12)


@pytest.mark.parametrize("gamma", [0.0, 0.4])
def test_with_stc_behind_it(gamma: float) -> None:
    """At gamma = 0 the very bytes of STC, else those of STC of what is denoised."""
    x = torch.from_numpy(np.stack([noise(300, s) for s in range(3)])).float()
    chain = Chain([CER(gamma=gamma, gamma_rel=None, send="all"), STC(0.05)])
    plain, inner = STC(0.05), torch.from_numpy(np.stack([tv.exact(r.double().numpy(), gamma) for r in x])).float()
    for i in range(3):
        key = draws(1)
        assert chain.encode(x[i], key, message(300)) == plain.encode(inner[i], key, message(300))
        assert torch.equal(chain.decode(chain.encode(x[i], key, message(300)), message(300)),
                           plain(inner[i : i + 1], draws(1), message(300))[0][0])  # fmt: skip


def test_the_papers_own_iteration_with_its_threshold_mended() -> None:
    """(5) to (7) of the paper with threshold 1 / rho, at rho = 2, eta = 0.5: (y_t - v) / eta is ours, and with the
    printed threshold rho it is not."""
    g, rho, eta, gamma, d = noise(12, 3), 2.0, 0.5, 0.7, 12
    L = np.eye(d) - np.eye(d, k=1)

    def solved(threshold: float) -> np.ndarray:
        y, omega = np.zeros(d), np.zeros(d)
        for _ in range(40000):
            raw = L @ y - omega / rho
            r = np.sign(raw) * np.maximum(np.abs(raw) - threshold, 0)
            right = rho * eta * gamma * L.T @ (r + omega / rho) - eta * g
            y = np.linalg.solve(rho * eta * gamma * L.T @ L + np.eye(d), right)
            omega = omega + rho * (r - L @ y)
        return -y / eta

    np.testing.assert_allclose(solved(1 / rho), tv.exact(g, gamma), atol=1e-6)
    assert np.abs(solved(rho) - tv.exact(g, gamma)).max() > 0.05


@pytest.mark.parametrize("options", [{"gamma": 1.0}, {"gamma_rel": None}])
def test_one_gamma_is_wanted(options: Any) -> None:
    with pytest.raises(ConfigError, match="set exactly one of them to a number >= 0, and the other to null"):
        CER(**options)


@pytest.mark.slow
def test_a_million_numbers_take_ten_times_a_hundred_thousand() -> None:
    tv.exact(noise(100), 1.0)  # compiled
    seconds = []
    for d in (100_000, 1_000_000):
        g, start = noise(d), time.process_time()
        tv.exact(g, 5.0)
        seconds.append(time.process_time() - start)
    print(f"100,000: {seconds[0]:.3f} s, 1,000,000: {seconds[1]:.3f} s")
    assert seconds[1] < 25 * seconds[0] + 0.1


def test_a_chain_behind_it_is_no_contraction() -> None:
    """-5 and nineteen 10s: all are drawn to one number, of which STC then selects the first, whose sign was another."""
    chain = Chain([CER(gamma_rel=0.9, send="all"), STC(0.05)])
    x = rows([-5, *[10] * 19])
    result, _ = chain(x, draws(1), message(20))
    assert float((x - result).norm()) > float(x.norm()) and not chain.contractive
    assert Chain([STC(0.05)]).contractive and CER().contractive

"""--compare: the statistics are those of scipy and of loops over all signs, and the table says them of the runs."""

from __future__ import annotations

import csv
import io
import json
from itertools import product
from math import sqrt
from pathlib import Path

import numpy as np
import pandas
import pytest
from run_folders import BASE, make_run
from scipy import stats

from fedbench.report import statistics
from fedbench.report.command import main
from fedbench.report.paired_scores import Setting
from fedbench.report.ranking import ranks_of
from fedbench.report.scores import Options

NAN = float("nan")


# -- statistics ----------------------------------------------------------------------------------------------
def p_of_all_signs(differences: np.ndarray) -> float:
    """The two-sided p of the clustered signed-rank test, by a loop over the signs of seeds [S, N]."""
    kept = [(seed, value) for seed, row in enumerate(differences) for value in row if value and value == value]
    ranks = stats.rankdata([abs(value) for _, value in kept])
    sums = np.zeros(len(differences))
    for (seed, value), rank in zip(kept, ranks):
        sums[seed] += rank if value > 0 else -rank
    all_sums = [abs(np.dot(signs, sums)) for signs in product((-1, 1), repeat=len(sums))]
    return float(np.mean([value >= abs(sums.sum()) for value in all_sums]))


@pytest.mark.parametrize("seeds", [5, 6, 9, 12])
def test_with_a_client_per_seed_p_is_that_of_wilcoxon(seeds):
    rng = np.random.default_rng(seeds)
    for shift in (0, 0.5, 2):
        differences = rng.normal(shift, size=(seeds, 1))
        expected = stats.wilcoxon(differences[:, 0], method="exact").pvalue
        assert statistics.signed_rank_p(differences) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(6))
def test_p_with_ties_zeros_and_clients_without_score_is_that_of_all_signs(seed):
    rng = np.random.default_rng(seed)
    differences = np.round(rng.normal(0.3, size=(7, 5)) + rng.normal(size=(7, 1)), 1)
    differences[rng.random((7, 5)) < 0.2] = 0
    differences[:, 4] = NAN
    differences[2, 3] = NAN
    assert statistics.signed_rank_p(differences) == pytest.approx(p_of_all_signs(differences))


def test_ties_up_to_rounding_are_ties():
    """0.3 - 0.2 is a little less than 0.1, and 0.1 + 0.2 - 0.3 a little more than 0: mid-ranks 1.5, and no rank."""
    differences = np.array([[0.3 - 0.2, -0.1], [0.1 + 0.2 - 0.3, 0.5]])
    assert 0 < differences[1, 0] < 1e-12 and differences[0, 0] != 0.1
    assert list(statistics.signed_rank_sums(differences)) == [0, 3]


def test_random_signs_agree_with_all_signs():
    """17 seeds have 131,072 signs, more than are drawn; the standard error of p is at most 0.0016."""
    differences = np.random.default_rng(0).normal(0.7, size=(17, 1))
    expected = stats.wilcoxon(differences[:, 0], method="exact").pvalue
    assert 0.01 < expected < 0.5
    assert statistics.signed_rank_p(differences) == pytest.approx(expected, abs=0.006)


def test_size_with_correlated_clients():
    """Each seed has a random effect on all of its clients: a test that takes clients as independent is misled."""
    rng = np.random.default_rng(0)
    differences = rng.normal(size=(2000, 10, 20)) + rng.normal(size=(2000, 10, 1))
    rejected = (statistics.signed_rank_p(differences) <= 0.05).mean()
    assert abs(rejected - 0.05) <= 0.01
    naive = stats.wilcoxon(differences.reshape(2000, -1), axis=1, method="asymptotic").pvalue
    assert (naive <= 0.05).mean() > 0.4


def test_a_planted_difference_is_found():
    rng = np.random.default_rng(0)
    differences = 2 + rng.normal(size=(8, 20)) + 0.3 * rng.normal(size=(8, 1))
    assert statistics.signed_rank_p(differences) == statistics.smallest_p(8) == 2 / 256
    low, high = statistics.bootstrap_interval(differences.mean(axis=1))
    assert 1.5 < low < 2 < high < 2.5


def test_equal_runs():
    assert statistics.signed_rank_p(np.zeros((6, 4))) == 1
    assert statistics.bootstrap_interval(np.zeros(6)) == (0, 0)
    assert np.isnan(statistics.standardized_mean(np.zeros(6)))
    assert np.isnan(statistics.standardized_mean(np.array([0.1, 0.1 + 1e-15, 0.1])))


@pytest.mark.parametrize("seeds", [6, 18])
def test_swapped_methods_have_the_same_p_and_opposite_signs(seeds):
    differences = np.random.default_rng(1).normal(0.2, size=(seeds, 5))
    means = differences.mean(axis=1)
    assert statistics.signed_rank_p(differences) == statistics.signed_rank_p(-differences)
    low, high = statistics.bootstrap_interval(means)
    assert statistics.bootstrap_interval(-means) == pytest.approx((-high, -low))
    assert statistics.standardized_mean(-means) == -statistics.standardized_mean(means)


@pytest.mark.parametrize("seeds", [5, 10, 30])
def test_interval_is_that_of_a_bootstrap_by_hand(seeds):
    rng = np.random.default_rng(seeds)
    differences = rng.exponential(size=seeds)
    means = np.array([rng.choice(differences, seeds).mean() for _ in range(20_000)])
    expected = np.quantile(means, [0.025, 0.975])
    assert statistics.bootstrap_interval(differences) == pytest.approx(expected, abs=0.05 * np.ptp(expected))


def test_effect_is_the_mean_over_the_sample_deviation():
    differences = np.array([1.0, 2.0, 6.0])
    assert statistics.standardized_mean(differences) == pytest.approx(3 / sqrt((4 + 1 + 9) / 2))


def test_holm_by_hand():
    """Sorted: 4 x 0.005, 3 x 0.01, 2 x 0.03, 1 x 0.04, which may not be below the one before; at most 1."""
    assert statistics.holm(np.array([0.01, 0.04, 0.03, 0.005])) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert list(statistics.holm(np.array([0.6, 0.7]))) == [1, 1]
    assert list(statistics.holm(np.array([]))) == []


@pytest.mark.parametrize("comparisons", range(1, 40))
def test_as_many_seeds_as_needed_make_a_small_p_possible(comparisons):
    needed = statistics.seeds_needed(comparisons)
    assert comparisons * statistics.smallest_p(needed) <= 0.05 < comparisons * statistics.smallest_p(needed - 1)


@pytest.mark.parametrize(("methods", "q"), [(2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728), (10, 3.164)])
def test_critical_differences_are_those_of_demsar(methods, q):
    """Table 5 (a), and the example of Section 3.2.3 with 4 methods on 14 data sets."""
    expected = q * sqrt(methods * (methods + 1) / (6 * 14))
    assert statistics.critical_difference(methods, 14) == pytest.approx(expected, rel=1e-3)
    assert statistics.critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)


def test_ranks_and_friedman():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(8, 4)) + np.arange(4)
    ranks = statistics.ranks(values, lower_is_better=False)
    assert (ranks == 1 + (values[:, None, :] > values[:, :, None]).sum(axis=2)).all()
    assert (statistics.ranks(-values, lower_is_better=True) == ranks).all()
    assert list(statistics.ranks(np.array([[0.3, 0.1 + 0.2, 0.1]]), False)[0]) == [1.5, 1.5, 3]
    statistic, p = statistics.friedman(ranks)
    by_hand = 12 * 8 / (4 * 5) * ((ranks.mean(axis=0) ** 2).sum() - 4 * 5**2 / 4)  # Demsar, Section 3.2.2
    assert statistic == pytest.approx(by_hand)
    assert (statistic, p) == pytest.approx(tuple(stats.friedmanchisquare(*values.T)))
    assert statistics.friedman(np.full((6, 3), 2.0)) == (0, 1)


def test_sets_of_methods_that_do_not_differ():
    ranks = np.array([1.0, 1.5, 2.0, 3.2, 4.0])
    assert statistics.not_different(ranks, 1.2) == [(0, 2), (2, 3), (3, 4)]
    assert statistics.not_different(ranks, 0.4) == []
    assert statistics.not_different(ranks, 3.0) == [(0, 4)]


# -- command -------------------------------------------------------------------------------------------------
def gains_of_pgfed(seed: int) -> np.ndarray:
    """The differences of four clients to Local."""
    return np.array([0.11 + 0.01 * seed, 0.05, 0, -0.015])


def noise(seed: int) -> np.ndarray:
    """What a seed adds to the four clients."""
    return np.random.default_rng(seed).normal(scale=0.01, size=4)


def make_method(folder: Path, method: str, gains: tuple[float, ...], seeds: int = 6, **about) -> None:
    """Runs of a method over seeds: client i has BASE[i] + gains[i], and noise of the seed and method."""
    for seed in range(seeds):
        values = BASE + np.array(gains) + (noise(seed + 100 * len(method)) if any(gains) else 0)
        make_run(folder, method, seed, clients=np.array([BASE, values]), **about)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """PGFed is better than Local for two clients, equal for one and worse for one; ditto is Local."""
    folder = tmp_path / "sweep"
    make_method(folder, "local", (0, 0, 0, 0))
    make_method(folder, "ditto", (0, 0, 0, 0))
    for seed in range(6):
        values = BASE + gains_of_pgfed(seed)
        make_run(folder, "pgfed", seed, clients=np.array([BASE, values]))
    return folder


def rows_of(capsys, *args) -> list[dict[str, str]]:
    assert main([*map(str, args), "--format", "csv"]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def text_of(capsys, *args) -> str:
    assert main([*map(str, args)]) == 0
    return capsys.readouterr().out


def refusal_of(capsys, *args) -> str:
    assert main([*map(str, args)]) == 2
    return capsys.readouterr().err


def test_a_pair_by_hand(sweep, capsys):
    """The means differ by (0.145 + 0.01 s) / 4: mean 0.0425, population std 0.0025 sqrt(35 / 12)."""
    (row,) = rows_of(capsys, sweep, "--compare", "pgfed", "local")
    assert [row[key] for key in ("method", "against", "n", "better", "equal", "worse")] == [
        *("pgfed", "local", "6", "2", "1", "1")
    ]
    std = 0.0025 * sqrt(35 / 12)
    found = [float(row[key]) for key in ("difference_mean", "difference_std", "p", "p_holm", "effect")]
    assert found == pytest.approx([0.0425, std, 2 / 64, 2 / 64, 0.0425 / (std * sqrt(6 / 5))])
    expected = statistics.bootstrap_interval((0.145 + 0.01 * np.arange(6)) / 4)
    assert [float(row["low"]), float(row["high"])] == pytest.approx(expected)


def test_p_is_over_clients(tmp_path, capsys):
    """One client is far worse with one seed, whose mean is therefore negative, but not its sum of ranks."""
    differences = np.array([[0.1, 0.11, 0.12, 0.05 + 0.01 * seed] for seed in range(6)])
    differences[0, 3] = -0.5
    for seed in range(6):
        make_run(tmp_path, "pgfed", seed, clients=np.array([BASE, BASE + differences[seed]]))
        make_run(tmp_path, "local", seed, clients=np.array([BASE, BASE]))
    (row,) = rows_of(capsys, tmp_path, "--compare", "pgfed", "local")
    assert float(row["p"]) == pytest.approx(p_of_all_signs(np.round(differences, 9)))
    assert float(row["p"]) < stats.wilcoxon(differences.mean(axis=1)).pvalue


def test_swapping_and_direction(sweep, capsys):
    (swapped,) = rows_of(capsys, sweep, "--compare", "local", "pgfed")
    assert float(swapped["difference_mean"]) == pytest.approx(-0.0425)
    assert [swapped[key] for key in ("p", "better", "equal", "worse")] == ["0.03125", "1", "1", "2"]
    (loss,) = rows_of(capsys, sweep, "--compare", "pgfed", "local", "--metric", "personal/loss")
    assert float(loss["difference_mean"]) == pytest.approx(-0.0425)
    assert [loss[key] for key in ("p", "better", "equal", "worse")] == ["0.03125", "2", "1", "1"]
    text = text_of(capsys, sweep, "--compare", "pgfed", "local", "--metric", "personal/loss")
    assert "Lower values of personal/loss are better." in text and "-0.0425 ± 0.0043" in text


def test_one_method_is_compared_with_all_others(sweep, capsys):
    rows = rows_of(capsys, sweep, "--compare", "pgfed")
    assert [(row["method"], row["against"]) for row in rows] == [("pgfed", "ditto"), ("pgfed", "local")]
    assert [float(row["p_holm"]) for row in rows] == [2 * float(row["p"]) for row in rows] == [0.0625, 0.0625]
    rows = rows_of(capsys, sweep, "--compare", "pgfed", "local", "ditto")
    assert [(row["method"], row["against"]) for row in rows] == [
        *(("pgfed", "local"), ("pgfed", "ditto"), ("local", "ditto"))
    ]
    equal = rows[2]
    assert [float(equal[key]) for key in ("p", "low", "high", "equal")] == [1, 0, 0, 4] and equal["effect"] == ""


def test_text_for_readers(sweep, capsys):
    """Names of papers, percentage points, and the number of seeds that a correction for two pairs needs."""
    text = text_of(capsys, sweep, "--compare", "PGFed")
    assert text.startswith("differences of personal/accuracy (percentage points): digits, dirichlet partition, mlp")
    line = next(line for line in text.splitlines() if line.startswith("PGFed   Local"))
    assert line.split()[2:5] == ["4.25", "±", "0.43"] and line.endswith("2 / 1 / 1")
    assert "n = 6: no p (Holm) of 2 pairs below 0.0625 is possible; one below 0.05 needs 7 seeds." in text
    assert "at the last round" in text and "no p below" not in text


def test_json_has_null_where_there_is_no_value(sweep, capsys):
    assert main([str(sweep), "--compare", "local", "ditto", "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["effect"] is None and row["p"] == 1 and row["n"] == 6


def test_five_seeds_are_too_few_for_a_small_p(tmp_path, capsys):
    make_method(tmp_path, "pgfed", (0.1, 0.1, 0.1, 0.1), 5)
    make_method(tmp_path, "local", (0, 0, 0, 0), 5)
    text = text_of(capsys, tmp_path, "--compare", "pgfed", "local")
    assert "0.06250" in text and "n = 5: no p below 0.0625 is possible; a p below 0.05 needs 6 seeds." in text


@pytest.mark.parametrize("seeds", [1, 4])
def test_fewer_than_five_seeds_have_no_test(tmp_path, capsys, seeds):
    make_method(tmp_path, "pgfed", (0.1, 0.1, 0.1, 0.1), seeds)
    make_method(tmp_path, "local", (0, 0, 0, 0), seeds)
    (row,) = rows_of(capsys, tmp_path, "--compare", "pgfed")
    assert {row[key] for key in ("p", "p_holm", "low", "high")} == {""}
    assert row["n"] == str(seeds) and float(row["difference_mean"]) == pytest.approx(0.1, abs=0.02)
    text = text_of(capsys, tmp_path, "--compare", "pgfed")
    assert f"n = {seeds}: too few seeds for a test and an interval, which need at least 5" in text
    assert f"run {5 - seeds} more, or {6 - seeds} more for a p below 0.05" in text


def test_seeds_without_partner_are_named(sweep, capsys):
    make_run(sweep, "pgfed", 9)
    make_run(sweep, "local", 8, status="running")
    make_run(sweep, "ditto", 7)
    text = text_of(capsys, sweep, "--compare", "pgfed", "local")
    assert "Left out: PGFed with seed 9, because Local has no score with it." in text
    assert "seed 7" not in text and "1 unfinished runs are left out." in text


def test_the_round_of_best_val(tmp_path, capsys):
    """The first round has the best validation score of PGFed, where its clients have 0.2 more."""
    for seed in range(5):
        make_run(tmp_path, "pgfed", seed, (0.2, 0.0), summary={"best_val": {"round": 1, "values": {}}})
        make_run(tmp_path, "local", seed, (0.0, 0.1), summary={"best_val": {"round": 2, "values": {}}})
    (last,) = rows_of(capsys, tmp_path, "--compare", "pgfed", "local")
    (best_val,) = rows_of(capsys, tmp_path, "--compare", "pgfed", "local", "--select", "best_val")
    assert [float(row["difference_mean"]) for row in (last, best_val)] == pytest.approx([-0.1, 0.1])
    assert [row["better"] for row in (last, best_val)] == ["0", "4"]
    text = text_of(capsys, tmp_path, "--compare", "pgfed", "--select", "best_val")
    assert "at the round with the best validation score" in text


def test_clients_without_a_score_are_left_out(tmp_path, capsys):
    """Client 3 has no score in any run, and client 2 of seed 0 none under PGFed."""
    gain = np.array([0.1, 0.05, 0.02, NAN])
    for seed in range(5):
        ours = BASE + gain + noise(seed)
        if seed == 0:
            ours[2] = NAN
        for method, values in (("pgfed", ours), ("local", np.where(np.isnan(gain), NAN, BASE))):
            path = make_run(tmp_path, method, seed, clients=np.array([values, values]))
            write_mean(path, float(np.nanmean(values)))
    (row,) = rows_of(capsys, tmp_path, "--compare", "pgfed", "local")
    differences = np.array([gain + noise(seed) for seed in range(5)])
    differences[0, 2] = NAN
    assert float(row["p"]) == pytest.approx(p_of_all_signs(differences))
    assert [row[key] for key in ("better", "equal", "worse")] == ["3", "0", "0"]
    text = text_of(capsys, tmp_path, "--compare", "pgfed", "local")
    assert "PGFed against Local: p is over 2 of 4 clients (undefined scores, or eval.clients)." in text
    assert "the means are over different clients" in text


def write_mean(path: Path, mean: float) -> None:
    """Replace the accuracy of all rounds in metrics.csv."""
    file = path / "metrics.csv"
    rows = list(csv.DictReader(io.StringIO(file.read_text())))
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(row | {"personal/accuracy": mean} for row in rows)


def test_a_metric_without_scores_of_clients_is_tested_over_seeds(sweep, capsys):
    """Of seed s, the worst client has min(BASE + gains): a difference of 0.1 + 0.01 s below the next client."""
    args = (sweep, "--compare", "pgfed", "local", "--metric", "personal/accuracy_worst")
    (row,) = rows_of(capsys, *args)
    worst = np.array([np.min(BASE + gains_of_pgfed(seed)) - 0.5 for seed in range(6)])
    assert float(row["p"]) == pytest.approx(stats.wilcoxon(worst).pvalue)
    assert (row["better"], row["worse"]) == ("", "")
    text = text_of(capsys, *args)
    assert "p is over seeds alone, because there are no scores of single clients" in text


def test_fine_tuned_methods_have_a_dagger(tmp_path, capsys):
    make_method(tmp_path, "fedbabu", (0.1, 0, 0, 0), 5, summary={"tuned_at_end": True})
    make_method(tmp_path, "local", (0, 0, 0, 0), 5)
    text = text_of(capsys, tmp_path, "--compare", "local", "fedbabu")
    assert "FedBABU†" in text and "Local†" not in text and "† fine-tuned after the last round only" in text


def test_clients_of_different_partitions_are_not_counted(tmp_path, capsys):
    """The partition changes with the seed, for both methods alike: there is a test, but no client of all seeds."""
    for seed in range(5):
        for method, gain in (("pgfed", 0.1), ("local", 0.0)):
            make_run(tmp_path, method, seed, (gain,), summary={"partition_hash": f"p{seed}"})
    (row,) = rows_of(capsys, tmp_path, "--compare", "pgfed", "local")
    assert (row["p"], row["better"]) == ("0.0625", "")
    assert "the partitions of the seeds differ" in text_of(capsys, tmp_path, "--compare", "pgfed", "local")


@pytest.mark.parametrize("key", ["partition_hash", "data_hash"])
def test_runs_of_different_partitions_are_refused(sweep, capsys, key):
    for path in sweep.glob("pgfed-*"):
        summary = json.loads((path / "summary.json").read_text())
        (path / "summary.json").write_text(json.dumps({"data_hash": "data"} | summary))
    make_run(sweep, "fedper", 0, summary={key: "other"})
    assert key in refusal_of(capsys, sweep, "--compare", "pgfed", "fedper", "--group", "algorithm")
    assert len(rows_of(capsys, sweep, "--compare", "pgfed", "local", "--group", "algorithm")) == 1


def test_runs_that_differ_in_more_than_the_method(tmp_path, capsys):
    make_method(tmp_path, "pgfed", (0.1, 0, 0, 0), 5, config={"local": {"epochs": 5}, "optimizer": {"lr": 0.3}})
    make_method(tmp_path, "local", (0, 0, 0, 0), 5)
    text = text_of(capsys, tmp_path, "--compare", "pgfed", "local")
    assert "PGFed and Local differ in more than the method: local.epochs." in text


# -- names ---------------------------------------------------------------------------------------------------
@pytest.fixture
def mus(sweep: Path) -> Path:
    """PGFed with two further values of mu."""
    for mu in (0.1, 0.2):
        make_method(sweep, "pgfed", (mu, mu, mu, mu), config={"algorithm": {"mu": mu}})
    return sweep


@pytest.mark.parametrize("name", ["pgfed mu=0.2", "PGFed mu=0.2"])
def test_labels_name_one_of_several_groups(mus, capsys, name):
    (row,) = rows_of(capsys, mus, "--compare", name, "local")
    assert row["method"] == "pgfed mu=0.2" and float(row["difference_mean"]) == pytest.approx(0.2, abs=0.02)
    assert "PGFed mu=0.2" in text_of(capsys, mus, "--compare", name, "local")


def test_an_ambiguous_name_is_refused(mus, capsys):
    assert len(rows_of(capsys, mus, "--compare", "local")) == 4
    (folder,) = {path.parent for path in mus.glob("pgfed-0-*")}
    for path in folder.glob("pgfed-*"):
        if "mu:" not in (path / "config.yaml").read_text():
            (path / "summary.json").unlink()
    message = refusal_of(capsys, mus, "--compare", "pgfed", "local")
    assert message == (
        "fedbench: --compare pgfed: several groups of runs have this method: name one of 'pgfed mu=0.1', "
        "'pgfed mu=0.2'\n"
    )


def test_keys_of_group_name_methods_and_settings(mus, capsys):
    """mu is of the method and alpha of the setting; local has no mu and is not in the comparison."""
    for alpha in (0.1, 1.0):
        for mu in (1, 2):
            config = {"algorithm": {"mu": mu}, "partition": {"alpha": alpha}}
            make_method(mus / "more", "pgfed", (0.01 * mu,) * 4, config=config)
    group = ("--group", "algorithm.mu,partition.alpha")
    rows = rows_of(capsys, mus / "more", "--compare", "mu=2", "mu=1", *group)
    assert [(row["partition.alpha"], row["method"], row["n"]) for row in rows] == [
        *(("0.1", "algorithm.mu=2", "6"), ("1.0", "algorithm.mu=2", "6"))
    ]
    message = refusal_of(capsys, mus / "more", "--compare", "pgfed", "--group", "algorithm")
    assert "PGFed has 4 runs of seed 0, which differ in algorithm.mu, partition.alpha: add these keys" in message
    for keys, words in (("partition.alpha", "has no key of the methods"), ("algorithm,seed", "leave out seed")):
        assert words in refusal_of(capsys, mus / "more", "--compare", "pgfed", "--group", keys)


def test_a_method_with_another_option_in_each_setting_has_one_name(tmp_path, capsys):
    """mu is chosen for each alpha, as after tuning: pgfed is the name in both, and a note has the values."""
    for alpha, mu in ((0.1, 1), (1.0, 2)):
        partition = {"partition": {"alpha": alpha}}
        make_method(tmp_path, "pgfed", (0.01 * mu,) * 4, 5, config=partition | {"algorithm": {"mu": mu}})
        make_method(tmp_path, "local", (0, 0, 0, 0), 5, config=partition)
    rows = rows_of(capsys, tmp_path, "--compare", "pgfed", "local")
    assert [(row["alpha"], row["method"]) for row in rows] == [("0.1", "pgfed"), ("1.0", "pgfed")]
    text = text_of(capsys, tmp_path, "--compare", "pgfed", "local")
    assert "PGFed is PGFed mu=2 (in digits, dirichlet, mlp, alpha 1.0)." in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--compare", "pgfde"], "--compare pgfde: no finished run has this method; the runs have pgfed"),
        (["--compare", "pgfed", "PGFed"], "--compare pgfed PGFed names a method twice"),
        (["--compare", "pgfed", "--select", "best"], "chooses the round by test scores: choose last or best_val"),
        (
            ["--compare", "pgfed", "--select", "best_val"],
            "at the best_val round: run the methods with the same seeds and dataset.val_fraction",
        ),
        (["--compare", "pgfed", "local", "--target", "0.5"], "--compare pgfed local cannot be combined with --target"),
        (["--compare", "pgfed", "--paper", "x"], "--compare pgfed cannot be combined with --paper"),
        (["--compare", "pgfed", "--choose", "algorithm.mu"], "cannot be combined with --compare"),
        (["--compare", "pgfed", "--metric", "personal/nothing"], "no run has the metric personal/nothing"),
        (["--compare", "pgfed", "--figures", "x"], "needs at least 3 methods and 5 settings"),
    ],
)
def test_mistakes_are_one_sentence(sweep, capsys, args, words):
    message = refusal_of(capsys, sweep, *args)
    assert words in message and message.count("\n") == 1


def test_a_folder_after_the_flag_is_pointed_out(sweep, capsys):
    assert "folders come first" in refusal_of(capsys, sweep, "--compare", "pgfed", sweep.parent)


def test_a_method_alone_is_refused(tmp_path, capsys):
    make_method(tmp_path, "pgfed", (0, 0, 0, 0), 5)
    assert "no finished runs of another method" in refusal_of(capsys, tmp_path, "--compare", "pgfed")


# -- several settings ----------------------------------------------------------------------------------------
DATASETS = ("a", "b", "c", "d", "e", "f")


@pytest.fixture
def datasets(tmp_path: Path) -> Path:
    """Six data sets: PGFed is first in five and second in one, FedAvg always last."""
    folder = tmp_path / "sweep"
    for i, dataset in enumerate(DATASETS):
        about = {"config": {"choices": {"dataset": dataset}}, "summary": {"partition_hash": dataset}}
        for method, gain in (("pgfed", 0.1 if i else -0.1), ("local", 0.0), ("fedavg", -0.2)):
            for seed in range(2):
                make_run(folder, method, seed, (gain + (0.001 if method == "pgfed" else 0) * seed,), **about)
    return folder


def test_ranks_and_win_rates(datasets, capsys):
    """PGFed wins 10 of 12 settings and seeds against Local."""
    text = text_of(capsys, datasets, "--compare", "pgfed", "local", "fedavg")
    ranks = text[text.index("average ranks over 6 settings") :]
    lines = {line.split()[0]: line.split()[1:] for line in ranks.splitlines()[2:5]}
    assert lines == {
        "PGFed": ["1.17", "-", "83.3", "100.0"],
        "Local": ["1.83", "16.7", "-", "100.0"],
        "FedAvg": ["3.00", "0.0", "0.0", "-"],
    }
    statistic, p = stats.friedmanchisquare([1, 1, 1, 1, 1, 2], [2, 2, 2, 2, 2, 1], [3] * 6)
    assert f"chi-squared = {statistic:.2f}, p = {p:.2g}. Nemenyi's critical difference at 0.05 is 1.35" in text
    assert "independent" not in text and "may be called different" not in text
    assert len(rows_of(capsys, datasets, "--compare", "pgfed")) == 2 * 6
    loss = text_of(capsys, datasets, "--compare", "pgfed", "local", "fedavg", "--metric", "personal/loss")
    assert all(line in loss for line in ranks.splitlines()[2:5])


def test_ranks_are_of_seeds_that_all_methods_have():
    """With seed 0, a is better; over all of its seeds, its mean is worse than that of b."""
    means = pandas.DataFrame({"a": [0.5, 0.1], "b": [0.4, NAN]})
    setting = Setting("digits", dict.fromkeys(means), means, {})  # type: ignore[arg-type]
    assert ranks_of([setting], Options()).to_dict("records") == [{"a": 1, "b": 2}]


def test_ties_count_half(datasets, capsys):
    for dataset in DATASETS:
        about = {"config": {"choices": {"dataset": dataset}}, "summary": {"partition_hash": dataset}}
        for seed in range(2):
            make_run(datasets, "ditto", seed, (0.0,), **about)
    text = text_of(capsys, datasets, "--compare", "local", "ditto")
    lines = [line.split() for line in text[text.index("average ranks") :].splitlines()[2:4]]
    assert [line[1:] for line in lines] == [["1.50", "-", "50.0"], ["1.50", "50.0", "-"]]
    assert "No test of the ranks: it needs at least 3 methods and 5 settings with scores of all methods" in text


def test_settings_without_all_methods_are_not_in_the_ranks(datasets, capsys):
    make_run(datasets, "pgfed", 0, config={"choices": {"dataset": "g"}}, summary={"partition_hash": "g"})
    make_run(datasets, "local", 0, config={"choices": {"dataset": "g"}}, summary={"partition_hash": "g"})
    text = text_of(capsys, datasets, "--compare", "pgfed", "local", "fedavg")
    assert "average ranks over 6 settings" in text
    assert "Not in the ranks, because a method has no score there: g, dirichlet, mlp." in text


def test_settings_of_one_data_set_are_not_independent(tmp_path, capsys):
    for alpha in (0.1, 0.2, 0.3, 0.4, 0.5):
        for i, method in enumerate(("pgfed", "local", "fedavg")):
            about = {"config": {"partition": {"alpha": alpha}}, "summary": {"partition_hash": str(alpha)}}
            make_run(tmp_path, method, 0, (-0.1 * i,), **about)
    text = text_of(capsys, tmp_path, "--compare", "pgfed")
    assert "5 settings have 1 data set" in text
    for i, row in enumerate(rows_of(capsys, tmp_path, "--compare", "pgfed")):
        assert float(row["alpha"]) == pytest.approx(0.1 * (i // 2 + 1))


def test_critical_difference_diagram(datasets, capsys):
    """Ranks 1.17, 1.83 and 3: FedAvg and Local differ by 1.17 < 1.35, and FedAvg and PGFed by more."""
    pytest.importorskip("matplotlib")
    figure = datasets.parent / "figures" / "cd.svg"
    assert main([str(datasets), "--compare", "pgfed", "--figures", str(figure)]) == 0
    path = figure.parent / "cd_critical_difference.svg"
    assert f"figure: {path}" in capsys.readouterr().err
    text = path.read_text()
    for words in ("PGFed (1.17)", "Local (1.83)", "FedAvg (3.00)", "critical difference 1.35"):
        assert words in text
    assert text.count("stroke-width: 3") == 2

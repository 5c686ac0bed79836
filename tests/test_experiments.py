"""The experiment files: each composes, each printed cell has one, rows are trained as the papers' code does.

Marked slow: each of them run for real on generated pictures, shrunk by +experiment=debug.
"""

from __future__ import annotations

import csv
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from PIL import Image

from fedbench.app.compose import Composer, compose
from fedbench.commands import main
from fedbench.config.check import check
from fedbench.config.choices import with_choices
from fedbench.config.conf_tree import find_conf_dir, group_options
from fedbench.core.nested import flatten
from fedbench.core.options import ConfigError
from fedbench.core.settings import config_hash
from fedbench.data.base import EXTRA
from fedbench.report import paper
from fedbench.report.paper_metrics import is_measured
from fedbench.simulation import build
from fedbench.simulation.instantiate import component

NAMES = group_options("experiment")
BESIDE = ("debug", "reduced/", "setting/")
PROMPTS = "pfedmoap_"  # tables of models on which generated pictures say nothing
TEXTS = "fedpia_"  # tables of pictures with texts
KINDS = {"vqa": "vqa", "multilabel": "reports", "mixed": "mixed"}  # of synthetic_medvqa, by task
TOO_WIDE = {f"pfedmoap_table9_dfeature/d_{d}" for d in (128, 256, 512, 1024)} | {"pfedmoap_table8_nexperts/experts_30"}
ROWS = [name for name in NAMES if not name.startswith(BESIDE)]
TABLES = (
    *("fedsld_practical", "apple_pathological", "apple_practical", "apple_bandwidth"),
    *("pgfed_table1_cifar", "pgfed_organamnist", "pgfed_officehome", "pgfed_convergence", "pgfed_gain", "pgfed_speed"),
    *("pgfed_new_clients", "breast_cancer_real", "breast_cancer_synth"),
    *("pfedmoap_table1_clip", "pfedmoap_table2_cifar", "pfedmoap_table3_domainnet", "pfedmoap_table4_office"),
    *("pfednet_table2_luna16", "pfednet_table3_brats17_iou", "pfednet_table4_brats17_label_iou"),
    *("pfednet_table5_chd", "pfednet_table6_diabetes", "pfednet_table7_covid19"),
    *("fedpia_table1_vqa", "fedpia_table2_modality", "fedpia_table3_multilabel", "fedpia_table4_heterogeneous"),
    *("pfedmoap_table6_dp", "pfedmoap_table7_gating", "pfedmoap_table8_nexperts", "pfedmoap_table9_dfeature"),
)
KEPT, FRESH, PLAIN = (0.9, "never"), (0.9, "round"), (0.0, "round")  # momentum and its buffers, in the PGFed code
OPTIMIZERS = {
    **dict.fromkeys(("local", "fedavg", "feddyn", "fedper", "pgfed", "pgfed_mo"), KEPT),
    **dict.fromkeys(("fedbabu", "lg_fedavg"), FRESH),
    **dict.fromkeys(("fedrep", "apfl", "fedrod", "fedfomo", "per_fedavg", "pfedme"), PLAIN),
}


COMPOSER = Composer()


@functools.cache
def composed(name: str) -> dict[str, Any]:
    """The checked config of an experiment file."""
    full = COMPOSER.compose([f"+experiment={name}"])
    return check(with_choices(full, full.hydra))


@pytest.fixture(scope="module")
def known() -> list[paper.Experiment]:
    return paper.experiments([find_conf_dir()])


def answered(block: dict[str, Any], table: str) -> list[dict[str, str]]:
    return [row for row in paper.read_table(table) if is_measured(row["metric"]) and paper.matches(block, table, row)]


FAMILIES = sorted({name.split("/")[0] for name in NAMES})


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_experiment_composes(family: str, every: int, known: list[paper.Experiment]) -> None:
    """To what the report, which must not need Hydra to say what to run, reads in the files by itself.  In the default
    tests the first, ninth ... file of a family."""
    names = [name for name in NAMES if name.split("/")[0] == family][::every]
    reported = {experiment.name: experiment.paper for experiment in known}
    for name in names:
        block = composed(name)["paper"]
        assert (block is not None) == (name in reported), name
        for column, value in (block or {}).items():
            said = reported[name][column]
            assert value == said or paper.REFERENCE.match(str(said)), (name, column)


@pytest.mark.parametrize("table", TABLES)
def test_every_printed_cell_has_an_experiment(table: str, known: list[paper.Experiment]) -> None:
    own = [e for e in known if e.name.startswith(f"{table}/")]
    assert own
    for row in paper.read_table(table):
        if is_measured(row["metric"]):
            assert any(paper.matches(e.paper, table, row) for e in own), row


def test_the_rows_of_an_ablation_are_their_own_and_those_of_other_tables(known: list[paper.Experiment]) -> None:
    """FedPIA's Table 5: two of its rows are the rows of Houlsby's adapter in the tasks' tables, for both backbones."""
    table, found = "fedpia_table5_ablation", {}
    for row in paper.read_table(table):
        for e in known:
            if paper.matches(e.paper, table, row):
                assert found.setdefault((row["setting"], row["method"]), e.name) == e.name
    assert len(found) == 5 * 5 * 2 == len(paper.read_table(table))
    for backbone in ("vilt", "albef"):
        assert found[f"task1_{backbone}", "w/o any PIA"] == "fedpia_table1_vqa/houlsby"
        assert found[f"task4_{backbone}", "FedPIA"] == "fedpia_table3_multilabel/fedpia_houlsby"
        assert found[f"task3_{backbone}", "w/o client PIA"] == "fedpia_table5_ablation/task3_no_client"


@pytest.mark.parametrize("setting, clients", [("task3", "4"), ("task4", "10")])
@pytest.mark.parametrize("backbone, model", [("vilt", "vilt_b32"), ("albef", "albef_b16")])
def test_a_cell_of_either_backbone_has_its_model(
    setting: str, clients: str, backbone: str, model: str, known: list[paper.Experiment]
) -> None:
    """Whose overrides make a run that answers it, and none of the other backbone's or task's cells."""
    table, name = "fedpia_table5_ablation", "fedpia_table3_multilabel/houlsby"
    cells = [r for r in paper.read_table(table) if r["method"] == "w/o any PIA"]
    (row,) = (r for r in cells if r["setting"] == f"{setting}_{backbone}")
    given = next(e for e in known if e.name == name).overrides(row)
    assert given == [f"partition.num_clients={clients}", f"model={model}"]
    values = check(compose([f"+experiment={name}", *given]))
    assert values["choices"]["model"] == model
    run: Any = SimpleNamespace(config=values, flat_config=flatten(values))
    assert [r for r in cells if paper.matches(paper.paper_of(run), table, r)] == [row]


@pytest.mark.parametrize(
    "row",
    [
        "classifier",
        "fedpia_compacter",
        *(
            pytest.param(r, marks=pytest.mark.slow)
            for r in ("promptfl_5", "lora", "full", "feddat_parallel", "layernorm")
        ),
    ],
)
def test_rows_run_on_albef(row: str, tmp_path: Path) -> None:
    asked = [f"+experiment=[fedpia_table1_vqa/{row},debug_vilt]", "model=albef_tiny", f"output_dir={tmp_path}"]
    assert main([*asked, "hardware.executor=vmap"]) == 0


@pytest.mark.parametrize("name", ROWS)
def test_a_row_answers_cells_of_its_table(name: str, known: list[paper.Experiment]) -> None:
    mine = next(e for e in known if e.name == name)
    assert answered(mine.paper, name.split("/")[0]) or name == "pgfed_gain/local"


with (Path(__file__).parent / "experiment_hashes.csv").open(encoding="utf-8", newline="") as file:
    HASHES = {row["experiment"]: row["config_hash"] for row in csv.DictReader(file)}


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.slow)])
def test_an_experiment_composes_to_the_configuration_of_its_stored_runs(every: int, monkeypatch) -> None:
    """Their hashes, by which a sweep finds its finished cells; in the default tests those of one in twenty."""
    monkeypatch.delenv("FEDBENCH_DATA", raising=False)
    for name in [*HASHES][::every]:
        full = COMPOSER.compose([f"+experiment={name}"])
        assert config_hash(with_choices(full, full.hydra)) == HASHES[name], name


def test_the_overrides_of_a_cell_make_a_run_that_answers_it(known: list[paper.Experiment]) -> None:
    row = next(r for r in paper.read_table("pgfed_table1_cifar") if (r["dataset"], r["clients"]) == ("CIFAR100", "50"))
    experiment = next(e for e in known if e.name == "pgfed_table1_cifar/local")
    given = experiment.overrides(row)
    assert given == ["dataset=cifar100", "partition.num_clients=50"]
    values = check(compose([f"+experiment={experiment.name}", *given]))
    assert (values["choices"]["dataset"], values["paper"]["clients"]) == ("cifar100", 50)


@pytest.mark.parametrize("row", OPTIMIZERS)
def test_optimizers_of_table_1_are_those_of_the_released_code(row: str) -> None:
    tables = ("pgfed_table1_cifar", "pgfed_organamnist/25", "pgfed_officehome", "pgfed_gain", "pgfed_new_clients")
    for name in (f"{table}/{row}" for table in tables):
        if name in NAMES:
            found = composed(name)["optimizer"]
            assert (found["momentum"], found["reset"]) == OPTIMIZERS[row], name
            assert found["lr"] == 0.005
            assert found["weight_decay"] == (0.001 if row == "pfedme" else 0)


def test_quirks_of_the_released_codes() -> None:
    table = "pgfed_table1_cifar"
    expected = {
        f"{table}/fedbabu": {"finetune_head": "zero", "finetune_epochs": 1, "finetune_lr": 0.001},
        f"{table}/pfedme": {"lam": 1.0, "deploy": "w"},
        f"{table}/lg_fedavg": {"update": "alternate", "frozen_momentum_drift": True},
        f"{table}/fedfomo": {"models": 8, "reference": "aggregated"},
        f"{table}/pgfed_mo": {"beta": 0.5, "drop_last": True},
        "apple_practical/apple": {"mu": 0.1},
        "apple_practical/apple_mu0": {"mu": 0.0},
        "apple_bandwidth/practical/apple_m2": {"mu": 0.0, "bandwidth": 2, "selection": "uniform"},
        "apple_bandwidth/pathological/fedfomo_m5": {"models": 5},
    }
    for name, options in expected.items():
        found = composed(name)["algorithm"]
        assert {key: found[key] for key in options} == options, name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pgfed_table1_cifar/pgfed", (150, 0.25, 5, 10, True, "merged", 0.25, 0.0, 25, 1, 0.3)),
        ("pgfed_organamnist/25/pgfed", (150, 0.5, 5, 10, True, "merged", 0.25, 0.0, 25, 1, 1.0)),
        ("pgfed_organamnist/100/pgfed", (150, 0.25, 5, 10, True, "merged", 0.25, 0.0, 100, 1, 0.3)),
        ("pgfed_officehome/pgfed", (150, 0.25, 5, 10, True, "merged", 0.15, 0.0, None, 42, 0.3)),
        ("apple_practical/apple", (160, 1.0, 5, 256, False, "published", 0.25, 0.15, 12, 42, None)),
    ],
)
def test_protocols(name: str, expected: tuple) -> None:
    v = composed(name)
    data, parts, local = v["dataset"], v["partition"], v["local"]
    found = (v["rounds"], v["sample_rate"], local["epochs"], local["batch_size"], local["drop_last"])
    found += (data["split"], data["test_fraction"], data["val_fraction"])
    assert (*found, parts["num_clients"], parts["seed"], parts.get("alpha")) == expected


def test_the_data_sets_of_apple() -> None:
    for name, more in (("cifar10", []), ("organamnist", ["stratified", 0.2])):
        data = check(compose(["+experiment=apple_practical/local", f"dataset=apple/{name}"]))["dataset"]
        assert data["val_fraction"] == 0.15
        assert [data["split"], data["test_fraction"]] == more or (data["split"], data["resize"]) == ("published", 28)


def test_a_reduced_setting_goes_beside_a_row() -> None:
    values = check(compose(["+experiment=[apple_practical/apple,reduced/tenth]"]))
    assert values["choices"]["experiment"] == "apple_practical/apple,reduced/tenth"
    assert (values["rounds"], values["local"]["epochs"], values["dataset"]["subset"]) == (20, 1, 0.1)
    assert values["partition"]["num_clients"] == 12


def test_glob_stands_for_every_row_of_a_table() -> None:
    composer = Composer()
    rows = [name for name in NAMES if name.startswith("fedsld_practical/")]
    text = "+experiment=[glob(fedsld_practical/*),reduced/tenth]"
    assert composer.expand([text, "seed=0"]) == [
        "+experiment=" + ",".join(f"[{row},reduced/tenth]" for row in rows), "seed=0"
    ]  # fmt: skip
    assert composer.expand(["+experiment=glob(fedsld_practical/fedsld)"]) == ["+experiment=fedsld_practical/fedsld"]
    assert len(composer.run_overrides(composer.expand([text]))) == 3
    both = composer.expand(["+experiment=[glob(fedsld_practical/*),debug],glob(pgfed_gain/*),debug"])
    assert len(composer.run_overrides(both)) == 3 + 8 + 1
    with pytest.raises(ConfigError, match="matches no option; the options are apple_bandwidth"):
        composer.expand(["+experiment=glob(nothing/*)"])


TABLES_WITH_ROWS = sorted({name.split("/")[0] for name in ROWS})


@pytest.mark.parametrize(  # every second one by default
    "family", [pytest.param(f, marks=pytest.mark.slow if i % 2 else ()) for i, f in enumerate(TABLES_WITH_ROWS)]
)
def test_debug_fits_every_table(family: str) -> None:
    name = next(name for name in ROWS if name.startswith(f"{family}/"))
    values = check(compose([f"+experiment=[{name},{small(name)}]", *more(name)]))
    made = {"debug": "generated", "debug_prompt": "digits_clip", "debug_vilt": "synthetic_medvqa"}[small(name)]
    assert (values["rounds"], values["choices"]["dataset"], values["paper"]) == (2, made, None)


def small(name: str) -> str:
    """What goes beside a row to make it run in seconds."""
    return "debug_prompt" if name.startswith(PROMPTS) else "debug_vilt" if name.startswith(TEXTS) else "debug"


def more(name: str) -> list[str]:
    """What a row of pictures with texts needs beside that; debug_vilt has sites, whatever the row deals out."""
    if not name.startswith(TEXTS):
        return []
    choices = composed(name)["choices"]
    own = [] if choices["partition"] == "domain" else [f"partition={choices['partition']}", "partition.num_clients=4"]
    return [f"dataset.kind={KINDS[choices['task']]}", *own]


@pytest.mark.parametrize("kind", ["vqa", "reports", "mixed"])
def test_debug_on_pictures_with_texts_runs_alone_and_beside_a_row_by_its_sites(kind: str) -> None:
    for beside in ("debug_vilt", "[fedpia_table3_multilabel/houlsby,debug_vilt]"):
        cfg = compose([f"+experiment={beside}", f"dataset.kind={kind}"])
        split = build.partition(cfg, build.data(cfg))
        assert (cfg.choices.partition, split.num_clients) == ("domain", 5)


def draw(path: Path, grey: int) -> None:
    """A picture of one grey."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8), grey % 256).save(path)


def mammograms(folder: Path) -> None:
    """The folders of both settings of the case study: 4 silos of 3 cancers and 24 normals, 2 patients of a silo
    having two pictures each, and for either setting 2 synthesized cancers per silo."""
    machines, sites = ("49", "48", "29", "21"), ("RSNA Site A", "RSNA Site B", "CBIS-DDSM", "CMMD")
    first, second = [["patient_id", "image_id", "machine_id", "cancer"]], [["image", "label", "patient", "silo"]]
    for silo in range(4):
        for k in range(27):
            patient, cancer = 100 * silo + max(k, 2), int(k % 9 == 0)
            first.append([str(patient), str(k), machines[silo], str(cancer)])
            second.append([f"p/{patient}_{k}.png", ("normal", "cancer")[cancer], str(patient), sites[silo]])
            draw(folder / "rsna" / "train_images" / f"{patient}_{k}.png", silo + k)
            draw(folder / "breast_cancer" / "p" / f"{patient}_{k}.png", silo + k)
        for k in range(2):
            draw(folder / "breast_cancer" / "synthesized_machines" / machines[silo] / "1" / f"{k}.png", k)
            draw(folder / "breast_cancer" / "synthesized_sites" / sites[silo] / "cancer" / f"{k}.png", k)
    for path, rows in (("rsna/train.csv", first), ("breast_cancer/breast_cancer.csv", second)):
        (folder / path).write_text("".join(",".join(row) + "\n" for row in rows))


@pytest.mark.parametrize("setting", ["1", "2"])
def test_the_case_study_reads_folders_of_its_layout(setting: str, tmp_path: Path) -> None:
    """Setting 1 keeps 4, 6, 6, 8 normals per cancer of 3; setting 2 keeps 4 and 6, and all 24 of the others."""
    mammograms(tmp_path)
    sizes = [15, 21, 21, 27] if setting == "1" else [15, 21, 27, 27]
    for table, extra in (("breast_cancer_real", 0), ("breast_cancer_synth", 2)):
        cfg = compose([f"+experiment={table}/{setting}/pgfed", f"data_dir={tmp_path}", "dataset.resize=32"])
        arrays = build.data(cfg)
        split = build.partition(cfg, arrays)
        assert arrays.num_classes == 2
        assert (split.train.sizes + split.test.sizes).tolist() == [size + extra for size in sizes]
        assert not (arrays.split[split.test.indices] == EXTRA).any()


def test_office_home_reads_folders_of_its_layout(tmp_path: Path) -> None:
    for domain in ("Art", "Clipart", "Product", "Real World"):
        for k in range(60):
            draw(tmp_path / "OfficeHomeDataset_10072016" / domain / f"kind{k % 3}" / f"{k}.png", k)
    cfg = compose(["+experiment=pgfed_officehome/pgfed", f"data_dir={tmp_path}", "partition.min_size=4"])
    arrays = build.data(cfg)
    split = build.partition(cfg, arrays)
    assert (split.num_clients, arrays.domain_names) == (20, ["Art", "Clipart", "Product", "Real World"])
    assert arrays.domain is not None
    assert all(set(arrays.domain[split.train[i]]) == {i // 5} for i in range(20))


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_every_row_runs_under_debug(name: str, tmp_path: Path) -> None:
    refused = name in TOO_WIDE  # for features of 64 numbers, and for 25 clients
    asked = [f"+experiment=[{name},{small(name)}]", *more(name), f"output_dir={tmp_path}", f"data_dir={tmp_path}"]
    assert main([*asked, "hardware.executor=loop"]) == (2 if refused else 0)
    if refused:
        return
    statuses = [yaml.safe_load(path.read_text())["status"] for path in tmp_path.rglob("status.json")]
    assert statuses == ["finished"]


@pytest.mark.parametrize("row", ["feddat_houlsby", "feddat_adapterfusion", "houlsby"])
def test_losses_of_fedpias_table_3_are_summed_over_labels(row: str) -> None:
    """As FedDAT's code sums them, beside its distillation; Tables 1 and 4 have tasks that sum."""
    values = composed(f"fedpia_table3_multilabel/{row}")
    assert values["task"]["_target_"].endswith("MultiLabel") and values["task"]["loss"] == "bce_sum"
    assert composed(f"fedpia_table1_vqa/{row}")["task"]["loss"] == "bce_sum"
    assert values["adapter"]["places"] == (["block"] if "fusion" in row else ["attention", "mlp"])


@pytest.mark.parametrize("table", ["breast_cancer_real", "breast_cancer_synth"])
@pytest.mark.parametrize("setting", ["1", "2"])
def test_the_case_study_goes_by_auc(table: str, setting: str) -> None:
    """As its tables do: on the closing screen, in the choice of the best round and in reports."""
    cfg = compose([f"+experiment=[{table}/{setting}/pgfed,reduced/pneumonia]"])
    assert check(cfg)["task"]["primary"] == "auc"
    assert component(cfg, "task").for_targets("classification").primary == "auc"

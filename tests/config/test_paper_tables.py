"""Rows of printed tables are experiments, in our conf folder and in the user's."""

import re
from pathlib import Path

import pytest
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError

from fedbench.app.compose import Composer, compose
from fedbench.app.help import requested_help
from fedbench.app.paper_source import PaperSource, source_path
from fedbench.commands import main
from fedbench.config.conf_tree import conf_dirs, find_conf_dir, group_options, keys_set
from fedbench.config.paper_tables import find_row, read_row, read_tables
from fedbench.core.options import ConfigError

TABLE = """
title: Ours, Table 1
common: {base: setting/pgfed_cifar, rounds: 3}
rows:
  one: {method: FedAvg, algorithm: fedavg, note: a remark}
  deep/two:
    method: PGFed
    algorithm: pgfed
    algorithm.mu: 0.3
    rounds: 4
    paper.setting: ours
  three: [mine/one, debug]
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    """A --config-dir with a table of three rows."""
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper" / "mine.yaml").write_text(TABLE)
    return str(tmp_path)


def test_a_row_is_an_experiment(own: str) -> None:
    cfg = compose(["+experiment=mine/deep/two", "local.epochs=7"], own)
    assert (cfg.choices.algorithm, cfg.algorithm.mu, cfg.rounds, cfg.local.epochs) == ("pgfed", 0.3, 4, 7)
    assert (cfg.paper.table, cfg.paper.method, cfg.paper.setting) == ("mine", "PGFed", "ours")
    assert cfg.paper.clients == cfg.partition.num_clients  # of its base
    assert keys_set("experiment/mine/deep/two", "algorithm", conf_dirs(own)) == {"mu": "0.3"}


def test_a_row_may_be_the_names_of_experiments(own: str) -> None:
    cfg = compose(["+experiment=mine/three"], own)
    assert (cfg.choices.algorithm, cfg.choices.dataset, cfg.rounds) == ("fedavg", "generated", 3)
    composer = Composer(own)
    expanded = composer.expand(["+experiment=[glob(mine/*),reduced/tenth]"])
    rows = [f"[mine/{row},reduced/tenth]" for row in ("deep/two", "one", "three")]
    assert expanded == [f"+experiment={','.join(rows)}"]


def test_help_and_cfg_show_a_row(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = requested_help(["--config-dir", own, "experiment=mine/one"])
    assert "  # Ours, Table 1, row FedAvg\n  # a remark\n" in text and "experiment=setting/pgfed_cifar\n" in text
    assert main(["--config-dir", own, "+experiment=mine/deep/two", "--cfg", "job"]) == 0
    assert "\n  mu: 0.3\n" in capsys.readouterr().out
    assert main(["--config-dir", own, "+experiment=mine/on"]) == 2
    said = capsys.readouterr().err
    assert "experiment=mine/on is not an option: did you mean +experiment=mine/one" in said


def test_a_file_goes_before_a_row_of_its_name(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    (Path(own) / "experiment" / "mine").mkdir(parents=True)
    (Path(own) / "experiment" / "mine" / "one.yaml").write_text("# @package _global_\nrounds: 9\n")
    assert compose(["+experiment=mine/one"], own).rounds == 9
    assert main(["--config-dir", own, "+experiment=mine/one", "--cfg", "job"]) == 0
    assert "\nrounds: 9\n" in capsys.readouterr().out


def test_the_source_lists_tables_and_rows() -> None:
    source = PaperSource("fedbench", source_path([find_conf_dir()]))
    assert source.available() and source.is_group("experiment/apple_practical") and not source.is_group("model")
    assert "apple_practical" in source.list("experiment", ObjectType.GROUP)
    assert source.list("experiment", ObjectType.CONFIG) == []
    rows = source.list("experiment/apple_practical", None)
    assert rows and all(source.is_config(f"experiment/apple_practical/{row}") for row in rows)
    with pytest.raises(ConfigLoadError, match="is not a row"):
        source.load_config("experiment/apple_practical/nothing")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("title: x\n", "mine.yaml is not a table: it needs the key rows"),
        ("rows: {a: {}}\ncomon: {}\n", "mine.yaml has the unknown key comon; a table has title, remarks,"),
        (
            "rows: {a: 3}\n",
            "mine.yaml: row a must be a mapping of keys, or the name or list of the experiments that it extends",
        ),
        ("rows: {a: [}\n", "mine.yaml cannot be read"),
    ],
)
def test_mistakes_in_a_table(own: str, text: str, sentence: str) -> None:
    (Path(own) / "paper" / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        compose(["+experiment=mine/a"], own)


def test_every_table_says_how_to_run_it() -> None:
    tables = read_tables([find_conf_dir()])
    for name, table in tables.items():
        assert table["title"] and f"'+experiment=glob({name}/*)'" in table["command"], name
        assert all(f"{name}/{row}" in group_options("experiment") for row in table["rows"]), name
        keys = {key for row in table["rows"] for key in find_row(f"{name}/{row}", [find_conf_dir()]) or ()}
        assert all(isinstance(key, str) and re.fullmatch(r"[a-z_]\w*(\.\w+)*", key) for key in keys), name
    assert read_row("pgfed_table1_cifar/nothing", [find_conf_dir()]) is None

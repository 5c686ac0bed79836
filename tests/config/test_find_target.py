"""A ``_target_`` is imported, or one sentence says why it cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedbench.config.find_target import find_target
from fedbench.core.options import ConfigError

FILES = {
    "targets/__init__.py": "from .net import Net, made",
    "targets/net.py": "import os\nclass Net:\n    @classmethod\n    def small(cls): ...\ndef made(): ...\nvalue = 3\n",
    "targets/same.py": "",
    "targets/fails.py": "import os\nwidth = 1 / 0\n",
    "targets/needs.py": "import nothing_there\n",
    "targets/ends.py": "raise SystemExit(3)\n",
    "targets/broken.py": "class Net:\n  def\n",
    "plain_folder/below/net.py": "class Net: ...\n",
}


@pytest.fixture(scope="module", autouse=True)
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("targets")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("targets.Net", "Net"),
        ("targets.net.Net", "Net"),
        ("targets.net.Net.small", "small"),
        ("targets.made", "made"),
        ("plain_folder.below.net.Net", "Net"),
    ],
)
def test_what_a_target_names_is_imported(target: str, name: str) -> None:
    assert find_target(target, "k").__name__ == name


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("targets.net.Nte", "k: targets.net has no Nte; did you mean Net?"),
        ("targets.net.xyzzy", "k: targets.net has no xyzzy; it has Net, made"),
        ("targets.nett.Net", "k: targets has no nett.Net; did you mean net?"),
        ("targets.net.value", "k=targets.net.value is not a class or function"),
        ("targets.net.os", "k=targets.net.os is a module: add the name of a class in it, as in targets.net.os.Class"),
        ("targets.same", "k=targets.same is a module: add the name of a class in it, as in targets.same.Class"),
        ("plain_folder.below", "k: there is no module for 'plain_folder.below': write package.module.Class"),
        ("nowhere.Net", "k: there is no module for 'nowhere.Net': write package.module.Class"),
        ("Net", "k: there is no module for 'Net'"),
        (".net.Net", "k: there is no module for '.net.Net'"),
        (
            "targets.fails.Net",
            "targets.fails cannot be imported: ZeroDivisionError: division by zero (FILE, line 2)",
        ),
        (
            "targets.needs.Net",
            "cannot be imported: ModuleNotFoundError: No module named 'nothing_there' (FILE, ",
        ),
        ("targets.ends.Net", "k: targets.ends cannot be imported: SystemExit: 3 (FILE, line 1)"),
        ("targets.broken.Net", "k: targets.broken cannot be imported: SyntaxError: invalid syntax (FILE, line 2)"),
    ],
)
def test_a_target_that_is_not_there_is_one_sentence(target: str, words: str, files: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        find_target(target, "k")
    path = files.joinpath(*target.split(".")[:-1]).with_suffix(".py")
    assert words in str(caught.value).replace(str(path), "FILE")

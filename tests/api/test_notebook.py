"""docs/notebook.ipynb is stored without outputs, and runs from its first cell to its last."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 5 and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    for cell in code:
        compile("".join(cell["source"]), "cell", "exec")


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat: pip install nbclient nbformat ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient: pip install nbclient nbformat ipykernel")
    pytest.importorskip("ipykernel", reason="needs ipykernel: pip install nbclient nbformat ipykernel")
    pytest.importorskip("pandas", reason="needs pandas")
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    kernel = tmp_path / "jupyter" / "kernels" / "python3"  # this Python, whatever kernels the machine has
    kernel.mkdir(parents=True)
    start = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": start, "display_name": "here", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "work").mkdir()
    shutil.copy(NOTEBOOK, tmp_path / "work")
    notebook = nbformat.read(tmp_path / "work" / NOTEBOOK.name, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path / "work")}}
    )
    client.execute()
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    text = json.dumps(outputs)
    assert (
        str(tmp_path) not in text
        and str(ROOT) not in text
        and not any(o.output_type == "error" for c in outputs for o in c)
    )
    assert "<th>status</th><td>finished</td>" in text and "algorithm=pgfde is not an option" in text
    assert sum("image/png" in o.get("data", {}) for c in outputs for o in c) == 2
    run = outputs[1]
    progress = [o.data["text/plain"] for o in run if o.output_type == "display_data"]
    assert len(progress) == 1 and progress[0].startswith("round 10/10")  # one line, redrawn
    assert not any("round " in o.get("text", "") for o in run)

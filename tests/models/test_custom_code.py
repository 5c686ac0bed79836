"""Folders of transformers that contain Python code: they are refused without a question, and the code does not run."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from fedbench.core.options import ConfigError
from fedbench.data.text._tokens import _folder_tokenizer
from fedbench.models.hf_causal import HFCausal
from fedbench.models.hf_models import HFModel
from fedbench.models.hf_text import HFText

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
READERS: dict[str, Callable[[str], object]] = {
    "causal": lambda folder: HFCausal({"text": (8,)}, 16, weights=folder),
    "text": lambda folder: HFText({"text": (8,), "mask": (8,)}, 2, weights=folder),
    "images": lambda folder: HFModel((3, 32, 32), 2, weights=folder),
    "tokenizer": _folder_tokenizer,
}
AUTO_CLASSES = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForImageClassification")


@pytest.mark.parametrize("reader", READERS)
def test_code_in_a_folder_does_not_run(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, marker = tmp_path / "network", tmp_path / "ran"
    folder.mkdir()
    (folder / "theirs.py").write_text(f"open({str(marker)!r}, 'w')\n")
    auto_map = {**dict.fromkeys(AUTO_CLASSES, "theirs.Class"), "AutoTokenizer": ["theirs.Class", None]}
    entries = json.dumps({"model_type": "theirs", "auto_map": auto_map, "tokenizer_class": "Theirs"})
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text(entries)
    questions = []
    monkeypatch.setattr("builtins.input", lambda text="": questions.append(text) or "y")
    with pytest.raises(ConfigError, match="network"):
        READERS[reader](str(folder))
    assert not marker.exists() and not questions

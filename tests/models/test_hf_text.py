"""Text encoders of transformers: features of the library, padding, many clients at once, what is refused."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import all_clients, arrays_of, close, engine, seeded, split_of
from torch import Tensor

from fedbench.adapters.lora import LoRA, LoRALinear
from fedbench.commands import main
from fedbench.core.options import ConfigError
from fedbench.models.hf_models import HFModel
from fedbench.models.hf_text import HFText

pytestmark = pytest.mark.skipif(not find_spec("transformers"), reason="needs transformers")
T, VOCAB = 6, 9
SHAPE = {"text": (T,), "mask": (T,)}
BERT = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES: dict[str, dict[str, Any]] = {
    "bert": {**BERT, "vocab_size": VOCAB},
    "roberta": {**BERT, "vocab_size": VOCAB, "max_position_embeddings": 20},
    "distilbert": {"dim": 8, "hidden_dim": 12, "n_layers": 2, "n_heads": 2, "vocab_size": VOCAB},
    "deberta-v2": {**BERT, "vocab_size": VOCAB},
}
KINDS = tuple(SIZES)


def inputs(rows: int = 4) -> dict[str, Tensor]:
    """Tokens 2 to 8 and padding, which is 1, as in RoBERTa."""
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(T) < torch.randint(2, T + 1, (rows, 1), generator=generator)).long()
    text = torch.randint(2, VOCAB, (rows, T), generator=generator)
    return {"text": torch.where(mask == 1, text, 1), "mask": mask}


def network(kind: str, **options: Any) -> HFText:
    return seeded(lambda: HFText(SHAPE, 3, name=kind, options=SIZES[kind], **options)).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_those_of_a_folder_of_transformers(kind: str, tmp_path: Path) -> None:
    """With the library's own treatment of the mask: the first token, or the mean over all tokens."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(1)
    AutoModel.from_config(AutoConfig.for_model(kind, **SIZES[kind])).save_pretrained(tmp_path)
    theirs, x = AutoModel.from_pretrained(tmp_path).eval(), inputs()
    z = theirs(input_ids=x["text"], attention_mask=x["mask"]).last_hidden_state
    lengths = x["mask"].sum(1).tolist()
    expected = {"first": z[:, 0], "mean": torch.stack([row[:n].mean(0) for row, n in zip(z, lengths)])}
    for pooling in ("first", "mean"):
        ours = HFText(SHAPE, 3, weights=str(tmp_path), pooling=pooling).eval()  # type: ignore[arg-type]
        close(ours(x).detach(), ours.head(expected[pooling]).detach(), 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_padding_changes_nothing(kind: str, pooling: str) -> None:
    """Nor does its amount: a text alone is computed as with more padding."""
    module, x = network(kind, pooling=pooling), inputs()
    n, i = map(int, x["mask"].sum(1).min(0))
    assert n < T
    x = {name: values[i : i + 1] for name, values in x.items()}
    short = {"text": x["text"][:, :n], "mask": x["mask"][:, :n]}
    close(module(short).detach(), module(x).detach(), 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_many_clients_at_once_train_as_each_one(kind: str) -> None:
    sizes = (4, 3)
    x, rows = inputs(2 * sum(sizes)), []
    arrays = arrays_of({name: t.numpy() for name, t in x.items()}, torch.arange(2 * sum(sizes)).numpy() % 3, 3)
    for plan in ("loop", "vmap"):
        e = engine(arrays, split_of(sizes), network(kind), plan=plan, batch_size=2)
        rows.append(all_clients(e).train(e.model.init_row()).theta)
    close(rows[0], rows[1], 1e-4)


def test_lora_of_attention() -> None:
    """Queries, keys, values and outputs in two layers of BERT, and of DistilBERT."""
    for kind in ("bert", "distilbert"):
        module = network(kind)
        LoRA(["attention"]).insert(module)
        assert sum(isinstance(m, LoRALinear) for m in module.modules()) == 8


def test_a_run_reads_a_table_and_a_folder(tmp_path: Path) -> None:
    """The tokenizer and the weights of one folder; words determine the label, so training helps."""
    from language import BERT_WORDS, bert_tokenizer
    from transformers import AutoConfig, AutoModel

    folder = bert_tokenizer(tmp_path / "bert")
    torch.manual_seed(0)
    config = AutoConfig.for_model("bert", **{**BERT, "vocab_size": len(BERT_WORDS), "max_position_embeddings": 16})
    AutoModel.from_config(config).save_pretrained(folder)
    rows = [f"{'to be' if i % 2 else 'or not'},{i % 2},{'north' if i % 4 < 2 else 'south'}" for i in range(80)]
    (tmp_path / "notes.csv").write_text("\n".join(["text,label,ward", *rows]) + "\n")
    data = ["dataset=text_csv", f"dataset.path={tmp_path / 'notes.csv'}", f"dataset.tokenizer={folder}"]
    data += ["dataset.length=8", "dataset.columns.client=ward", "partition=domain"]
    learn = ["model=hf_text", f"model.weights={folder}", "algorithm=fedavg", "optimizer=adam", "optimizer.lr=0.01"]
    quick = ["rounds=3", "sample_rate=1", "tracking=disabled", "hardware.executor=vmap"]
    assert main([*data, *learn, *quick, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["last"]["personal/accuracy"] == 1


def test_what_it_cannot_read_is_refused(tmp_path: Path) -> None:
    def refused(words: str, shape: Any = SHAPE, **options: Any) -> None:
        with pytest.raises(ConfigError, match=words) as error:
            HFText(shape, 3, **options)
        assert "\n" not in str(error.value)

    refused("needs either model.weights, a folder of transformers, or model.name")
    refused("omit model.options", weights=str(tmp_path), options={"hidden_size": 3})
    refused("needs the inputs text and mask, but the data set gives text", {"text": (4,)}, name="bert")
    refused(r"needs the inputs text and mask, but the data set gives inputs \[1, 8, 8\]", (1, 8, 8), name="bert")
    refused("model.name=bart7 is not a network of transformers for texts", name="bart7")
    refused(r"model.weights=.*gone is not a folder. Set", weights=str(tmp_path / "gone"))
    long = {"text": (21,), "mask": (21,)}
    refused(
        "model.name=roberta reads at most 20 tokens, but dataset.length=21",
        long,
        name="roberta",
        options=SIZES["roberta"],
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **SIZES["bert"]}))
    refused("cannot be read: ", weights=str(tmp_path))
    with pytest.raises(
        ConfigError, match="model=hf needs images, but the data set gives text, mask: choose model=hf_text"
    ):
        HFModel(SHAPE, 3)  # type: ignore[arg-type]

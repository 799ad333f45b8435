"""save and load: the same bits again, and one clear message for everything that can be wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny_bert
from sq_nets import WIDTH, Mlp, SharedInput
from torch import nn

import qinductor
from qinductor.errors import SavedModelError
from qinductor.smoothquant import SmoothQuantConfig
from qinductor.smoothquant.layout import MANIFEST, WEIGHTS
from qinductor.smoothquant.sites import RECIPE_ATTRIBUTE, SITES_ATTRIBUTE

BATCH = {
    "input_ids": torch.arange(24).view(2, 12) + 5,
    "attention_mask": torch.tensor([[1] * 12, [1] * 7 + [0] * 5]),
}
BOTH = [SmoothQuantConfig(), SmoothQuantConfig(activation="dynamic")]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "bert"
    qinductor.save(qinductor.quantize_model(tiny_bert(), [BATCH]), folder)
    return folder


def _edit(folder: Path, **changes: Any) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, **changes}))


# ---------------------------------------------------------------- the same model again


@pytest.mark.parametrize("config", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_huggingface_model_comes_back_bit_equal(
    tmp_path: Path, config: SmoothQuantConfig, dtype: torch.dtype
) -> None:
    qmodel = qinductor.quantize_model(tiny_bert().to(dtype), [BATCH], config)
    qinductor.save(qmodel, tmp_path / "new" / "bert")
    loaded = qinductor.load(str(tmp_path / "new" / "bert"))
    assert type(loaded) is type(qmodel) and not loaded.training
    for a, b in zip(qmodel(**BATCH).to_tuple(), loaded(**BATCH).to_tuple(), strict=True):
        assert torch.equal(a, b)
    ours, theirs = qmodel.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(t, theirs[n]) and t.dtype is theirs[n].dtype for n, t in ours.items())
    for attribute in (SITES_ATTRIBUTE, RECIPE_ATTRIBUTE):
        assert getattr(loaded, attribute) == getattr(qmodel, attribute)
    assert not any(p.requires_grad for p in loaded.parameters())
    attention = loaded.encoder.layer[0].attention.self
    assert attention.query.x_zero_point is attention.value.x_zero_point
    assert attention.query.multiplier is attention.key.multiplier


def test_saving_a_loaded_model_writes_the_same_bytes(saved: Path, tmp_path: Path) -> None:
    qinductor.save(qinductor.load(saved), tmp_path / "again")
    for name in (WEIGHTS, MANIFEST, "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (saved / name).read_bytes()


def test_without_pooler_and_with_another_attention(tmp_path: Path) -> None:
    from transformers import BertModel

    model = BertModel(tiny_bert().config, add_pooling_layer=False).eval()
    model.set_attn_implementation("eager")
    qmodel = qinductor.quantize_model(model, [BATCH])
    qinductor.save(qmodel, tmp_path / "bert")
    loaded = qinductor.load(tmp_path / "bert")
    assert loaded.pooler is None and loaded.config._attn_implementation == "eager"
    assert torch.equal(loaded(**BATCH)[0], qmodel(**BATCH)[0])


def test_tied_weights_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    from transformers import BertForMaskedLM

    torch.manual_seed(0)
    qmodel = qinductor.quantize_model(BertForMaskedLM(tiny_bert().config).eval(), [BATCH])
    qinductor.save(qmodel, tmp_path / "mlm")
    loaded = qinductor.load(tmp_path / "mlm")
    assert loaded.cls.predictions.decoder.weight is loaded.bert.embeddings.word_embeddings.weight
    assert torch.equal(loaded(**BATCH).logits, qmodel(**BATCH).logits)
    embedding = loaded.bert.embeddings.word_embeddings.weight
    assert (tmp_path / "mlm" / WEIGHTS).stat().st_size < 1.5 * embedding.numel() * 4


def test_a_plain_module_needs_its_float_twin(tmp_path: Path) -> None:
    x = torch.randn(5, WIDTH)
    qmodel = qinductor.quantize_model(SharedInput(), [x])
    qinductor.save(qmodel, tmp_path / "net")
    with pytest.raises(SavedModelError, match=r"SharedInput.*load\(directory, model="):
        qinductor.load(tmp_path / "net")
    with torch.device("meta"):
        skeleton = SharedInput()
    assert torch.equal(qinductor.load(tmp_path / "net", model=skeleton)(x), qmodel(x))
    with pytest.raises(SavedModelError, match="has None where the saved one has the Linear 'a'"):
        qinductor.load(tmp_path / "net", model=Mlp(nn.GELU()))
    wider = SharedInput()
    wider.b = nn.Linear(WIDTH, 50)
    with pytest.raises(
        SavedModelError, match=r"out_features=50.*'b' with 64 inputs and 48 outputs"
    ):
        qinductor.load(tmp_path / "net", model=wider)
    more = SharedInput()
    more.extra = nn.LayerNorm(3)
    with pytest.raises(SavedModelError, match=r"lacks the tensor 'extra.weight'"):
        qinductor.load(tmp_path / "net", model=more)
    assert isinstance(more.a, nn.Linear) and more.a.weight.shape == (96, WIDTH)


def test_a_bare_layer(tmp_path: Path) -> None:
    x = torch.randn(5, WIDTH)
    qmodel = qinductor.quantize_model(nn.Linear(WIDTH, WIDTH), [x])
    qinductor.save(qmodel, tmp_path / "one")
    loaded = qinductor.load(tmp_path / "one", model=nn.Linear(WIDTH, WIDTH))
    assert torch.equal(loaded(x), qmodel(x))


def test_weights_in_the_file_are_portable(saved: Path) -> None:
    from safetensors import safe_open

    with safe_open(saved / WEIGHTS, framework="pt") as file:
        name = "encoder.layer.0.intermediate.dense"
        assert file.get_tensor(f"{name}.weight").dtype is torch.int8
        assert file.get_tensor(f"{name}.weight").shape == (256, 64)
        assert file.get_tensor(f"{name}.weight_scale").shape == (256,)
        assert not any("packed" in key for key in file.keys())  # noqa: SIM118
    assert {"torch", "qinductor", "transformers"} <= set(
        json.loads((saved / MANIFEST).read_text())["versions"]
    )


def test_loading_makes_no_float_weight_of_an_int8_layer(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, ...]] = []
    original = nn.Linear.reset_parameters

    def note(self: nn.Linear) -> None:
        if not self.weight.is_meta:
            made.append(tuple(self.weight.shape))
        original(self)

    monkeypatch.setattr(nn.Linear, "reset_parameters", note)
    loaded = qinductor.load(saved)
    assert made == []
    assert not any(t.is_meta for t in (*loaded.parameters(), *loaded.buffers()))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_loading_keeps_little_more_than_the_buffers(tmp_path: Path) -> None:
    """Packing makes copies that die young; they may not stay in the process."""
    import subprocess
    import sys

    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(32)]
    qmodel = qinductor.quantize_model(nn.Sequential(*layers), [torch.randn(5, 1024)])
    qinductor.save(qmodel, tmp_path / "deep")
    code = """
import sys, torch, qinductor
from torch import nn
from qinductor.smoothquant import loading
import safetensors

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

with torch.device("meta"):
    skeleton = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(32)))
before = resident()
model = qinductor.load(sys.argv[1], model=skeleton)
held = sum(buffer.nbytes for buffer in model.buffers())
print(held, resident() - before)
"""
    command = [sys.executable, "-c", code, tmp_path / "deep"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    held, grown = (int(number) for number in output.split())
    # 32 MB of packed weights, where float32 would be 128; the rest is code paths used first here.
    assert 2**25 <= held < 2**25 * 1.1
    assert grown < 2 * held


def test_loading_needs_no_torchao(tmp_path: Path) -> None:
    """Its import takes longer than all the rest."""
    import subprocess
    import sys

    qmodel = qinductor.quantize_model(nn.Linear(WIDTH, WIDTH), [torch.randn(5, WIDTH)])
    qinductor.save(qmodel, tmp_path / "one")
    code = (
        "import sys, torch, qinductor; "
        f"qinductor.load(sys.argv[1], model=torch.nn.Linear({WIDTH}, {WIDTH})); "
        "sys.exit('torchao' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "one"], check=False)
    assert done.returncode == 0


# ---------------------------------------------------------------- bad input


def test_an_output_directory_in_the_way(tmp_path: Path) -> None:
    qmodel = qinductor.quantize_model(Mlp(nn.GELU()), [torch.randn(5, WIDTH)])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep me")
    with pytest.raises(SavedModelError, match=r"full exists already and is not empty"):
        qinductor.save(qmodel, tmp_path / "full")
    (tmp_path / "file").write_text("")
    with pytest.raises(SavedModelError, match="no folder"):
        qinductor.save(qmodel, tmp_path / "file")
    with pytest.raises(SavedModelError, match="could not be written"):
        qinductor.save(qmodel, tmp_path / "file" / "below")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "full", "mine.txt"]
    (tmp_path / "empty").mkdir()
    qinductor.save(qmodel, tmp_path / "empty")
    assert (tmp_path / "empty" / MANIFEST).is_file()


def test_nothing_is_left_of_a_write_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    qmodel = qinductor.quantize_model(Mlp(nn.GELU()), [torch.randn(5, WIDTH)])
    with pytest.raises(SavedModelError, match="No space left"):
        qinductor.save(qmodel, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_float_model_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(SavedModelError, match=r"has no int8 layer.*convert\(\)"):
        qinductor.save(Mlp(nn.GELU()), tmp_path / "out")


def test_a_directory_that_is_missing_or_another_models(tmp_path: Path) -> None:
    with pytest.raises(SavedModelError, match="nowhere is not a directory"):
        qinductor.load(tmp_path / "nowhere")
    tiny_bert().save_pretrained(tmp_path / "float")
    with pytest.raises(SavedModelError, match=r"qinductor.json is missing.*from_pretrained"):
        qinductor.load(tmp_path / "float")


def test_a_newer_version(saved: Path) -> None:
    _edit(saved, format_version=99, versions={"qinductor": "7.0"})
    with pytest.raises(
        SavedModelError, match=r"qinductor.json has format version 99.*7.0.*Upgrade"
    ):
        qinductor.load(saved)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"model": 3}', "\xff"])
def test_a_damaged_manifest(saved: Path, text: str) -> None:
    (saved / MANIFEST).write_text(text, encoding="latin-1")
    with pytest.raises(SavedModelError, match=r"qinductor.json is damaged"):
        qinductor.load(saved)


def test_a_manifest_that_lacks_a_part(saved: Path) -> None:
    manifest = json.loads((saved / MANIFEST).read_text())
    del manifest["layers"]
    (saved / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(SavedModelError, match="lacks layers"):
        qinductor.load(saved)
    _edit(saved, layers={"encoder.layer.0.intermediate.dense": {"in_features": 64}})
    with pytest.raises(SavedModelError, match="do not belong together"):
        qinductor.load(saved)


def test_damaged_or_missing_weights(saved: Path) -> None:
    data = bytearray((saved / WEIGHTS).read_bytes())
    data[-5] ^= 1
    (saved / WEIGHTS).write_bytes(data)
    with pytest.raises(SavedModelError, match=r"model.safetensors is damaged: its SHA-256"):
        qinductor.load(saved)
    (saved / WEIGHTS).write_bytes(data[: len(data) // 2])
    with pytest.raises(SavedModelError, match=r"model.safetensors is damaged"):
        qinductor.load(saved)
    (saved / WEIGHTS).unlink()
    with pytest.raises(SavedModelError, match=r"model.safetensors is missing"):
        qinductor.load(saved)


def test_a_class_that_transformers_does_not_have(saved: Path) -> None:
    model = json.loads((saved / MANIFEST).read_text())["model"]
    _edit(saved, model={**model, "class": "NoSuchModel"})
    with pytest.raises(SavedModelError, match=r"has no NoSuchModel"):
        qinductor.load(saved)


def test_a_missing_huggingface_config(saved: Path) -> None:
    (saved / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(SavedModelError, match=r"config.json is damaged"):
        qinductor.load(saved)
    (saved / "config.json").unlink()
    with pytest.raises(SavedModelError, match=r"config.json is missing"):
        qinductor.load(saved)


def test_a_moved_directory_loads(saved: Path, tmp_path: Path) -> None:
    shutil.move(saved, tmp_path / "elsewhere")
    assert qinductor.load(tmp_path / "elsewhere")(**BATCH)[0].shape == (2, 12, 64)

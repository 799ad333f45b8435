"""CTranslate2: int8 weights a channel, int8 activations a token, chosen at run time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ctranslate2
import numpy

from ...errors import ModelError
from ...zoo import Batch, Loaded


class CTranslate2:
    """A converted encoder; it takes any shape."""

    def __init__(self, folder: str, threads: int) -> None:
        self.encoder = ctranslate2.Encoder(
            folder, device="cpu", compute_type="int8", inter_threads=1, intra_threads=threads
        )

    def ready(self, inputs: Batch) -> Callable[[], Any]:
        """See :class:`qinductor.bench.peers.Engine`. Lengths stand for the mask."""
        view = ctranslate2.StorageView.from_array
        # The views read these arrays where they lie.
        ids = numpy.ascontiguousarray(inputs["input_ids"].numpy().astype(numpy.int32))
        lengths = inputs["attention_mask"].sum(1).numpy().astype(numpy.int32)

        def call() -> Any:
            out = self.encoder.forward_batch(view(ids), lengths=view(lengths))
            return numpy.array(out.last_hidden_state)

        return call


def build(loaded: Loaded, _calibration: Batch, threads: int, _variant: str) -> CTranslate2:
    """Convert by way of a folder: the converter reads what save_pretrained() wrote."""
    if loaded.tokenizer is None:
        raise ModelError("CTranslate2's converter needs a tokenizer beside the model.")
    with tempfile.TemporaryDirectory(prefix="qinductor-ctranslate2-") as name:
        saved, converted = Path(name, "saved"), Path(name, "converted")
        model: Any = loaded.model
        # The converter reads a field that transformers 5 no longer gives every BERT; absolute
        # positions are the only ones there are now.
        if not hasattr(model.config, "position_embedding_type"):
            model.config.position_embedding_type = "absolute"
        model.save_pretrained(str(saved))
        loaded.tokenizer.save_pretrained(str(saved))
        ctranslate2.converters.TransformersConverter(str(saved)).convert(
            str(converted), quantization="int8"
        )
        return CTranslate2(str(converted), threads)

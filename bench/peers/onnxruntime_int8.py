"""ONNX Runtime's int8: dynamic, and static as QDQ nodes, after its own BERT fusions."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from onnxruntime import quantization
from onnxruntime.transformers import optimizer

from ...zoo import Batch, Loaded
from .export import HiddenState

OPSET = 17
FLOAT = 1
"""onnx.TensorProto.FLOAT: what a tensor is whose type shape inference cannot tell, as behind the
fused operators."""


class OnnxRuntime:
    """A quantized model in a file that may be deleted: the session keeps what it read."""

    def __init__(self, path: Path, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Its threads spin after a call, and would in the turn of the next variant.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self.session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )

    def ready(self, inputs: Batch) -> Callable[[], Any]:
        """See :class:`qinductor.bench.peers.Engine`."""
        arrays = {name: value.numpy() for name, value in inputs.items()}
        return lambda: self.session.run(None, arrays)[0]


class _OneBatch(quantization.CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, batch: Batch) -> None:
        self.batches = iter([{name: value.numpy() for name, value in batch.items()}])

    def get_next(self) -> Any:
        return next(self.batches, None)


def _export(loaded: Loaded, batch: Batch, path: Path) -> None:
    """Write the float model with free shapes.

    By the older exporter and plain attention: what ONNX Runtime's fusions recognize.
    """
    model: Any = loaded.model
    model.set_attn_implementation("eager")
    names = [*batch, "hidden"]
    with torch.no_grad():
        torch.onnx.export(
            HiddenState(model),
            tuple(batch.values()),
            str(path),
            input_names=list(batch),
            output_names=["hidden"],
            dynamic_axes={name: {0: "batch", 1: "sequence"} for name in names},
            opset_version=OPSET,
            dynamo=False,
        )


def build(loaded: Loaded, calibration: Batch, threads: int, variant: str) -> OnnxRuntime:
    """Export, fuse, quantize with a scale a channel of the weights, and load."""
    logging.getLogger().setLevel(logging.ERROR)  # its advice on preprocessing; the fusions did it
    options = {"MatMulConstBOnly": True, "DefaultTensorType": FLOAT}
    int8 = quantization.QuantType.QInt8
    config: Any = loaded.model.config
    with tempfile.TemporaryDirectory(prefix="qinductor-onnxruntime-") as name:
        exported, fused, quantized = (
            Path(name, f"{stage}.onnx") for stage in ("exported", "fused", "quantized")
        )
        _export(loaded, calibration, exported)
        if variant == "onnxruntime-dynamic":
            optimizer.optimize_model(
                str(exported),
                "bert",
                num_heads=config.num_attention_heads,
                hidden_size=config.hidden_size,
                opt_level=1,
            ).save_model_to_file(str(fused))
            quantization.quantize_dynamic(
                str(fused), str(quantized), weight_type=int8, per_channel=True,
                extra_options=options,
            )  # fmt: skip
        else:
            quantization.quantize_static(
                str(exported), str(quantized), _OneBatch(calibration),
                quant_format=quantization.QuantFormat.QDQ, per_channel=True,
                activation_type=quantization.QuantType.QUInt8, weight_type=int8,
                op_types_to_quantize=["MatMul", "Gemm"], extra_options=options,
            )  # fmt: skip
        return OnnxRuntime(quantized, threads)

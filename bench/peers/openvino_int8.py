"""OpenVINO with NNCF's post-training quantization: int8 Linears, bf16 for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openvino

from ...zoo import Batch, Loaded
from .export import HiddenState


class OpenVino:
    """A quantized OpenVINO model of free shapes."""

    def __init__(self, model: Any, threads: int) -> None:
        self.model = model
        self.core = openvino.Core()
        self.settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "bf16",
            "INFERENCE_NUM_THREADS": threads,
        }

    def ready(self, inputs: Batch) -> Callable[[], Any]:
        """See :class:`qinductor.bench.peers.Engine`. Fixed shapes: the best case."""
        fixed = self.model.clone()
        fixed.reshape({node.any_name: list(inputs[node.any_name].shape) for node in fixed.inputs})
        request = self.core.compile_model(fixed, "CPU", self.settings).create_infer_request()
        arrays = {name: value.numpy() for name, value in inputs.items()}
        return lambda: request.infer(arrays, share_inputs=True, share_outputs=True)[0]


def build(loaded: Loaded, calibration: Batch, threads: int, _variant: str) -> OpenVino:
    """Convert and quantize: static scales, SmoothQuant and bias correction by NNCF's defaults."""
    import logging

    import nncf

    nncf.set_log_level(logging.ERROR)
    rows = next(iter(calibration.values())).shape[0]
    model = openvino.convert_model(
        HiddenState(loaded.model),
        example_input={name: value[:2] for name, value in calibration.items()},
    )
    samples = [
        {name: value[i : i + 1].numpy() for name, value in calibration.items()} for i in range(rows)
    ]
    quantized = nncf.quantize(
        model,
        nncf.Dataset(samples),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=rows,
    )
    return OpenVino(quantized, threads)

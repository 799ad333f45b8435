from __future__ import annotations

import dataclasses
import json

import pytest

from qinductor.errors import ConfigError, UnknownOptionError
from qinductor.smoothquant import SmoothQuantConfig
from qinductor.smoothquant.config import Activation, ActivationRange
from qinductor.smoothquant.torchao_api import AOBaseConfig, PerRow, PerTensor


def test_is_a_torchao_config_with_its_granularities() -> None:
    assert isinstance(SmoothQuantConfig(), AOBaseConfig)
    assert SmoothQuantConfig().activation_granularity == PerTensor()
    assert SmoothQuantConfig(activation="dynamic").activation_granularity == PerRow()
    assert SmoothQuantConfig().weight_granularity == PerRow()


def test_is_frozen_and_takes_enum_members() -> None:
    config = SmoothQuantConfig(activation=Activation.DYNAMIC)  # type: ignore[arg-type]
    assert config == SmoothQuantConfig(activation="dynamic")
    assert config.scheme is Activation.DYNAMIC and not config.is_static
    assert SmoothQuantConfig(activation_range="mse").range_rule is ActivationRange.MSE
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.alpha = 0.3  # type: ignore[misc]


def test_survives_json() -> None:
    config = SmoothQuantConfig(alpha=None, symmetric=True, skip=("*.key", "pooler*"))
    assert SmoothQuantConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(UnknownOptionError, match=r"'beta'.*alpha"):
        SmoothQuantConfig.from_dict({"beta": 1})


def test_a_single_skip_pattern_may_be_a_string() -> None:
    assert SmoothQuantConfig(skip="pooler*").skip == ("pooler*",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alpha": 1.5}, "alpha=1.5"),
        ({"alpha": True}, "alpha=True"),
        ({"alpha": "half"}, "alpha='half'"),
        ({"activation": "sometimes"}, "'sometimes'.*dynamic, static"),
        ({"activation_range": "entropy"}, "'entropy'.*minmax, mse, percentile"),
        ({"percentile": 50}, "percentile=50"),
        ({"percentile": 100.5}, "percentile=100.5"),
        ({"symmetric": "yes"}, "symmetric='yes'"),
        ({"skip": 3}, "skip=3"),
        ({"skip": (3,)}, r"skip=\(3,\)"),
        ({"activation": "dynamic", "activation_range": "mse"}, "activation_range='mse'"),
        ({"activation": "dynamic", "symmetric": True}, "symmetric=True"),
    ],
)
def test_refuses_and_names(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SmoothQuantConfig(**fields)  # type: ignore[arg-type]

"""The option check_nan: a NaN that is to be quantized is an error that names its site."""

from __future__ import annotations

import pytest
import torch
from int8_nets import Feedforward
from torch import Tensor

import qinductor
from qinductor.errors import NanActivationError


class Poisoned(Feedforward):
    """A NaN between the two linears, in one row, where a flag says so."""

    def forward(self, x: Tensor, poison: Tensor) -> Tensor:
        inner = torch.relu(self.up(x))
        return self.down(torch.where(poison, torch.nan, inner))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "per token"])
def test_the_site_of_the_first_nan_is_named(dynamic: bool) -> None:
    net = Poisoned(dynamic=dynamic).eval().requires_grad_(False)
    checked = torch.compile(net, backend="qsim", options={"check_nan": True})
    plain = torch.compile(net, backend="qsim")
    x, clean = torch.randn(5, 64), torch.zeros(5, 1, dtype=torch.bool)
    assert torch.equal(checked(x, clean), plain(x, clean))
    dirty = clean.clone()
    dirty[3] = True
    with pytest.raises(NanActivationError, match=r"130 NaN .* at down") as info:
        checked(x, dirty)
    assert info.value.site == "down"
    # Without the option a fixed scale makes it code 0; the scale of a token is NaN itself.
    assert torch.equal(plain(x, dirty).isnan().any(dim=1), dirty[:, 0] & dynamic)
    x[1, 7] = torch.nan
    with pytest.raises(NanActivationError, match=r"1 NaN .* at up"):
        checked(x, clean)
    rules = {e["rule"] for e in qinductor.explain(checked).to_dict()["rewrites"]}
    assert "check_nan" in rules

"""Run in processes of their own by test_processes.py: compile, and print what happened.

python second_process.py            → one line of JSON
python second_process.py memory int8|float FOLDER   → megabytes of RSS after warm-up
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path


def cache() -> dict[str, object]:
    import torch
    from int8_nets import Feedforward
    from torch._dynamo.utils import counters

    import qinductor

    torch.manual_seed(0)
    net = torch.nn.Sequential(*(Feedforward(64, 96 + 16 * i, seed=i) for i in range(2)))
    compiled = torch.compile(net, backend="qsim")
    x = torch.randn(5, 64)
    start = time.perf_counter()
    y = compiled(x)
    seconds = time.perf_counter() - start
    report = qinductor.explain(compiled).to_dict()
    from_cache = [graph.pop("from_cache") for graph in report["graphs"]]
    return {
        "package": str(Path(qinductor.__file__).parent),
        "seconds": seconds,
        "output": hashlib.sha256(y.numpy().tobytes()).hexdigest(),
        "equals_eager": torch.equal(y, net(x)),
        "report": report,
        "from_cache": from_cache,
        "fx_hits": counters["inductor"]["fxgraph_cache_hit"],
        "fx_bypassed": counters["inductor"]["fxgraph_cache_bypass"],
        "aot_hits": counters["aot_autograd"]["autograd_cache_hit"],
    }


def memory(kind: str, folder: str) -> float:
    import torch
    import transformers

    import qinductor
    import qinductor.backend

    before = _rss()
    if kind == "int8":
        model = qinductor.load(folder)
        compiled = torch.compile(model, backend="qsim")
    else:
        model = transformers.AutoModel.from_pretrained(folder).eval()
        compiled = torch.compile(model)
    ids = torch.arange(2 * 64).view(2, 64) + 1000
    with torch.no_grad():
        for _ in range(2):
            compiled(input_ids=ids, attention_mask=torch.ones_like(ids))
    return _rss() - before


def _rss() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    print(json.dumps(memory(*sys.argv[2:]) if sys.argv[1:2] == ["memory"] else cache()))

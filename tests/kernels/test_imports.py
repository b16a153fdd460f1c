"""What importing the package loads, in fresh interpreters."""

import subprocess
import sys

import pytest

PRELUDE = "import sys\n"
NO_TRITON = "import sys\nsys.modules['triton'] = None\n"


def run(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_loads_neither_torch_nor_triton():
    code = (
        "import moe_kernels\nprint([m for m in ('torch', 'triton') if m in sys.modules], 'Routing' in dir(moe_kernels))"
    )
    assert run(PRELUDE + code) == "[] True"


def test_works_where_triton_cannot_be_imported():
    code = """
import torch
from moe_kernels import ExpertWeights, fused_experts, moe_align, resolve_config, select_experts, supports_impl
weights = ExpertWeights.from_dense(torch.ones(2, 4, 4) / 4, torch.ones(2, 4, 2) / 2, "fp32")
routing = select_experts(torch.zeros(3, 2), 1)
for impl in (None, "reference"):
    out = fused_experts(torch.ones(3, 4), weights, routing, impl=impl)
    assert torch.allclose(out, torch.full((3, 4), 0.5 * 0.7310586)), out
moe_align(routing.topk_ids, 2, 16)
resolve_config(num_tokens=3, num_experts=2, hidden_size=4, intermediate_size=2, top_k=1, dtype=torch.float32)
ask = dict(dtype="fp32", num_experts=2, hidden_size=4, intermediate_size=2, top_k=1)
print(supports_impl("triton", device_type="cpu", **ask))
try:
    fused_experts(torch.ones(3, 4), weights, routing, impl="triton")
except NotImplementedError as error:
    print(error)
"""
    lines = run(NO_TRITON + code).splitlines()
    assert lines == ["['triton is not installed.']", "impl 'triton' does not run here: triton is not installed."]


def test_cpu_use_does_not_import_triton_kernels():
    pytest.importorskip("triton")
    code = """
import torch
from moe_kernels import ExpertWeights, fused_experts, select_experts
weights = ExpertWeights.from_dense(torch.ones(2, 4, 4), torch.ones(2, 4, 2), "fp32")
fused_experts(torch.ones(3, 4), weights, select_experts(torch.zeros(3, 2), 1))
print([m for m in sys.modules if m.startswith("moe_kernels") and "triton" in m])
"""
    assert run(PRELUDE + code) == "[]"

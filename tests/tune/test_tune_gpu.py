"""A small tuning run on an NVIDIA GPU: what it writes is then taken, and wrong candidates never are."""

import json

import pytest
import torch

pytest.importorskip("triton")

from moe_kernels import resolve_config
from moe_kernels.tuning import find_config

from workbench.devices import find_device
from workbench.spec import RunSpec
from workbench.tune import run
from workbench.tune.run import TuneRequest, gpu_workshop, make_problem, plan_cells, tune

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]


@pytest.fixture
def two_candidates(monkeypatch):
    whole = run.candidates
    monkeypatch.setattr(run, "candidates", lambda *args, **options: whole(*args, **{**options, "most": 2}))


@pytest.fixture
def layer(tmp_path):
    """A small layer: (what to tune, device, shared memory)."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 2,
        "norm_topk_prob": True,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")

    def make(**fields):
        spec = RunSpec.from_flat({"model": str(path), "moe_backend": "triton", "device": "cuda", **fields})
        device = find_device("cuda")
        from moe_kernels.experts.config import target_of

        shared = target_of(torch.device(device.torch_device)).shared_bytes
        return TuneRequest(spec=spec, tokens=(1, 16), out=tmp_path / "tuned"), device, shared

    return make


@pytest.mark.parametrize("quant", ["bf16", "fp8_block", "int4"])
def test_a_run_writes_files_that_are_then_found(two_candidates, layer, quant, tmp_path, monkeypatch):
    request, device, shared = layer(quant=quant)
    lines = []
    report = tune(request, device, shared, gpu_workshop, progress=lines.append)
    assert report.complete, (report.lines, lines)
    monkeypatch.setenv("MOE_WORKBENCH_CONFIG_DIR", str(request.out))
    for cell in plan_cells(request, shared, device.name):
        found = find_config(cell.problem, device.name, shared)
        assert found.config is not None, found.source
        assert str(request.out) in found.source
    problem = make_problem(request.spec, run.model_shape(request.spec), 16)
    resolved = resolve_config(
        num_tokens=16, num_experts=16, hidden_size=256, intermediate_size=128, top_k=4, dtype=torch.bfloat16,
        quant=quant, group_size=problem.group_size, device=torch.device("cuda"),
    )  # fmt: skip
    assert str(request.out) in resolved.source
    assert not any("wrong" in line for line in lines), lines
    assert not any("compiled when they are timed" in line for line in lines), lines


def test_times_are_of_the_device_and_wrong_results_are_dropped(layer, monkeypatch):
    from workbench.tune import bench as module
    from workbench.tune.search import Wrong

    request, device, shared = layer()
    cell = plan_cells(request, shared, device.name)[1]
    up, down = cell.up.kept[0], cell.down.kept[0]
    config = {"up": up, "down": module_partner(up, cell.down.kept), "PDL": False}
    del down
    with gpu_workshop(request, device, [cell], shared, lambda text: None) as workshop:
        bench = workshop.bench(cell)
        entry = bench.open(config)
        samples = [entry.sample() for _ in range(5)]
        entry.close()
        assert all(1.0 < us < 10_000.0 for us in samples)
        run_layer = module.LayerBench.run
        monkeypatch.setattr(module.LayerBench, "run", lambda self, config: run_layer(self, config) * 1.1)
        with pytest.raises(Wrong, match=r"^wrong: error \d\.\d\de-0[12] above the budget of "):
            bench.open(config)
        monkeypatch.setattr(module.LayerBench, "run", lambda self, config: torch.full_like(self.inputs.x, float("nan")))
        with pytest.raises(Wrong, match=r"^wrong: NaN or infinity in the output"):
            bench.open(config)
        monkeypatch.setattr(module.LayerBench, "run", run_layer)
        with pytest.raises(Wrong, match="num_warps"):
            bench.open({**config, "up": {**up, "num_warps": 3}})


def module_partner(up, downs):
    """The row that `up` is timed beside."""
    from workbench.tune.candidates import partner

    found = partner("up", up, downs)
    assert found is not None
    return found

"""Compiling in other processes: verdicts, compilers that end, and an end that waits for nothing."""

import time

import ahead_jobs
import pytest
import torch
from moe_kernels.names import Quant
from moe_kernels.tuning.names import Problem

from workbench.tune.ahead import Ahead, Job, compile_job, meta_layer
from workbench.tune.candidates import candidates, partner

H200 = 232448
PROBLEM = Problem(8, 4, 128, 96, 2, "bf16")


def job(**config):
    return Job(PROBLEM, False, config, 90, H200)


@pytest.fixture
def pool():
    with Ahead(1, ahead_jobs.play) as ahead:
        yield ahead


def test_verdicts(pool):
    jobs = [job(), job(what="illegal"), job(shared=H200 + 1), job(what="odd"), job(shared=H200)]
    numbers = [pool.add(one) for one in jobs]
    assert [pool.verdict(number) for number in numbers] == [
        "",
        "ValueError: BLOCK_SIZE_K of up must be 64 or 128",
        "needs 232,449 bytes of shared memory and a block may take 232,448",
        "",  # not about the kernel: it is tried when it is timed
        "",
    ]
    assert pool.compiled == 2
    assert pool.notes == ["Some kernels are compiled when they are timed: RuntimeError: no such attribute"]


def test_a_compiler_that_ends_takes_one_job_with_it(pool):
    numbers = [pool.add(one) for one in (job(), job(what="crash"), job(), job(what="illegal"))]
    assert pool.verdict(numbers[1]) == "a compiler ended with 3"
    assert pool.verdict(numbers[2]) == ""
    assert pool.verdict(numbers[3]).startswith("ValueError")
    assert pool.compiled == 2


def test_where_no_compiler_starts_kernels_are_compiled_when_timed():
    with Ahead(2, ahead_jobs.crash) as pool:
        numbers = [pool.add(job()) for _ in range(5)]
        assert [pool.verdict(number) for number in numbers] == [""] * 5
        assert pool.notes == [
            "Some kernels are compiled when they are timed: a compiler ended with 4 before its first kernel"
        ]


def test_it_waits_no_longer_than_asked_and_ends_at_once(pool):
    pool.verdict(pool.add(job()))  # its process runs by now
    number = pool.add(job(what="hang"))
    start = time.monotonic()
    assert pool.verdict(number, longest_s=0.5) == "compiling takes longer than 0 s"
    pool.close()
    assert time.monotonic() - start < 5.0


def test_compilers_see_no_gpu(pool):
    verdict = pool.verdict(pool.add(job(what="where")))
    assert verdict.removeprefix("ValueError: ").isdigit()


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("quant", list(Quant))
def test_a_layer_without_memory_has_the_shapes_of_a_real_one(quant, zero_points):
    from moe_kernels import ExpertWeights

    group = 32 if quant is Quant.INT4 else 0
    options = {"group_size": group, "zero_points": zero_points} if quant is Quant.INT4 else {}
    real = ExpertWeights.from_dense(torch.randn(3, 2 * 40, 72), torch.randn(3, 72, 40), quant.value, **options)
    problem = Problem(8, 3, 72, 40, 2, quant.value, "bf16", group)
    made = meta_layer(problem, zero_points, real.dtype)._asdict()
    found = {name: (tensor.shape, tensor.dtype) for name, tensor in made.items() if isinstance(tensor, torch.Tensor)}
    assert found == {name: (tensor.shape, tensor.dtype) for name, tensor in real.tensors().items()}
    assert (made["quant"], made["intermediate_size"], made["group_size"]) == (quant, 40, group)


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["bf16", "fp8_block", "int4"])
def test_real_candidates_compile_and_tell_their_memory(quant):
    pytest.importorskip("triton")
    problem = Problem(8, 4, 512, 256, 2, quant, "bf16", 128 if quant == "int4" else 0)
    ups, downs = (candidates(which, problem, H200).kept for which in ("up", "down"))
    config = {"up": ups[0], "down": partner("up", ups[0], downs), "PDL": False}
    assert 0 < compile_job(Job(problem, False, config, 90, H200)) <= H200

"""What only a GPU can show: that the emulation tells the truth, graphs, streams, devices.

The kernels' own tests run on a GPU by the same bodies as everywhere else: test_cuda_emulated.py
and test_attention.py. Under compute-sanitizer:

    compute-sanitizer --tool memcheck python -m pytest -m gpu tests
    compute-sanitizer --tool racecheck python -m pytest -m gpu tests/test_cuda_emulated.py
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch
from simt import conformance
from simt.build import CUDA, HERE
from simt.gpu import Cuda, cuda  # noqa: F401
from simt.problem import TOLERANCE, Problem, expected
from simt.run import attend, prepare
from tiny import tiny_model

from radixsvc.bench.harness import complete, running_engine
from radixsvc.completion import SamplingParams
from radixsvc.engine import EngineConfig
from radixsvc.model import load_model
from radixsvc.scheduler import SchedulerConfig

pytestmark = pytest.mark.gpu
DELAY = 50_000_000  # cycles, some 30 ms: longer than a launch takes


@pytest.fixture(scope="module")
def words(cuda, tmp_path_factory):  # noqa: F811
    """simt.h's words as compiled by nvcc for this device."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc to compile the conformance kernels")
    library = tmp_path_factory.mktemp("conformance") / "conformance.so"
    major, minor = torch.cuda.get_device_capability(cuda.device)
    command = ["nvcc", "-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC"]
    command += [f"-arch=sm_{major}{minor}", f"-I{CUDA}", str(HERE / "conformance.cu")]
    subprocess.run([*command, "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("name", conformance.OPS)
def test_each_word_does_what_its_emulation_says(cuda, words, name):  # noqa: F811
    source = torch.from_numpy(conformance.inputs(name).view(np.int32)).to(cuda.device)
    shape = (*source.shape[:2], conformance.OPS[name].num_out)
    out = torch.zeros(shape, dtype=torch.int32, device=cuda.device)
    conformance.run(words, name, source.data_ptr(), out.data_ptr(), cuda.stream)
    got = out.cpu().numpy().view(np.uint32)
    if name in conformance.EXACT:
        np.testing.assert_array_equal(got, conformance.defined(name))
    else:
        np.testing.assert_allclose(got.view(np.float32), conformance.defined(name), 1e-4, 1e-5)


def near(cuda, arrays, out):  # noqa: F811
    """Whether live rows are right and rows of padding untouched."""
    num_tokens = sum(arrays.problem.q_lens)
    error = np.abs(out[:num_tokens] - expected(arrays)[:num_tokens])
    right = not np.isnan(error).any() and error.max() < TOLERANCE[arrays.problem.dtype]
    return bool(right and np.isnan(out[num_tokens:]).all())


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_graph_captured_for_four_rows_is_replayed_with_fewer(cuda, dtype):  # noqa: F811
    full = Problem((1,) * 4, (300, 5, 260, 17), dtype=dtype, sinks=True)
    captured = prepare(cuda, full.arrays())
    assert cuda.attention(captured.layer, captured.batch) is None  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        assert cuda.attention(captured.layer, captured.batch) is None
    for kv_lens in ((300, 5, 260, 17), (17, 300, 257, 1), (200, 301), (512, 100), (6,)):
        live = len(kv_lens)
        arrays = replace(full, q_lens=(1,) * live, kv_lens=kv_lens, padding=4 - live).arrays()
        call = prepare(cuda, arrays)
        assert call.batch.plan.num_partials <= captured.batch.plan.num_partials
        captured.pool[: len(call.pool)].copy_(call.pool)
        captured.out.copy_(call.out)  # NaN
        for target, source in zip(captured.handles, call.handles, strict=True):
            if target.shape == source.shape:
                target.copy_(source)
            else:
                target.view(-1)[: source.numel()].copy_(source.view(-1))
        graph.replay()
        assert near(cuda, arrays, captured.result(cuda))


def test_work_waits_for_the_stream_it_is_given(cuda):  # noqa: F811
    """A slow writer of q on another stream: right with the event between them, wrong without."""
    arrays = Problem((40, 1), (90, 300)).arrays()
    for waits in (True, False):
        call = prepare(cuda, arrays)
        q = call.handles[-4]
        late, mine = q.clone(), torch.cuda.Stream(cuda.device)
        q.zero_()
        torch.cuda.synchronize()
        torch.cuda._sleep(DELAY)
        q.copy_(late)
        if waits:
            mine.wait_stream(torch.cuda.current_stream(cuda.device))
        with torch.cuda.stream(mine):
            assert cuda.attention(call.layer, call.batch) is None
        torch.cuda.synchronize()
        assert near(cuda, arrays, call.result(cuda)) is waits


def pages_copied(cuda, src, dst, ids):  # noqa: F811
    from simt.structs import Copy

    ids = torch.from_numpy(ids).to(cuda.device)
    copy = Copy(
        src=src.data_ptr(), dst=dst.data_ptr(), src_stride=src.stride(0), dst_stride=dst.stride(0),
        nbytes=src.shape[1], src_ids=ids.data_ptr(), dst_ids=ids.data_ptr(), num_pages=len(ids),
    )  # fmt: skip
    assert cuda.copy(copy, 4) is None


@pytest.mark.parametrize("to_host", [True, False])
def test_pages_to_and_from_pinned_memory_behind_a_slow_writer(cuda, to_host):  # noqa: F811
    """20 rounds: a page is written late on one stream and copied on another."""
    device = torch.zeros(64, 16384, dtype=torch.uint8, device=cuda.device)
    host = torch.zeros(64, 16384, dtype=torch.uint8).pin_memory()
    src, dst = (device, host) if to_host else (host, device)
    rng, copies = np.random.default_rng(0), torch.cuda.Stream(cuda.device)
    for round_ in range(1, 21):
        ids = rng.permutation(64)[:17].astype(np.int32)
        torch.cuda._sleep(DELAY // 20)
        src[torch.from_numpy(ids).long().to(src.device)] = round_
        copies.wait_stream(torch.cuda.current_stream(cuda.device))
        with torch.cuda.stream(copies):
            pages_copied(cuda, src, dst, ids)
        torch.cuda.synchronize()
        assert (dst[torch.from_numpy(ids).long().to(dst.device)] == round_).all()
        assert torch.equal(dst.cpu(), src.cpu())


def test_the_device_is_taken_from_the_pointer(cuda):  # noqa: F811
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
    arrays = Problem((40, 1), (90, 300)).arrays()
    with torch.cuda.device(0):
        out = attend(Cuda(1), arrays)
        assert torch.cuda.current_device() == 0
    assert near(cuda, arrays, out)


def test_memory_of_the_host_is_refused(cuda):  # noqa: F811
    call = prepare(cuda, Problem((1,), (5,)).arrays())
    host = torch.zeros(1 << 16, dtype=torch.bfloat16).pin_memory()
    call.layer.pool = host.data_ptr()
    assert "no CUDA device" in cuda.attention(call.layer, call.batch)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.8}])
def test_graphs_and_overlap_change_no_token(cuda, tmp_path, sampling):  # noqa: F811
    """Batches of 1, 3, 8 and 2: padded, grown and shrunk from graph to graph, and in mid-course."""
    path = tiny_model(tmp_path, head_dim=64, num_key_value_heads=2, num_hidden_layers=2)
    model = load_model(path, "float32", cuda.device)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 500, 20 + 9 * i).astype(np.int32) for i in range(8)]
    params = SamplingParams(max_tokens=24, seed=5, ignore_eos=True, **sampling)

    def answers(overlap, graphs):
        config = EngineConfig(SchedulerConfig(max_running=8), overlap, graphs)
        with running_engine(model, 4096, config=config) as engine:
            assert engine.failed is None
            captured = [step.size for step in engine.runner.graphs.steps] if graphs else None
            assert captured == ([1, 2, 4, 8] if graphs else None)
            return [
                [outcome.tokens for outcome in complete(engine, prompts[:num], params)]
                for num in (1, 3, 8, 2)
            ]

    plain = answers(overlap=False, graphs=False)
    for overlap, graphs in ((True, False), (False, True), (True, True)):
        assert answers(overlap, graphs) == plain

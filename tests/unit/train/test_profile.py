"""The profile window: which steps are traced, and how a trace becomes a table."""

import gzip
import json

import pytest
import torch
from torch import nn

from sightline import config
from sightline.errors import UsageError
from sightline.hardware import devices
from sightline.measure.benchmark import OurStep
from sightline.train import profile
from sightline.train.profile import MARK, ROWS, ProfileWindow, kind_of, parse_window, tabulate

CPU = devices.select("cpu")

# Names as cuDNN, cuBLAS, NCCL, ATen and Inductor give them in traces of A100, H100 and H200.
CUDNN = "_nhwckrsc_nhwc_tilesize128x128x64_warpgroupsize1x1x1_g1_execute_segment_k_off_kernel__5x_cudnn"
NAMES = {
    "conv": [
        f"sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32{CUDNN}",
        f"sm90_xmma_dgrad_implicit_gemm_bf16bf16_bf16f32_f32{CUDNN}",
        "sm80_xmma_wgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize64x64x64_stage4_warpsize1x1x4"
        "_g8_tensor16x8x16_execute_kernel__5x_cudnn",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_execute_kernel__5x_cudnn",
        "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_256x64_32x4_nhwc_align8>"
        "(cutlass_tensorop_bf16_s16816fprop_optimized_bf16_256x64_32x4_nhwc_align8::Params)",
        "cutlass3x_sm100_tensorop_s256x256x16implicit_gemm_fprop_bf16",
        "void cudnn::cnn::wgrad2d_grouped_direct_kernel<__half, float>(cudnnTensorStruct)",
        "cudnn_generated_fort_native_sm80_convFwd_pointwise_pointwise",
        "void cudnn::winograd_nonfused::winogradForwardOutput4x4<float, float>",
        "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel_generic<float, int>",
        "triton_tem_fused__to_copy_convolution_relu_3",
        "aten::mkldnn_convolution",
        "aten::convolution_backward",
        "autograd::engine::evaluate_function: ConvolutionBackward0",
    ],
    "matmul": [
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize2x1x1_execute_kernel__5x_cublas",
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nn",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128_32x4_tn_align8>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, false>",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>",
        "triton_tem_fused_addmm_relu_1",
        "aten::addmm",
        "aten::mm",
        "mkl::_mkl_linear",
    ],
    "norm": [
        "triton_poi_fused__native_batch_norm_legit_functional_relu_2",
        "triton_red_fused__native_batch_norm_legit_functional_native_batch_norm_backward_threshold_backward_12",
        "triton_per_fused__native_batch_norm_legit_functional_9",
        "triton_poi_fused__native_batch_norm_legit_functional_max_pool2d_with_indices_relu_4",
        "triton_poi_fused__native_batch_norm_legit_functional_add_convolution_relu_7",
        "void cudnn::batchnorm_fwtr_nhwc_semiPersist<__half, float, float, float, 512, true, 1, 2>",
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<__half, float, int, 512, true, 1, true>",
        "void cudnn::bn_bw_1C11_kernel_new<__half, float, float2, 512, true, 1>",
        "void at::native::batch_norm_collect_statistics_channels_last_kernel<at::native::Var, __half, float, 4>",
        "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>(long, float, float const*)",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>",
        "aten::native_batch_norm_backward",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>>",
        "void at::native::unrolled_elementwise_kernel<at::native::(anonymous namespace)::clamp_scalar_kernel_impl>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float>>>",
        "void (anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>",
        "triton_poi_fused_add_relu_threshold_backward_16",
        "triton_red_fused_mean_5",
        "triton_poi_fused_convolution_0",  # a bias
        "triton_per_fused__log_softmax__to_copy_nll_loss_forward_3",
        "aten::add_",
        "aten::threshold_backward",
        "aten::_log_softmax",
    ],
    "pool": [
        "triton_poi_fused_max_pool2d_with_indices_5",
        "void at::native::(anonymous namespace)::max_pool_backward_nhwc<c10::BFloat16, float>",
        "void at::native::(anonymous namespace)::avg_pool2d_out_cuda_frame<float, float>",
        "void cudnn::ops::pooling_fw_4d_kernel<float, float, cudnn::maxpooling_func<float>>",
        "aten::max_pool2d_with_indices_backward",
    ],
    "copy": [
        "Memcpy HtoD (Pinned -> Device)",
        "Memset (Device)",
        "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "void at::native::unrolled_elementwise_kernel<at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "void cudnn::engines_precompiled::nchwToNhwcKernel<__half, __half, float, false, true>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 4, 128, 1>",
        "triton_poi_fused__to_copy_0",
        "triton_poi_fused__to_copy_convolution_view_1",
        "aten::copy_",
    ],
    "optimizer": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "TensorListMetadata<3>, at::native::(anonymous namespace)::FusedSgdMathFunctor<float, 3>, double, double>",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "FusedOptimizerTensorListMetadata<4>, at::native::FusedAdamMathFunctor<float, 4>>",
        "triton_for_fused_12",
        "aten::_fused_sgd_",
        "aten::_foreach_mul_",
    ],
    "collective": ["ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "c10d::allreduce_"],
    "other": ["void some_users_own_kernel<float>(float*)", "aten::empty"],
}


@pytest.mark.parametrize("kind", NAMES)
def test_kernels_are_classified_by_name(kind):
    assert {name: kind_of(name) for name in NAMES[kind]} == dict.fromkeys(NAMES[kind], kind)


def test_every_kind_has_a_row():
    assert {*profile.KINDS, "other", "idle"} == set(ROWS)


@pytest.mark.parametrize(("text", "window"), [("", None), ("5,8", (5, 8)), ("1,1", (1, 1)), (" 9, 10", (9, 10))])
def test_windows_that_fit_a_run_of_ten_steps(text, window):
    assert parse_window(text, 10) == window


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("8,5", "--run.profile 5,8"),
        ("-1,3", "e.g. --run.profile 5,8"),
        ("5", "e.g. --run.profile 5,8"),
        ("5,6,7", "e.g. --run.profile 5,8"),
        ("a,b", "e.g. --run.profile 5,8"),
        ("1.5,3", "e.g. --run.profile 5,8"),
        ("0,3", "1 to 10, as the log counts them; use --run.profile 1,3"),
        ("8,11", "1 to 10; use e.g. --run.profile 7,10"),
    ],
)
def test_bad_windows_say_what_to_write(text, remedy):
    with pytest.raises(UsageError, match=remedy):
        parse_window(text, 10)


def event(category, name, start, length, **args):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "pid": 1, "tid": 1, "args": args}


def captured_run():
    """Two steps replayed as graphs with an evaluation between them; the device works behind the host."""
    conv, norm = NAMES["conv"][0], NAMES["norm"][0]
    return [
        {"ph": "M", "name": "process_name"},
        event("kernel", conv, 50, 10, correlation=1),  # the step before the window
        event("user_annotation", f"{MARK}5", 100, 20),
        event("gpu_user_annotation", f"{MARK}5", 110, 500),
        event("cuda_runtime", "cudaMemcpyAsync", 102, 1, correlation=2),
        event("cuda_runtime", "cudaGraphLaunch", 105, 5, correlation=3),
        event("cuda_runtime", "cudaEventSynchronize", 112, 3, correlation=4),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 110, 10, correlation=2),
        event("kernel", conv, 115, 100, correlation=3),  # overlaps the copy by 5
        event("kernel", norm, 220, 50, correlation=3),  # 5 idle before it
        event("cuda_runtime", "cudaLaunchKernel", 130, 5, correlation=5),  # an evaluation
        event("cuda_runtime", "cudaStreamSynchronize", 140, 5, correlation=6),
        event("kernel", conv, 300, 1000, correlation=5),
        event("user_annotation", f"{MARK}6", 1400, 20),
        event("cuda_runtime", "cudaGraphLaunch", 1405, 5, correlation=7),
        event("cuda_runtime", "cudaStreamSynchronize", 1411, 5, correlation=8),
        event("cuda_runtime", "cudaMemcpy", 1417, 1, correlation=9),
        event("kernel", conv, 1500, 90, correlation=7),  # idle before it is the evaluation's
        event("kernel", norm, 1600, 50, correlation=7),  # 10 idle before it
    ]


def test_a_table_counts_what_the_steps_launched_and_nothing_else():
    table = tabulate(captured_run(), data_wait_s=8e-6)
    kinds = table["kinds"]
    assert table["steps"] == [5, 6]
    assert table["kernels"] == 4
    assert table["host_syncs_by_name"] == {"cudaStreamSynchronize": 1, "cudaMemcpy": 1}
    assert (table["host_syncs"], table["event_waits"]) == (2, 1)
    assert kinds["conv"] == {"ms_per_step": pytest.approx(0.095), "share": pytest.approx(190 / 310), "calls": 2}
    assert kinds["norm"]["ms_per_step"] == pytest.approx(0.05)
    assert kinds["copy"]["ms_per_step"] == pytest.approx(0.005)
    assert kinds["idle"]["ms_per_step"] == pytest.approx(0.0075)  # 5 and 10, over two steps
    assert table["step_ms"] == pytest.approx(0.155)  # 105 + 5 + 50 busy or idle, and 90 + 10 + 50
    assert table["data_wait"] == {"ms_per_step": pytest.approx(0.004), "share": pytest.approx(0.2)}
    assert [row["kind"] for row in table["longest"]] == ["conv", "norm", "copy"]
    text = profile.as_text({"device": "NVIDIA H200", **table})
    assert text.startswith("steps 5 to 6 on NVIDIA H200: 0.1")
    assert "4 kernels, 2 host syncs, 1 event waits" in text


def test_an_eager_product_of_a_convolution_is_a_convolution():
    gemm = NAMES["matmul"][3]
    events = [
        event("user_annotation", f"{MARK}0", 0, 100),
        event("cpu_op", "aten::cudnn_convolution", 5, 10, **{"External id": 11}),
        event("cpu_op", "aten::addmm", 20, 10, **{"External id": 12}),
        event("cuda_runtime", "cudaLaunchKernel", 6, 1, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 21, 1, correlation=2),
        event("kernel", gemm, 50, 30, correlation=1, **{"External id": 11}),
        event("kernel", gemm, 80, 10, correlation=2, **{"External id": 12}),
    ]
    kinds = tabulate(events, 0.0)["kinds"]
    assert kinds["conv"]["ms_per_step"] == pytest.approx(0.03)
    assert kinds["matmul"]["ms_per_step"] == pytest.approx(0.01)


def test_ops_of_the_host_count_without_the_ops_they_call():
    events = [
        event("user_annotation", f"{MARK}3", 0, 100),
        event("cpu_op", "aten::conv2d", 10, 50),
        event("cpu_op", "aten::mkldnn_convolution", 15, 40),
        event("cpu_op", "aten::copy_", 20, 10),
        event("cpu_op", "aten::add", 60, 20),
        event("cpu_op", "aten::add", 200, 20),  # after the step
    ]
    for order in (events, events[::-1], [*events[3:], *events[:3]]):  # traces have no order
        table = tabulate(order, 0.0)
        shares = {kind: row["share"] for kind, row in table["kinds"].items() if row["share"]}
        assert shares == {
            k: pytest.approx(v) for k, v in {"conv": 0.4, "copy": 0.1, "elementwise": 0.2, "idle": 0.3}.items()
        }
        assert table["kernels"] == 0


def test_of_ops_that_begin_together_the_longer_one_calls_the_other():
    events = [
        event("cpu_op", "aten::copy_", 10, 10),
        event("cpu_op", "aten::conv2d", 10, 50),
        event("cpu_op", "aten::add", 60, 40),  # begins where the one before ends
        event("user_annotation", f"{MARK}3", 0, 100),
    ]
    shares = {kind: row["share"] for kind, row in tabulate(events, 0.0)["kinds"].items() if row["share"]}
    assert shares == {
        k: pytest.approx(v) for k, v in {"conv": 0.4, "copy": 0.1, "elementwise": 0.4, "idle": 0.1}.items()
    }


class Net(nn.Module):
    """Two convolutions, a norm and a head."""

    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4)]
        self.layers = nn.Sequential(*layers)

    def forward(self, pixels):
        return self.layers(pixels)


class Training:
    """Steps of a small network, and a loader's clock that advances by 1 ms per step."""

    def __init__(self):
        self.network = Net()
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1, fused=True)
        self.waited = 0.0

    def run(self, window, numbers):
        for number in numbers:
            with window.step(number):
                self.waited += 1e-3
                self.network(torch.ones(2, 3, 8, 8)).sum().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.waited += 5e-3  # an evaluation also waits for data
            torch.ones(4, 4) @ torch.ones(4, 4)  # and computes


def traced(folder):
    with gzip.open(folder / "profile/trace.json.gz", "rt") as file:
        return json.load(file)["traceEvents"]


def marks(folder):
    return [e["name"] for e in traced(folder) if e.get("cat") == "user_annotation" and e["name"].startswith(MARK)]


def test_exactly_the_steps_of_the_window_are_traced(tmp_path):
    training = Training()
    window = ProfileWindow(parse_window("5,8", 12), tmp_path, CPU, lambda: training.waited)
    training.run(window, range(8))
    assert window.summary == "" and not (tmp_path / "profile").exists()
    training.run(window, range(8, 12))
    assert marks(tmp_path) == [f"{MARK}{number}" for number in (5, 6, 7, 8)]
    table = json.loads((tmp_path / "profile/time.json").read_text())
    assert table["steps"] == [5, 6, 7, 8]
    backward = [e for e in traced(tmp_path) if e.get("name") == "aten::convolution_backward"]
    assert len(backward) == 2 * 4
    assert table["kinds"]["optimizer"]["calls"] == 4 and table["kinds"]["norm"]["calls"] > 0
    products = [e for e in traced(tmp_path) if e.get("cat") == "cpu_op" and kind_of(e["name"]) == "matmul"]
    between_steps = 2 * 3  # aten::matmul and aten::mm after each step but the last
    assert table["kinds"]["matmul"]["calls"] == len(products) - between_steps > 0
    assert sum(row["share"] for row in table["kinds"].values()) == pytest.approx(1, abs=1e-3)
    assert table["data_wait"]["ms_per_step"] == pytest.approx(1.0)
    assert window.take_summary().startswith("steps 5 to 8 on ")
    assert window.take_summary() == "" and window.summary
    assert (tmp_path / "profile/time.txt").read_text() == window.summary + "\n"


def test_a_rewind_in_the_middle_begins_the_window_again(tmp_path):
    training = Training()
    window = ProfileWindow((2, 4), tmp_path, CPU, lambda: 0.0)
    training.run(window, [0, 1, 2, 3, 1, 2, 3, 4, 5, 2, 3, 4])
    assert marks(tmp_path) == [f"{MARK}{number}" for number in (2, 3, 4)]


def test_a_run_resumed_inside_the_window_traces_the_rest(tmp_path):
    window = ProfileWindow((2, 4), tmp_path, CPU, lambda: 0.0)
    Training().run(window, range(3, 6))
    assert marks(tmp_path) == [f"{MARK}3", f"{MARK}4"]


def test_links_that_lie_in_its_folder_are_replaced_and_not_followed(tmp_path):
    names = ("trace.json.gz", "time.json", "time.txt")
    (tmp_path / "profile").mkdir()
    for name in names:
        (tmp_path / "profile" / name).symlink_to(tmp_path / "elsewhere")
    Training().run(ProfileWindow((0, 0), tmp_path, CPU, lambda: 0.0), range(1))
    assert not (tmp_path / "elsewhere").exists()
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == sorted(names)


def test_an_error_inside_the_window_leaves_no_profiler_behind(tmp_path):
    window = ProfileWindow((0, 3), tmp_path, CPU, lambda: 0.0)
    with pytest.raises(KeyError), window.step(0):
        raise KeyError
    assert not (tmp_path / "profile").exists()
    window.close()
    other = ProfileWindow((0, 0), tmp_path, CPU, lambda: 0.0)  # torch allows one profiler at a time
    Training().run(other, range(2))
    assert other.summary


def test_outside_the_window_a_step_costs_nothing(tmp_path):
    window = ProfileWindow((5, 8), tmp_path, CPU, lambda: 0.0)
    assert window.step(4) is window.step(9) is ProfileWindow(None, tmp_path, CPU, lambda: 0.0).step(5)


def test_the_real_step_and_loader_in_a_window(tmp_path):
    flags = """--data.path=synthetic:classes=10,samples=32,size=36 --data.size=32 --model.depth=18 --model.width=8
    --train.global-batch=8 --train.precision=fp32 --run.device=cpu --run.workers=0"""
    recipe, run = config.load("demo_classification", flags.split())
    bound = recipe.data.open("train", 0).bind(CPU, 8)
    ours = OurStep(recipe, run, bound, CPU, True, print, (0, 1))  # has made step 0 already
    window = ProfileWindow((2, 3), tmp_path, CPU, ours.waited_s)
    for number in range(1, 5):
        with window.step(number):
            ours.advance()
    ours.close()
    table = json.loads((tmp_path / "profile/time.json").read_text())
    backward = [e for e in traced(tmp_path) if e.get("name") == "aten::convolution_backward"]
    assert len(backward) == 20 * 2  # ResNet-18: the stem, 16 in its blocks, 3 shortcuts
    assert table["kinds"]["conv"]["share"] > table["kinds"]["matmul"]["share"] > 0
    assert 0 < table["data_wait"]["share"] < 1  # loaded in this process
